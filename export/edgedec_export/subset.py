"""Write a GGUF with some of the layers of another: a draft model with the same vocabulary, for any engine.

    keep_layers("model.gguf", "draft.gguf", parse_layers("0-13,20-27"))
    keep_layers("model.gguf", "draft.gguf", 14)        # evenly spread, the first and the last among them

Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) drafts with the model's own layers, some of them left out. It
searches for a good choice of layers; this file only writes a given choice down, for engines that cannot skip layers.
The logits are bit for bit those of the whole model, run with this LayerSet on a runtime that can skip.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgedec.errors import ModelFormatError, RequestError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGUFArray, ValueType, read_gguf
from edgedec.gguf.metadata import get_int, get_text
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.gguf_writer import Metadata, OutTensor, Value, new_file, read_entries, tensor_pieces, write_gguf
from edgedec_export.hf.config import GEMMA_27B_LAYERS, GEMMA_PERIOD

# In these architectures a layer's number does not decide what it does, in llama.cpp and here.
_UNIFORM = frozenset(
    """
    llama qwen2 qwen3 qwen2moe qwen3moe ernie4_5 glm4 granite granitemoe mistral3 olmoe phi3 seed_oss hunyuan-dense
    minicpm qwen2vl
    """.split()
)
# Metadata arrays with one entry per layer.
_PER_LAYER = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.sliding_window_pattern",
        "expert_feed_forward_length",
        "feed_forward_length",
    }
)
# Metadata numbers that count layers from one end; 0 means that the model has no such layers.
_POSITIONS = tuple(
    """
    full_attention_interval interleave_moe_layer_step leading_dense_block_count nextn_predict_layers
    """.split()
)
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MOST_LAYERS = 4096
KEPT_KEY = "edgedec.kept_layers"
"""The metadata key with the numbers of the kept layers in the whole model."""


def parse_layers(spec: str) -> int | tuple[int, ...]:
    """Read layers as a user writes them: a count, or comma-separated numbers and ranges from 0 on.

    >>> parse_layers("0-2,5"), parse_layers("14"), parse_layers("3,")
    ((0, 1, 2, 5), 14, (3,))

    Raises:
        RequestError: The text is neither, or its numbers do not increase.
    """
    if spec.strip().isdecimal() and len(spec.strip()) <= 6:
        return int(spec)
    layers: list[int] = []
    for part in spec.rstrip(", ").split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last >= _MOST_LAYERS or (layers and first <= layers[-1]):
            raise RequestError(
                f"layers {spec!r}: expected a count such as 14, or numbers from 0 on in increasing order such as "
                "0-13,20-27"
            )
        layers += range(first, last + 1)
    return tuple(layers)


def spread_layers(n_layer: int, count: int) -> tuple[int, ...]:
    """Return `count` of n_layer layer numbers, evenly spread, the first and the last among them (one: the first).

    >>> spread_layers(12, 4)
    (0, 4, 7, 11)
    """
    if not 1 <= count <= n_layer:
        raise RequestError(f"{count} layers are to be kept of a model with {n_layer}; choose 1 to {n_layer}")
    return tuple((2 * i * (n_layer - 1) + count - 1) // max(1, 2 * (count - 1)) for i in range(count))


def keep_layers(
    path: str | Path,
    out: str | Path,
    layers: int | Sequence[int],
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a GGUF with a subset of a model's layers and everything else unchanged, in one file; return its path.

    Args:
        path: The whole model, or the first part of a split one.
        out: The file to write; it appears when it is complete.
        layers: The numbers of the layers to keep, from 0 and increasing; or how many, which are chosen evenly
            (`spread_layers`; for gemma3 in groups of six where six divides the count).
        force: Replace `out` where it exists.

    Raises:
        RequestError: The model has no such layers, they do not increase, or `out` may not be written.
        UnsupportedModelError: A layer's number decides what the layer does, so that the result would compute otherwise.
        ModelFormatError: The file is damaged.
        StorageError: The model cannot be read, or the result cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    gguf = read_gguf(path)
    architecture = get_text(gguf, "general.architecture") or "none"
    n_layer = get_int(gguf, f"{architecture}.block_count", at_least=1, at_most=_MOST_LAYERS)
    if n_layer is None:
        raise ModelFormatError(f"{gguf.paths[0]}: the metadata has no {architecture}.block_count; download it again")
    period = _period(gguf, architecture)
    chosen = _choose(layers, n_layer, period)
    _check_positions(gguf, architecture, n_layer, chosen, period)
    entries = _entries(gguf, architecture, n_layer, chosen)
    tensors = _tensors(gguf, n_layer, chosen)
    with new_file(Path(out), sources=gguf.paths, force=force) as part:
        write_gguf(part, entries, tensors, alignment=gguf.alignment, on_progress=on_progress, cancel=cancel)
        read_gguf(part)
    return Path(out)


def _choose(layers: int | Sequence[int], n_layer: int, period: int) -> tuple[int, ...]:
    """Return the numbers of the layers to keep, checked against the model."""
    if isinstance(layers, int):
        if period > 1 and layers % period == 0 and layers:
            groups = spread_layers(n_layer // period, layers // period)
            return tuple(group * period + i for group in groups for i in range(period))
        return spread_layers(n_layer, layers)
    chosen = tuple(layers)
    increasing = all(a < b for a, b in pairwise(chosen))
    if not chosen or not increasing or chosen[0] < 0 or chosen[-1] >= n_layer:
        raise RequestError(
            f"layers {_ranges(chosen) or None}: expected numbers from 0 to {n_layer - 1} in increasing order"
        )
    return chosen


def _period(gguf: GGUF, architecture: str) -> int:
    """Return after how many layers the kinds of attention repeat: 1 where all are alike, or an array lists them.

    Raises:
        UnsupportedModelError: For this architecture it is not known whether layers may be left out.
    """
    if architecture in _UNIFORM:
        return 1
    if architecture != "gemma3":
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {architecture!r}, where a layer's number may decide what it does; "
            f"choose a model of {', '.join(sorted(_UNIFORM | {'gemma3'}))}"
        )
    key = "gemma3.attention.sliding_window_pattern"
    window = get_int(gguf, "gemma3.attention.sliding_window", at_most=2**31 - 1)
    if not window or isinstance(gguf.metadata.get(key), GGUFArray):
        return 1
    return get_int(gguf, key, at_most=_MOST_LAYERS, at_least=1) or GEMMA_PERIOD


def _check_positions(gguf: GGUF, architecture: str, n_layer: int, chosen: tuple[int, ...], period: int) -> None:
    """Raise UnsupportedModelError if a layer would do something else under its new number."""
    path = gguf.paths[0]
    for key in _POSITIONS:
        if get_int(gguf, f"{architecture}.{key}", at_most=2**31 - 1):
            raise UnsupportedModelError(
                f"{path}: {architecture}.{key} counts layers, so leaving layers out would change what others do; keep "
                "all layers"
            )
    for new, old in enumerate(chosen):
        if (new % period == period - 1) != (old % period == period - 1):
            raise UnsupportedModelError(
                f"{path}: layer {old} would become layer {new}, but every {period}th layer of this model sees the "
                f"whole text and the others a window: keep the first ones (0-{len(chosen) - 1}), or leave out whole "
                f"groups of {period} such as 0-{period - 1}"
            )
    if architecture == "gemma3" and n_layer == GEMMA_27B_LAYERS and len(chosen) != n_layer:
        raise UnsupportedModelError(
            f"{path}: gemma 3 with {n_layer} layers scales its attention in a way that llama.cpp knows by this "
            "number; keep all layers"
        )


def _entries(gguf: GGUF, architecture: str, n_layer: int, chosen: tuple[int, ...]) -> Metadata:
    """Return the metadata of the result."""
    entries: Metadata = {}
    for key, value in read_entries(gguf).items():
        prefix, _, rest = key.partition(".")
        array = gguf.metadata[key]
        if key == f"{architecture}.block_count":
            value = len(chosen)
        elif key == "general.name" and isinstance(array, str):
            value = f"{array} (layers {_ranges(chosen)} of {n_layer})"
        elif prefix == architecture and isinstance(array, GGUFArray):
            value = _cut(gguf, key, rest, array, n_layer, chosen, value)
        if prefix != "split" and key != KEPT_KEY:
            entries[key] = value
    return entries | {KEPT_KEY: np.array(_before(gguf, n_layer, chosen), np.int32)}


def _before(gguf: GGUF, n_layer: int, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Return the kept layers' numbers in the model that was cut first, where this model is a subset itself."""
    before = gguf.metadata.get(KEPT_KEY)
    if isinstance(before, GGUFArray) and before.element_type is ValueType.INT32 and len(before) == n_layer:
        return tuple(int(before.numpy()[layer]) for layer in chosen)
    return chosen


def _cut(
    gguf: GGUF, key: str, rest: str, array: GGUFArray, n_layer: int, chosen: tuple[int, ...], value: Value
) -> Value:
    """Return a per-layer array reduced to the kept layers; `value` for an array that has no entry per layer."""
    if rest in _PER_LAYER:
        if len(array) != n_layer:
            raise ModelFormatError(
                f"{gguf.paths[0]}: {key} has {len(array)} entries for {n_layer} layers; download the file again"
            )
        return array.numpy()[list(chosen)]
    if len(array) == n_layer:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: {key} has {n_layer} entries, as many as the model has layers, and edgedec does not know "
            "whether they belong to layers; keep all layers"
        )
    return value


def _tensors(gguf: GGUF, n_layer: int, chosen: tuple[int, ...]) -> list[OutTensor]:
    """Return the tensors of the result, in the order of the file, with the layers renumbered."""
    number = {old: new for new, old in enumerate(chosen)}
    tensors = []
    used: set[int] = set()
    for tensor in gguf.tensors.values():
        name = tensor.name
        pieces = partial(tensor_pieces, gguf, name)
        match = _BLOCK.fullmatch(name)
        if match:
            layer = int(match[1])
            if layer >= n_layer:
                raise UnsupportedModelError(
                    f"{gguf.paths[0]}: tensor {name!r} belongs to none of the {n_layer} layers; keep all layers"
                )
            used.add(layer)
            if layer not in number:
                continue
            name = f"blk.{number[layer]}.{match[2]}"
        tensors.append(OutTensor(name, tensor.shape, tensor.type, pieces))
    missing = set(chosen) - used
    if missing:
        raise ModelFormatError(f"{gguf.paths[0]}: layer {min(missing)} has no tensors; download the file again")
    return tensors


def _ranges(layers: Sequence[int]) -> str:
    """Return layers as a text that `parse_layers` reads.

    >>> _ranges((0, 1, 2, 5))
    '0-2,5'
    """
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)

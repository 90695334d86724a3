"""Export to GGUF: another type, a subset of the layers, a Hugging Face checkpoint, or several of these in one go.

export_gguf("model.gguf", "small.gguf", type_name="Q4_K_M")
export_gguf("model.gguf", "draft.gguf", layers="0-13,20-27")
export_gguf("checkpoint/", "model.gguf", type_name="Q8_0")
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.from_hf import TYPES as CHECKPOINT_TYPES
from edgedec_export.from_hf import convert
from edgedec_export.gguf_writer import (
    PIECE_BYTES,
    OutTensor,
    check_out,
    new_file,
    read_entries,
    tensor_pieces,
    write_gguf,
)
from edgedec_export.hf.types import ENCODERS
from edgedec_export.packing.rows import read_rows
from edgedec_export.requantize import TYPES, requantize
from edgedec_export.subset import keep_layers, parse_layers
from edgedec_export.temporary import temporary_path
from edgedec_runtimes.weights.adapter_pairs import AdapterPair
from edgedec_runtimes.weights.adapters import load_adapters
from edgedec_runtimes.weights.levels import dequantize

__all__ = ["TYPES", "convert", "export_gguf", "keep_layers", "requantize"]


def export_gguf(  # nine parameters: the source, the result, and one for each option of `edgedec export --to gguf`
    source: str | Path,
    out: str | Path,
    *,
    type_name: str | None = None,
    layers: str | int | Sequence[int] | None = None,
    lora: Sequence[tuple[Path, float]] = (),
    allow_requantize: bool = False,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a GGUF made from another GGUF or from a checkpoint, and return its path.

    The steps are, in this order: convert the checkpoint, merge adapters, keep the layers, convert to the type. Where
    there are several, the files between them are written beside `out` and deleted.

    Args:
        source: A GGUF, the first part of a split one, or a folder with config.json, tokenizer.json and safetensors.
        out: The file to write; it appears when it is complete.
        type_name: A name of `TYPES`, in any case; None keeps the types of the source.
        layers: The layers to keep, as `keep_layers` takes them, or a text as `parse_layers` reads it; None keeps all.
        lora: Low-rank adapters that are merged into the weights, each with its scale (merge_adapters).
        allow_requantize: Allow matrices to be quantized that are quantized already, which loses more.
        force: Replace `out` where it exists.

    Raises:
        RequestError: Neither a type nor layers nor adapters were given for a GGUF, or a value is not a valid one.
        ModelError: The source is damaged, missing, or of a kind that is not supported.
        RuntimeUnavailableError: The type needs llama-cpp-python, which is absent.
        StorageError: The source cannot be read, or the result cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    source, out = Path(source), Path(out)
    check_out(out, [source], force)
    chosen = parse_layers(layers) if isinstance(layers, str) else layers
    name = type_name.upper() if type_name is not None else None
    if name is not None and name not in TYPES:
        raise RequestError(f"type {type_name!r}: expected one of {', '.join(TYPES)}")
    steps = []
    if source.is_dir():
        # The checkpoint's converter writes these types itself; llama.cpp's quantizer makes all others from its floats.
        by_us = name if name in CHECKPOINT_TYPES else None
        steps.append(partial(convert, type_name=by_us or "KEEP"))
        name = None if by_us else name
    if lora:
        steps.append(partial(merge_adapters, adapters=lora))
    if chosen is not None:
        steps.append(partial(keep_layers, layers=chosen))
    if name is not None:
        steps.append(partial(requantize, type_name=name, allow_requantize=allow_requantize))
    if not steps:
        raise RequestError(f"{source}: nothing to do, expected a type, layers, adapters, or a folder with a checkpoint")
    return _chain(steps, source, out, force, on_progress, cancel)


def _chain(
    steps: Sequence["partial[Path]"],
    source: Path,
    out: Path,
    force: bool,
    on_progress: OnProgress | None,
    cancel: CancelToken | None,
) -> Path:
    """Run the steps in order, each on the file that the step before it wrote."""
    place = out.absolute().with_name(f"{out.name}-steps")
    with temporary_path(place) as folder:
        folder.mkdir()
        for i, step in enumerate(steps):
            last = i == len(steps) - 1
            target = out if last else folder / f"{i}.gguf"
            step(source, target, force=force and last, on_progress=on_progress, cancel=cancel)
            if i > 0:
                source.unlink()
            source = target
    return out


Scaled = tuple[AdapterPair, float]


def merge_adapters(
    path: str | Path,
    out: str | Path,
    adapters: Sequence[tuple[Path, float]],
    *,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Path:
    """Write a GGUF whose weights have adapters merged into them, in one file, and return its path.

    A changed matrix keeps its type where that is a float type or Q8_0, and becomes F16 otherwise: to quantize it again
    is a step of its own. A sum is computed in float64 and rounded once.

    Args:
        path: The model, or the first part of a split one.
        out: The file to write; it appears when it is complete.
        adapters: GGUFs or folders of PEFT, each with its scale; they are added in this order.
        force: Replace `out` where it exists.

    Raises:
        RequestError: `out` may not be written.
        ModelFormatError, UnsupportedModelError: The model is damaged, or an adapter does not fit it (load_adapters).
        StorageError: A file cannot be read, or the result cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    gguf, scales = read_gguf(path), [scale for _, scale in adapters]
    adapters_read = load_adapters([adapter for adapter, _ in adapters], gguf)
    tensors = []
    for tensor in gguf.tensors.values():
        pairs = [
            (a.pairs[tensor.name], s) for a, s in zip(adapters_read, scales, strict=True) if tensor.name in a.pairs
        ]
        kind = tensor.type if not pairs or tensor.type in ENCODERS else GGMLType.F16
        pieces = partial(_merged, gguf, tensor, kind, pairs) if pairs else partial(tensor_pieces, gguf, tensor.name)
        tensors.append(OutTensor(tensor.name, tensor.shape, kind, pieces))
    with new_file(Path(out), sources=gguf.paths, force=force) as part:
        changed = any(made.type is not gguf.tensors[made.name].type for made in tensors)
        entries = {key: v for key, v in read_entries(gguf).items() if not changed or key != "general.file_type"}
        write_gguf(part, entries, tensors, alignment=gguf.alignment, on_progress=on_progress, cancel=cancel)
        read_gguf(part)
    return Path(out)


def _merged(gguf: GGUF, tensor: TensorInfo, kind: GGMLType, pairs: Sequence[Scaled]) -> Iterator[bytes]:
    """Yield the bytes of a matrix with the products of pairs added, some rows at a time."""
    for begin, raw in read_rows(gguf, tensor, PIECE_BYTES // 8):
        rows = dequantize(tensor.type, raw).astype(np.float64)
        for pair, scale in pairs:
            rows += pair.rows(begin, begin + len(rows)).delta(scale)
        yield ENCODERS[kind](rows.astype(np.float32))

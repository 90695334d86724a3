"""Convert the tensors of a checkpoint to those of a GGUF: names, shapes, order of rows, and types.

A GGUF has the experts of a layer in one tensor, one after another.

Rows of queries and keys are reordered for some architectures. Gemma's norms are stored as what is added to 1.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import FLOATS, floats
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.gguf_writer import PIECE_BYTES, OutTensor, file_pieces
from edgedec_export.hf.config import Config
from edgedec_export.hf.denoising import usual_name
from edgedec_export.hf.types import ENCODERS
from edgedec_runtimes.weights.checkpoint_names import (
    BIASES,
    IN_NEIGHBOURS,
    LAYER_NAME,
    LAYER_NAMES,
    OUTER_NAMES,
    TEXT_PREFIXES,
    to_neighbours,
)
from edgedec_runtimes.weights.safetensors import ITEM_BYTES, Tensor

_FLOAT_NAMES = frozenset(kind.name for kind in FLOATS)  # the same names as in GGUF: F32, F16 and BF16
_OPTIONAL = {"llama": frozenset(BIASES.values())}
_EXPERT_NAME = re.compile(r"(mlp\.experts\.)(0|[1-9]\d{0,5})\.(.+)")
_NOT_TEXT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")


def gguf_tensors(
    checkpoint: Mapping[str, Tensor], config: Config, matrix_type: GGMLType | None, path: Path
) -> list[OutTensor]:
    """Return all tensors of the GGUF, in the order of a forward.

    Args:
        checkpoint: The checkpoint's tensors by name.
        matrix_type: Type of the matrices; None keeps their types. Vectors become F32.
        path: The checkpoint, for messages.

    Raises:
        ModelFormatError: A tensor is missing, or has another shape than the configuration says.
        UnsupportedModelError: A tensor has no place in the GGUF.
    """
    shapes = _shapes(config)
    placed = _place(checkpoint, config, path)
    tensors = []
    if config.rope_divisors is not None:
        data = config.rope_divisors.astype("<f4").tobytes()
        tensors.append(OutTensor("rope_freqs.weight", config.rope_divisors.shape, GGMLType.F32, lambda: iter([data])))
    for name in _names(config):
        short = name.split(".", 2)[2] if name.startswith("blk.") else name
        is_expert = short.endswith("_exps.weight")
        numbers = range(config.n_expert if is_expert else 1)
        if any((name, number) not in placed for number in numbers):
            if short in _OPTIONAL.get(config.architecture, ()):
                continue
            raise ModelFormatError(f"{path}: the tensor for {name!r} is missing; download the whole checkpoint")
        parts = [placed[name, number] for number in numbers]
        for part in parts:
            require_floats(part, shapes[short])
        shape = parts[0].shape[::-1] + ((len(parts),) if is_expert else ())
        kind = GGMLType.F32 if short == "ffn_gate_inp.weight" else matrix_kind(parts[0], matrix_type)
        tensors.append(OutTensor(name, shape, kind, partial(_joined, parts, short, kind, config)))
    return tensors


def _place(tensors: Mapping[str, Tensor], config: Config, path: Path) -> dict[tuple[str, int], Tensor]:
    """Return the checkpoint's tensors by their name in the GGUF, and their number among the experts or 0."""
    placed: dict[tuple[str, int], Tensor] = {}
    for full_name, tensor in tensors.items():
        name = usual_name(full_name)
        if _BUFFERS.fullmatch(name) or (config.architecture == "gemma3" and _NOT_TEXT.fullmatch(name)):
            continue
        prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
        rest = name[len(prefix) :]
        layer = LAYER_NAME.fullmatch(rest)
        target, number = OUTER_NAMES.get(rest), 0
        if layer and int(layer[1]) < config.n_layer:
            expert, short = _EXPERT_NAME.fullmatch(layer[2]), layer[2]
            if expert and int(expert[2]) < config.n_expert:
                number, short = int(expert[2]), expert[1] + expert[3]
            ours = LAYER_NAMES[config.architecture].get(short)
            target = f"blk.{layer[1]}.{ours}" if ours else None
        if target is None or (target, number) in placed:
            raise UnsupportedModelError(
                f"{path}: tensor {name!r} does not belong to a {config.architecture} model of {config.n_layer} layers, "
                "or occurs twice; use llama.cpp's convert_hf_to_gguf.py where it supports this"
            )
        placed[target, number] = tensor
    if config.tied:
        placed.pop(("output.weight", 0), None)
    return placed


def _names(config: Config) -> Iterator[str]:
    """Yield the names in the GGUF, in the order of a forward."""
    yield "token_embd.weight"
    for layer in range(config.n_layer):
        yield from (f"blk.{layer}.{short}" for short in LAYER_NAMES[config.architecture].values())
    yield "output_norm.weight"
    if not config.tied:
        yield "output.weight"


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return shapes, in the checkpoint's order, by name in the GGUF without the layer's number."""
    c, n_q, n_kv = config, config.n_head * config.head_dim, config.n_head_kv * config.head_dim
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (c.n_embd,) for name in norms}
    normed = (n_q, n_kv) if c.architecture == "olmo2" else (c.head_dim, c.head_dim)
    shapes |= {"attn_q_norm.weight": normed[:1], "attn_k_norm.weight": normed[1:]}
    shapes |= {"attn_q.bias": (n_q,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    shapes |= dict.fromkeys(("token_embd.weight", "output.weight"), (c.n_vocab, c.n_embd))
    shapes |= {"attn_q.weight": (n_q, c.n_embd), "attn_k.weight": (n_kv, c.n_embd), "attn_v.weight": (n_kv, c.n_embd)}
    shapes |= dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (c.n_ff, c.n_embd))
    shapes |= {"ffn_gate_inp.weight": (c.n_expert, c.n_embd), "ffn_down_exps.weight": (c.n_embd, c.n_ff_expert)}
    shapes |= dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (c.n_ff_expert, c.n_embd))
    return shapes | {"attn_output.weight": (c.n_embd, n_q), "ffn_down.weight": (c.n_embd, c.n_ff)}


def require_floats(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelFormatError unless a tensor holds floats and has this shape."""
    if tensor.shape != shape or tensor.dtype not in _FLOAT_NAMES:
        raise ModelFormatError(
            f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}, expected floats of "
            f"{list(shape)}; take the checkpoint that is not quantized, with its own config.json"
        )


def float_pieces(tensor: Tensor, kind: GGMLType) -> Iterator[bytes]:
    """Yield the bytes of a tensor that is converted to another type and not changed otherwise."""
    if kind is GGMLType[tensor.dtype]:
        yield from file_pieces(tensor.path, tensor.offset, tensor.n_bytes)
        return
    for rows in _rows(tensor, 1):
        yield ENCODERS[kind](rows)


def matrix_kind(tensor: Tensor, matrix_type: GGMLType | None) -> GGMLType:
    """Return the type that a tensor gets; rows that are not whole blocks of the type keep theirs."""
    if len(tensor.shape) == 1:
        return GGMLType.F32
    kind = GGMLType[tensor.dtype]
    return kind if matrix_type is None or tensor.shape[-1] % matrix_type.block_size else matrix_type


def _joined(tensors: list[Tensor], short: str, kind: GGMLType, config: Config) -> Iterator[bytes]:
    """Yield the bytes of tensors one after another."""
    for tensor in tensors:
        yield from _pieces(tensor, short, kind, config)


def _pieces(tensor: Tensor, short: str, kind: GGMLType, config: Config) -> Iterator[bytes]:
    """Yield a tensor's bytes in the GGUF."""
    permuted = config.architecture in IN_NEIGHBOURS and short.startswith(("attn_q.", "attn_k."))
    added_to_1 = config.architecture == "gemma3" and short.endswith("norm.weight")
    if not permuted and not added_to_1:
        yield from float_pieces(tensor, kind)
        return
    is_vector = len(tensor.shape) == 1
    for rows in _rows(tensor, 1 if is_vector or not permuted else config.head_dim):
        if permuted:
            rows = to_neighbours(rows.reshape(-1, 1 if is_vector else rows.shape[1]), config.head_dim)
        yield ENCODERS[kind](rows + np.float32(1) if added_to_1 else rows)


def _rows(tensor: Tensor, multiple: int) -> Iterator[NDArray[np.float32]]:
    """Yield a tensor as float32[n_rows, n_columns], some rows at a time; a vector is one row.

    Args:
        tensor: It holds floats, as require_floats has found.
        multiple: The number of rows of each piece is a multiple of this, except in the last piece.

    Raises:
        ModelFormatError, StorageError: The file has become shorter, or cannot be read.
    """
    n_columns = tensor.shape[-1]
    row_bytes = n_columns * ITEM_BYTES[tensor.dtype]
    n_rows = max(1, PIECE_BYTES // row_bytes // multiple) * multiple
    piece_bytes = n_rows * row_bytes
    for start in range(0, tensor.n_bytes, piece_bytes):
        n_bytes = min(piece_bytes, tensor.n_bytes - start)
        data = b"".join(file_pieces(tensor.path, tensor.offset + start, n_bytes))
        yield floats(GGMLType[tensor.dtype], np.frombuffer(data, np.uint8)).reshape(-1, n_columns)

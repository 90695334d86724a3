"""Write a narrow draft model as an ordinary GGUF of the architecture llama, with the target's tokenizer."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import FILE_TYPE_NAMES, GGMLType
from edgedec_export.block_types import BLOCK_ENCODERS
from edgedec_export.gguf_writer import Metadata, OutTensor, decoder_metadata, new_file, read_entries, write_gguf
from edgedec_export.training.narrow.shape import NarrowShape
from edgedec_export.training.target_parts import TargetParts

Floats = NDArray[np.float32]

MATRIX_TYPE = GGMLType.Q8_0
"""The type of all matrices; with an output matrix in Q4_0, a third to a half of the accepted tokens were lost."""
RECORD_KEY = "edgedec.draft_model"
"""The metadata key with the target's hashes, the recipe and the report, as JSON."""

_ROWS_AT_ONCE = 4096
_NAMES = {
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def bytes_per_token(shape: NarrowShape) -> int:
    """Return the bytes of weights that a drafted token reads: all layers, and the output matrix."""
    n_output = shape.n_vocab * shape.n_embd
    return (shape.n_layer_weights + n_output) // MATRIX_TYPE.block_size * MATRIX_TYPE.block_bytes


def write_narrow(out: Path, parts: TargetParts, shape: NarrowShape, weights: dict[str, Floats], record: str) -> None:
    """Write the draft model; a file that is there is replaced when the new one is complete.

    Args:
        out: The file.
        parts: The target, whose embedding and output matrix are multiplied by `enter` and `leave`.
        shape: The draft model's shape.
        weights: float32 arrays by the names of `initial.initial_weights`.
        record: What RECORD_KEY holds.

    Raises:
        RequestError: `out` is a folder, or the target's file.
        UnsupportedModelError: A number is beyond what the types hold.
        StorageError: The file can't be written.
    """
    tensors = [
        _product("token_embd.weight", parts.embeddings, weights["enter"], shape.n_vocab),
        _product("output.weight", parts.output_rows, weights["leave"], shape.n_vocab),
        _tensor("output_norm.weight", weights["output_norm"]),
    ]
    for i in range(shape.n_layer):
        layer = {name: weights[f"{i}.{name}"] for name in _NAMES if f"{i}.{name}" in weights}
        tensors += [_tensor(f"blk.{i}.{_NAMES[name]}", values) for name, values in layer.items()]
    entries = _entries(parts, shape, out.stem, record)
    with new_file(out, sources=parts.gguf.paths, force=True) as part:
        write_gguf(part, entries, tensors)


def _tensor(name: str, values: Floats) -> OutTensor:
    kind = MATRIX_TYPE if values.ndim == 2 else GGMLType.F32
    return OutTensor(name, values.shape[::-1], kind, lambda: iter([BLOCK_ENCODERS[kind](values)]))


def _product(name: str, rows: Callable[[NDArray[np.integer]], Floats], matrix: Floats, n_rows: int) -> OutTensor:
    """Return a tensor with the rows of one of the target's matrices times `matrix`."""
    return OutTensor(name, (matrix.shape[1], n_rows), MATRIX_TYPE, partial(_products, rows, matrix, n_rows))


def _products(rows: Callable[[NDArray[np.integer]], Floats], matrix: Floats, n_rows: int) -> Iterator[bytes]:
    for begin in range(0, n_rows, _ROWS_AT_ONCE):
        yield BLOCK_ENCODERS[MATRIX_TYPE](rows(np.arange(begin, min(n_rows, begin + _ROWS_AT_ONCE))) @ matrix)


def _entries(parts: TargetParts, shape: NarrowShape, name: str, record: str) -> Metadata:
    numbers = {kind: number for number, kind in FILE_TYPE_NAMES.items()}
    tokenizer = {key: value for key, value in read_entries(parts.gguf).items() if key.startswith("tokenizer.")}
    return {
        "general.architecture": "llama",
        "general.name": name,
        **decoder_metadata("llama", shape, n_layer=shape.n_layer, n_ctx=shape.n_ctx_train, n_rot=shape.n_rot),
        "llama.vocab_size": shape.n_vocab,
        RECORD_KEY: record,
        "general.file_type": numbers[MATRIX_TYPE.name],
        **tokenizer,
    }

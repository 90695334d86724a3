"""Merge low-rank adapters into the weights of a GGUF.

merge_adapters("model.gguf", "merged.gguf", [(Path("tone.gguf"), 1.0)])
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec.progress import CancelToken, OnProgress
from edgedec_export.gguf_writer import PIECE_BYTES, OutTensor, new_file, read_entries, tensor_pieces, write_gguf
from edgedec_export.hf.types import ENCODERS
from edgedec_runtimes.weights.adapter_pairs import AdapterPair
from edgedec_runtimes.weights.adapters import load_adapters
from edgedec_runtimes.weights.levels import dequantize

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
    found = load_adapters([adapter for adapter, _ in adapters], gguf)
    tensors = []
    for tensor in gguf.tensors.values():
        pairs = [(a.pairs[tensor.name], s) for a, s in zip(found, scales, strict=True) if tensor.name in a.pairs]
        kind = tensor.type if not pairs or tensor.type in ENCODERS else GGMLType.F16
        pieces = partial(_merged, gguf, tensor, kind, pairs) if pairs else partial(tensor_pieces, gguf, tensor.name)
        tensors.append(OutTensor(tensor.name, tensor.shape, kind, pieces))
    with new_file(Path(out), sources=gguf.paths, force=force) as part:
        changed = any(made.type is not gguf.tensors[made.name].type for made in tensors)
        entries = [entry for entry in read_entries(gguf) if not changed or entry[0] != "general.file_type"]
        write_gguf(part, entries, tensors, alignment=gguf.alignment, on_progress=on_progress, cancel=cancel)
        read_gguf(part)
    return Path(out)


def _merged(gguf: GGUF, tensor: TensorInfo, kind: GGMLType, pairs: Sequence[Scaled]) -> Iterator[bytes]:
    """Yield the bytes of a matrix with the products of pairs added, some rows at a time."""
    n_cols, n_rows = tensor.shape
    row_bytes, each = tensor.n_bytes // n_rows, max(1, PIECE_BYTES // (8 * n_cols))
    for begin in range(0, n_rows, each):
        end = min(begin + each, n_rows)
        data = gguf.read_tensor_bytes(tensor.name, begin * row_bytes, (end - begin) * row_bytes)
        rows = dequantize(tensor.type, np.frombuffer(data, np.uint8).reshape(end - begin, row_bytes)).astype(np.float64)
        for pair, scale in pairs:
            rows += pair.rows(begin, end).delta(scale)
        yield ENCODERS[kind](rows.astype(np.float32))

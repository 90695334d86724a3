"""Write GGUF files: metadata as plain values, tensors in pieces, the whole file or nothing.

    with new_file(Path("model.gguf")) as part:
        write_gguf(part, {"general.architecture": "llama"}, tensors)

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec.gguf.file import GGUF, ValueType, reading
from edgedec.gguf.header import DEFAULT_ALIGNMENT
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.values import HeaderReader
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.storage.whole_file import publish
from edgedec_export.temporary import storage_errors, temporary_path

if TYPE_CHECKING:
    from edgedec_export.hf.config import Config
    from edgedec_export.training.narrow.shape import NarrowShape
    from edgedec_runtimes.trained_heads.card import HeadCard

PIECE_BYTES = 4 << 20
Value = str | bool | int | float | bytes | list[bytes] | NDArray[Any]
Metadata = dict[str, Value]
"""What a file says of its model, by key, in the order of the file."""

_VERSION = 3


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write.

    Attributes:
        shape: Sizes in ggml's order: shape[0] is the length of a row.
        pieces: Returns an iterator over the tensor's bytes in order, in pieces of any size.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    pieces: Callable[[], Iterator[bytes]]

    @property
    def n_bytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


def encoded(value: Value) -> bytes:
    """Encode a value as in the file: four bytes for its type, then its content.

    Args:
        value: A text, True or False, an integer from 0 to 2^32 - 1 (UINT32), a float (FLOAT32), UTF-8 strings, or a
            vector of numpy. Bytes stay as they are: so an entry that was copied from another file keeps its type.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _typed(ValueType.STRING) + _string(value.encode(errors="replace"))
    if isinstance(value, bool):
        return _typed(ValueType.BOOL) + struct.pack("<?", value)
    if isinstance(value, int):
        return _typed(ValueType.UINT32) + struct.pack("<I", value)
    if isinstance(value, float):
        return _typed(ValueType.FLOAT32) + struct.pack("<f", value)
    if isinstance(value, list):
        return _array(ValueType.STRING, len(value), b"".join(map(_string, value)))
    little = value.astype(value.dtype.newbyteorder("<"))
    return _array(ValueType[value.dtype.name.upper()], len(value), little.tobytes())


def decoder_metadata(
    prefix: str, shape: "Config | HeadCard | NarrowShape", *, n_layer: int, n_ctx: int, n_rot: int
) -> Metadata:
    """Return what every decoder's file says of its shape, under keys that begin with the architecture `prefix`."""
    values: Metadata = {
        "block_count": n_layer,
        "context_length": n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.rms_epsilon),
        "rope.dimension_count": n_rot,
        "rope.freq_base": float(shape.rope_base),
    }
    return {f"{prefix}.{key}": value for key, value in values.items()}


def read_entries(gguf: GGUF) -> Metadata:
    """Return the metadata of an opened GGUF, each value encoded as in the file.

    Raises:
        ModelFormatError, StorageError: The file has changed since it was opened, or cannot be read.
    """
    entries: Metadata = {}
    reader = HeaderReader(BytesIO(gguf.read_header_bytes()), gguf.n_bytes, str(gguf.paths[0]))
    reader.take(16, "the header")
    for i in range(reader.u64("the number of metadata entries")):
        key = reader.name_of(f"metadata key {i}", 2**16 - 1)
        start = reader.position
        reader.value(key)
        entries[key] = bytes(reader.buffer[start : reader.position])
    return entries


def tensor_pieces(gguf: GGUF, name: str) -> Iterator[bytes]:
    """Yield the bytes of a tensor, PIECE_BYTES at a time (raises what GGUF.read_tensor_bytes raises)."""
    n_bytes = gguf.tensors[name].n_bytes
    for start in range(0, n_bytes, PIECE_BYTES):
        yield gguf.read_tensor_bytes(name, start, min(PIECE_BYTES, n_bytes - start))


def file_pieces(path: Path, offset: int, n_bytes: int) -> Iterator[bytes]:
    """Yield n_bytes of a file from `offset` on, PIECE_BYTES at a time.

    Raises:
        ModelFormatError: The file ends too early.
        StorageError: The file cannot be read.
    """
    with reading(path), path.open("rb") as file:
        file.seek(offset)
        left = n_bytes
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                raise ModelFormatError(
                    f"{path}: the file has become shorter since it was opened, {left} bytes are missing; copy it again"
                )
            left -= len(piece)
            yield piece


def write_gguf(
    path: Path,
    metadata: Metadata,
    tensors: Sequence[OutTensor],
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> None:
    """Write a GGUF file, with one piece of a tensor in memory at a time.

    Args:
        metadata: Must include general.alignment where `alignment` is not the default.
        on_progress: Called with the phase "write" and the bytes written.

    Raises:
        StorageError: The disk has too little free space.
        OSError: The file cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    header = _header(metadata, tensors, alignment)
    total = len(header) + sum(_aligned(tensor.n_bytes, alignment) for tensor in tensors)
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise StorageError(f"{path.parent}: the export needs {total} bytes, but {free} are free; make room")
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            n_written = 0
            for piece in tensor.pieces():
                check_cancelled(cancel, "export")
                n_written += file.write(piece)
                report_progress(on_progress, "write", file.tell(), total, "bytes", "tensors")
            assert n_written == tensor.n_bytes, f"{tensor.name}: {n_written} bytes, expected {tensor.n_bytes}"
            file.write(bytes(_aligned(n_written, alignment) - n_written))


@contextmanager
def new_file(out: Path, *, sources: Sequence[Path] = (), force: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `out`, and rename it to `out` when the block ends without an error; else delete it.

    Args:
        sources: Files that the block reads: `out` must be none of them.
        force: Replace `out` where it exists.

    Raises:
        RequestError: `out` is a directory, one of the sources, or exists and `force` is false.
        StorageError: The file cannot be written or renamed.
    """
    check_out(out, sources, force)
    with temporary_path(out) as part:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        publish(part, out)


def check_out(out: Path, sources: Sequence[Path], force: bool) -> None:
    """Check that a result may be written to `out`.

    Raises:
        RequestError: `out` is a directory, one of the sources, or exists and `force` is false.
        StorageError: The system does not let us look at `out`.
    """
    if out.is_dir():
        raise RequestError(
            f"{out}: this is a directory, expected the name of a file to write, such as {out / 'model.gguf'}"
        )
    with storage_errors(out):
        if not out.exists():
            return
        if any(source.exists() and os.path.samefile(out, source) for source in sources):
            raise RequestError(f"{out}: this is the model to export; choose another name for the result")
        if not force:
            raise RequestError(f"{out}: the file exists; choose another name, or replace it with force (--force)")


def _header(metadata: Metadata, tensors: Sequence[OutTensor], alignment: int) -> bytes:
    """Return everything before the tensor data, padded to the alignment."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key.encode()) + encoded(value)
    offset = 0
    for tensor in tensors:
        out += _string(tensor.name.encode()) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset)
        offset += _aligned(tensor.n_bytes, alignment)
    return bytes(out) + bytes(_aligned(len(out), alignment) - len(out))


def _aligned(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _array(element_type: ValueType, n: int, data: bytes) -> bytes:
    return _typed(ValueType.ARRAY) + struct.pack("<IQ", element_type, n) + data


def _typed(value_type: ValueType) -> bytes:
    return struct.pack("<I", value_type)

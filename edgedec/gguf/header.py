"""The header of one GGUF file: magic, version, counts, key-value pairs and tensor infos.

Every count, length and offset is checked against the file's size and against the rest of the header, so the result of
`read_header` can be used without further checks. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import BinaryIO

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.tensor_types import REMOVED_TYPES, GGMLType
from edgedec.gguf.values import HeaderReader, Value, show

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# No model comes near these limits; they bound the time and the memory that a hostile file can cost.
MAX_KEYS = 2**16
MAX_TENSORS = 2**18
MAX_KEY_BYTES = 2**16 - 1
MAX_TENSOR_NAME_BYTES = 255
MAX_ALIGNMENT = 2**30


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file, its shape and its type.

    Attributes:
        shape: Number of elements by dimension in ggml's order: shape[0] is the length of a row.
        offset: Its first byte, counted from the start of its shard.
        n_bytes: What it takes in the file.
        shard: Index of the part of the model that holds it, in `GGUF.paths`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    n_bytes: int
    shard: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file.

    Attributes:
        raw: Its bytes, up to the end of the last tensor info.
    """

    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    alignment: int
    raw: memoryview = field(repr=False)


def read_header(file: BinaryIO, n_bytes: int, name: str, *, shard: int = 0) -> Header:
    """Return the checked header of one GGUF file, whose first four bytes were already recognised.

    Args:
        file: The file, at its start.
        n_bytes: The file's size.
        name: The file's name, for messages.
        shard: The file's index in `GGUF.paths`.

    Raises:
        ModelFormatError: The header is truncated, damaged, or contradicts itself.
        UnsupportedModelError: Its version, its byte order or the type of a tensor is not one that edgedec reads.
    """
    reader = HeaderReader(file, n_bytes, name)
    reader.take(4, "the magic number")
    version = _check_version(reader)
    n_tensors = reader.u64("the number of tensors")
    n_keys = reader.u64("the number of metadata entries")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        most = f"at most {MAX_TENSORS} and {MAX_KEYS}"
        reader.fail(f"it claims {n_tensors} tensors and {n_keys} metadata entries, {most}")
    # The shortest entry is a key of one byte with a value of one byte; the shortest tensor info, a name of one byte and
    # no dimensions.
    reader.require(14 * n_keys + 25 * n_tensors, f"{n_keys} metadata entries and {n_tensors} tensors")
    metadata: dict[str, Value] = {}
    for i in range(n_keys):
        key = reader.name_of(f"metadata key {i}", MAX_KEY_BYTES)
        if key in metadata:
            reader.fail(f"metadata key {key[:80]!r} is there twice")
        metadata[key] = reader.value(f"metadata {key[:80]!r}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {show(alignment)}, expected a power of two up to {MAX_ALIGNMENT}")
    tensors = _read_tensors(reader, n_tensors, shard)
    raw = memoryview(reader.buffer)[: reader.position]
    return Header(version, metadata, _place(reader, tensors, alignment, n_bytes), alignment, raw)


def _check_version(reader: HeaderReader) -> int:
    version = reader.u32("the version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModelError(f"{reader.name}: a big-endian GGUF; edgedec reads little endian: download that one")
    if version == 0 or version > 255:
        reader.fail(f"its GGUF version is {version}, expected 2 or 3")
    remedy = "convert or download it in version 3" if version < 2 else "update edgedec, or download it in version 3"
    raise UnsupportedModelError(f"{reader.name}: GGUF version {version}; edgedec reads versions 2 and 3: {remedy}")


def _read_tensors(reader: HeaderReader, n_tensors: int, shard: int) -> list[TensorInfo]:
    """Return the tensor infos, with offsets that count from the start of the tensor data."""
    tensors: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        name = reader.name_of(f"the name of tensor {i}", MAX_TENSOR_NAME_BYTES)
        what = f"tensor {name!r}"
        if name in tensors:
            reader.fail(f"{what} is there twice")
        n_dimensions = reader.u32(what)
        if n_dimensions > MAX_DIMENSIONS:
            reader.fail(f"{what} has {n_dimensions} dimensions, at most {MAX_DIMENSIONS}")
        shape = tuple(reader.u64(what) for _ in range(n_dimensions))
        ggml_type = _tensor_type(reader, what)
        offset = reader.u64(what)
        n_elements = math.prod(shape)
        row = shape[0] if shape else 1
        if not 0 < n_elements < 2**63:
            reader.fail(f"{what} has the shape {shape}, expected 1 to 2^63 - 1 elements")
        if row % ggml_type.block_size:
            reader.fail(f"{what} has rows of {row}, expected a multiple of {ggml_type.name}'s {ggml_type.block_size}")
        n_bytes = n_elements // ggml_type.block_size * ggml_type.block_bytes
        tensors[name] = TensorInfo(name, shape, ggml_type, offset, n_bytes, shard)
    return list(tensors.values())


def _tensor_type(reader: HeaderReader, what: str) -> GGMLType:
    number = reader.u32(what)
    try:
        return GGMLType(number)
    except ValueError:
        pass
    if number in REMOVED_TYPES:
        type_name = f"{number} ({REMOVED_TYPES[number]}, which ggml no longer has)"
        remedy = "download the model in another quantization, such as Q4_0 or Q4_K_M"
    else:
        type_name = f"{number}, which edgedec does not know"
        remedy = "it may come from a newer llama.cpp or from a fork: update edgedec, or download another quantization"
    raise UnsupportedModelError(f"{reader.name}: {what} has the type number {type_name}; {remedy}")


def _place(reader: HeaderReader, tensors: list[TensorInfo], alignment: int, n_bytes: int) -> dict[str, TensorInfo]:
    """Return the tensors by name, with offsets that count from the start of the file.

    Refuse a tensor that is not aligned, overlaps another one or reaches beyond the end of the file.
    """
    data_start = -(-reader.position // alignment) * alignment
    placed: dict[str, TensorInfo] = {}
    for t in tensors:
        if t.offset % alignment:
            reader.fail(f"tensor {t.name!r} is at offset {t.offset}, expected a multiple of {alignment}")
        start = data_start + t.offset
        if start + t.n_bytes > n_bytes:
            reader.fail(f"tensor {t.name!r} ends at byte {start + t.n_bytes}, but the file has {n_bytes}")
        placed[t.name] = TensorInfo(t.name, t.shape, t.type, start, t.n_bytes, t.shard)
    in_order = sorted(placed.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(in_order):
        if before.offset + before.n_bytes > after.offset:
            reader.fail(f"tensors {before.name!r} and {after.name!r} overlap")
    return placed

"""Read safetensors files within hard bounds: a single file, or those that an index names.

    tensors = open_checkpoint(Path("checkpoint/"))
    tensors["model.norm.weight"].shape

A file is a length in eight bytes, a JSON object of that length, and the data. The object maps a name to dtype, shape
and the first and last byte, counted from the start of the data. No claim of a file is trusted: every length and place
is compared with the file's size before it is used. Format: github.com/huggingface/safetensors.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, ModelFormatError, ModelNotFoundError
from edgedec.gguf.file import NO_SUCH_FILE, storage_error

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_JSON_BYTES = 256 << 20
_MAX_DIMENSIONS = 8
ITEM_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
}
ITEM_BYTES |= {"U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
"""Bytes of one number, by the format's name of the dtype."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        dtype: The format's name for it: "BF16", "F16", "F32", ...
        shape: In the order of the format: the last size is the length of a row.
        offset: First byte, counted from the start of the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int

    def read(self) -> NDArray[np.uint8]:
        """Return the tensor's bytes, uint8[n_bytes].

        Raises:
            ModelFormatError: The file has become shorter since its header was read.
            StorageError: The file cannot be read.
            MemoryCapError: The system has no memory for the tensor.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self.offset + self.n_bytes:
                    _fail(self.path, f"it has become shorter than tensor {self.name[:80]!r} needs")
                file.seek(self.offset)
                data = file.read(self.n_bytes)
        except OSError as error:
            raise _read_error(self.path, error) from error
        except MemoryError as error:
            raise MemoryCapError(
                f"{self.path}: the system has no {self.n_bytes} bytes for tensor {self.name[:80]!r}; close programs, "
                "or use a smaller model"
            ) from error
        if len(data) != self.n_bytes:
            _fail(self.path, f"it has become shorter than tensor {self.name[:80]!r} needs")
        return np.frombuffer(data, np.uint8)


def open_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Read the headers of a checkpoint's safetensors files; return name to tensor.

    Raises:
        ModelNotFoundError: The folder has no safetensors file, or lacks one that its index names.
        ModelFormatError: The index or a header is damaged, or they contradict each other.
        StorageError: A file cannot be read.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{folder}: the folder has no .safetensors file; download the whole checkpoint")
        if len(files) > 1:
            raise ModelNotFoundError(
                f"{folder}: the folder has {len(files)} .safetensors files, but no {INDEX} that says which belong "
                "together; download the index, or keep one file"
            )
        return read_header(files[0])
    weight_map = _weight_map(index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        header = read_header(folder / shard)
        if header.keys() & tensors.keys():
            _fail(folder / shard, f"tensor {min(header.keys() & tensors.keys())[:80]!r} is in two files")
        tensors |= header
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            _fail(index, f"it says that {name[:80]!r} is in {shard}, which has no such tensor")
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """Read and check the header of one file; return name to tensor, in the order of the data.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFormatError: The file is truncated or damaged, or its header contradicts itself.
        StorageError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if n_bytes < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, n_bytes - 8):
                _fail(path, f"it claims a header of {length} bytes, but has {n_bytes} bytes in all")
            raw = file.read(length)
    except OSError as error:
        raise _read_error(path, error) from error
    entries = parse_json(raw, path).items()
    tensors = [_tensor(path, name, entry, 8 + length, n_bytes) for name, entry in entries if name != "__metadata__"]
    tensors.sort(key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(tensors):
        if before.offset + before.n_bytes > after.offset:
            _fail(path, f"tensors {before.name[:80]!r} and {after.name[:80]!r} overlap")
    return {tensor.name: tensor for tensor in tensors}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFormatError: The file holds no JSON object, or is larger than any such file of a model.
        StorageError: The file cannot be read.
    """
    return parse_json(_read_small(path), path)


def read_json_list(path: Path) -> list[Any]:
    """Read a JSON array from a file (raises what read_json raises)."""
    items = parse_json(b'{"list": ' + _read_small(path) + b"}", path).get("list")
    return items if isinstance(items, list) else _fail(path, "it holds no JSON array")


def _read_small(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            _fail(path, f"it is larger than {_MAX_JSON_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise _read_error(path, error) from error


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse the JSON text of an object in which no key is given twice; `path` is for messages.

    Raises:
        ModelFormatError: The bytes are not such an object.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        _fail(path, f"it holds no sound JSON ({str(error)[:200]})")
    return value if isinstance(value, dict) else _fail(path, "it holds no JSON object")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) != len(pairs):
        raise ValueError("a key occurs twice")
    return by_name


def _tensor(path: Path, name: str, entry: Any, data_start: int, n_file_bytes: int) -> Tensor:
    """Return the tensor that an entry of the header describes, after checking the entry."""
    what = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{what} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _fail(path, f"{what} has the dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        _fail(path, f"{what} has the shape {str(shape)[:80]} and the places {str(offsets)[:80]}")
    begin, end = offsets
    n_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if not begin <= end <= n_file_bytes - data_start or end - begin != n_bytes:
        _fail(path, f"{what} needs {n_bytes} bytes, but is at {begin} to {end} of {n_file_bytes - data_start}")
    return Tensor(path, name, dtype, tuple(shape), data_start + begin, n_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _weight_map(index: Path) -> Mapping[str, str]:
    """Return tensor name to file name from an index; the files must be beside the index."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index, "it has no weight_map")
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
            or "\\" in shard
        ):
            _fail(index, f"tensor {name[:80]!r} is in {str(shard)[:80]!r}, expected a .safetensors file beside it")
    return weight_map


def _read_error(path: Path, error: OSError) -> Exception:
    if error.errno in NO_SUCH_FILE:
        return ModelNotFoundError(f"{path}: the file is missing; download the whole checkpoint")
    return storage_error(path, error)


def _fail(path: Path, actual: str) -> NoReturn:
    raise ModelFormatError(f"{path}: {actual}; the file is damaged or incomplete: download it again")

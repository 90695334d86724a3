"""GGUF files: read the header of one, or of all parts of a split one, and check it.

    gguf = read_gguf("model.gguf")
    gguf.metadata["general.architecture"], gguf.tensors["token_embd.weight"].shape

A file of the cpu runtime's tiles may stand for a GGUF (edgedec.gguf.tile_form), at a place of its own
(edgedec.gguf.places). Any other file is refused by the name of what it is (a web page, a Git LFS pointer, safetensors,
...). A damaged or hostile file is refused with what contradicts what. Neither costs the memory or the time that the
file claims to need.
"""

import errno
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, ModelFormatError, ModelNotFoundError, StorageError, UnsupportedModelError
from edgedec.gguf.header import Header, TensorInfo, read_header
from edgedec.gguf.places import standing
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.tile_form import TiledForm, read_form
from edgedec.gguf.tile_header import HEADER_NAME
from edgedec.gguf.two_graphs import graphs_of, read_two_graphs, texts_of
from edgedec.gguf.values import GGUFArray, Value, ValueType, show

__all__ = ["GGUF", "GGMLType", "GGUFArray", "TensorInfo", "Value", "ValueType", "read_gguf"]

T = TypeVar("T")

_MAGIC = b"GGUF"
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 2**14
# The errors of systems for a name that no file has, or that no file can have.
NO_SUCH_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class FileState:
    """What the system says of a file without reading it: a file with an equal state has not changed.

    On Windows `ctime_ns` is the time at which the file was made, elsewhere that of its last change of any kind: a copy
    that keeps the modification time of its original does not keep that one.
    """

    path: str
    n_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Self:
        """Return the state of the file at `path`, which os.stat or os.fstat described as `status`."""
        return cls(os.fspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def file_states(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """Return the states of files, or of those that stand for them, as they are now.

    Raises:
        OSError: A file is gone, or the system refuses to describe it.
    """
    return tuple(FileState.of(path, standing(path).stat()) for path in paths)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GGUF:
    """The checked headers of a model file, or of all parts of a split one.

    Attributes:
        paths: The file, or its parts in order; `TensorInfo.shard` is an index into this.
        states: The state of each part when its header was read.
        version: GGUF version of the first part.
        metadata: Key to value, of the first part.
        tensors: Name to tensor, of all parts, in the order of the files.
        alignment: Tensor data of the first part starts at multiples of this many bytes.
        n_bytes: Size of all parts together.
        header_hash: SHA-256 (hex) of the header bytes of all parts: keys, values, names, shapes, offsets.
        n_header_bytes: Length of the header of the first part.
        form: What the file of another form that stands for the GGUF holds; None for a GGUF. The other attributes are
            those of the GGUF, but for `states`.
    """

    paths: tuple[Path, ...]
    states: tuple[FileState, ...]
    version: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    alignment: int
    n_bytes: int
    header_hash: str
    n_header_bytes: int
    form: TiledForm | None = field(default=None, repr=False)

    def read_tensor_bytes(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        """Return `n_bytes` bytes of a tensor from its byte `start` on, as the file holds them; None: all that are left.

        Raises:
            ModelFormatError: There is no such tensor, or the file got shorter since its header was read.
            ModelNotFoundError, StorageError: The file is gone, or cannot be read.
            MemoryCapError: The system has no memory for the tensor.
        """
        if name not in self.tensors:
            raise ModelFormatError(f"{self.paths[0]}: it has no tensor {name!r}; pass a model that has it")
        tensor = self.tensors[name]
        n_wanted = tensor.n_bytes - start if n_bytes is None else n_bytes
        path = self.paths[tensor.shard]
        try:
            with _open(path) as file:
                status = os.fstat(file.fileno())
                now, then = self, self.states[tensor.shard]
                if (status.st_size, status.st_mtime_ns) != (then.n_bytes, then.mtime_ns) and (
                    self.form is not None or read_form(file, path) is not None
                ):
                    now = _renewed(self)
                if now.form is not None:
                    data = now.form.read(file, tensor, start, n_wanted)
                else:
                    # The size is compared first, because a read allocates all that it is to read.
                    if tensor.offset + tensor.n_bytes > status.st_size:
                        raise _shrunk(path, name)
                    file.seek(tensor.offset + start)
                    data = file.read(n_wanted)
        except OSError as error:
            raise storage_error(path, error) from error
        except MemoryError as error:
            raise MemoryCapError(
                f"{path}: the system has no {n_wanted} bytes for tensor {name!r}; close programs, or use a "
                "smaller model"
            ) from error
        if len(data) != n_wanted:
            raise _shrunk(path, name)
        return data

    def read_header_bytes(self) -> bytes:
        """Return the bytes of the header of the first part (raises as read_tensor_bytes)."""
        whole = TensorInfo(HEADER_NAME, (self.n_header_bytes,), GGMLType.I8, 0, self.n_header_bytes, 0)
        header = replace(self, tensors={HEADER_NAME: whole})
        return header.read_tensor_bytes(HEADER_NAME)


FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
"""The types that hold numbers one by one, not in quantized blocks."""


def floats(kind: GGMLType, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the numbers of rows, uint8[..., row_bytes], of a type of FLOATS, as float32."""
    if kind is GGMLType.BF16:
        return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return rows.view("<f4" if kind is GGMLType.F32 else "<f2").astype(np.float32)


def read_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Return the checked header of a GGUF file, or of all parts of a split one, given its first.

    While an earlier result for the same path is still referenced, and the state of no part changed, that result is
    returned and nothing is read. Choosing a runtime, planning its memory and loading all ask by path, as runtimes of
    other packages get nothing but the path; so whoever takes these steps keeps the result meanwhile
    (edgedec.load_plan.LoadPlan), and no signature passes it on. Nothing is kept beyond that, but for
    last_header_held().

    Raises:
        ModelNotFoundError: No file is at that path, or a part of a split model is missing.
        ModelFormatError: The file is a directory, of another format, truncated, damaged or not the first part.
        UnsupportedModelError: Its version, its byte order or the type of a tensor is not one that edgedec reads.
        StorageError: The file may not be read, or reading failed.
    """
    first_path = Path(path).absolute()
    cached = _in_use.get(first_path)
    with suppress(OSError):  # a part is gone: reading says which
        if cached is not None and file_states(cached.paths) == cached.states:
            return cached
    gguf = _in_use[first_path] = _read(first_path)
    if (held := _held.get()) is not None:
        held[:] = [gguf]
    return gguf


@contextmanager
def last_header_held() -> Iterator[None]:
    """Hold the header that was parsed last, such as a draft head's, until the block ends or another file is parsed."""
    token = _held.set([])
    try:
        yield
    finally:
        _held.reset(token)


def once_per_header(read: Callable[[GGUF], T]) -> Callable[[GGUF], T]:
    """Return a function that reads something of a header once, and keeps it for as long as the header is referenced.

    What is kept must not reference the header, which would never be freed then.
    """
    cache: WeakKeyDictionary[GGUF, T] = WeakKeyDictionary()

    @wraps(read)
    def once(gguf: GGUF) -> T:
        if gguf not in cache:
            cache[gguf] = read(gguf)
        return cache[gguf]

    return once


MANIFEST, GRAPH, DATA, VOCABULARY = "edgedec.json", "model.onnx", "model.onnx.data", "vocabulary.gguf"
"""The files of an exported folder: facts, graph, weights, and a GGUF with the metadata and without tensors."""


def is_onnx(path: Path) -> bool:
    """Return whether a path is an .onnx file, or a folder that holds one or holds an export made by edgedec."""
    if not path.is_dir():
        return path.suffix == ".onnx"
    return (path / MANIFEST).is_file() or any(path.glob("*.onnx")) or bool(graphs_of(path))


def read_header_of(path: Path) -> GGUF:
    """Return the header of a model's file, of the vocabulary in an exported folder, or made of a folder of two graphs.

    Raises:
        ModelError, StorageError: As read_gguf.
    """
    if is_onnx(path) and path.exists():
        folder = path if path.is_dir() else path.parent
        if not (folder / MANIFEST).is_file():
            if graphs := graphs_of(path):
                return _of_two_graphs(path.absolute(), graphs)
            raise foreign_onnx(path)
        path = folder / VOCABULARY
    return read_gguf(path)


def _of_two_graphs(path: Path, graphs: tuple[Path, ...]) -> GGUF:
    """Return the header of an encoder and a decoder, which has no tensors; read as read_gguf reads."""
    with reading(path):
        states = file_states(file for file in (*sorted(texts_of(path).glob("*.json")), *graphs) if file.is_file())
        if (cached := _in_use.get(path)) is not None and cached.states == states:
            return cached
        metadata, sha256 = read_two_graphs(path)
    gguf = _in_use[path] = GGUF((path,), states, 3, metadata, {}, 32, sum(s.n_bytes for s in states), sha256, 0)
    return gguf


def foreign_onnx(path: Path) -> UnsupportedModelError:
    """Return the error for an ONNX model of another program's."""
    return UnsupportedModelError(
        f"{path}: an ONNX model that `edgedec export` did not write (no {MANIFEST} says what its inputs are); use a "
        "GGUF of the same model (`edgedec export FOLDER --to gguf` makes one of a checkpoint with .safetensors), or "
        "what `edgedec export MODEL --to onnx` makes of a GGUF that writes texts"
    )


_in_use: WeakValueDictionary[Path, GGUF] = WeakValueDictionary()
_held: ContextVar[list[GGUF] | None] = ContextVar("_held", default=None)
_later: WeakKeyDictionary[GGUF, GGUF] = WeakKeyDictionary()


def _renewed(gguf: GGUF) -> GGUF:
    """Return the header of the same model as its file is now: another form, or the GGUF again."""
    later = _later[gguf] = read_gguf(gguf.paths[0])
    if later.header_hash != gguf.header_hash or later.n_bytes != gguf.n_bytes:
        raise ModelFormatError(f"{gguf.paths[0]}: another file stands there since it was opened; load it again")
    return later


def _read(first_path: Path) -> GGUF:
    """Read and check the headers of all parts, given the absolute path of the first."""
    first, form, state = _read_part(first_path, 0)
    paths, states = _part_paths(first_path, first), [state]
    tensors = dict(first.tensors)
    digest = hashlib.sha256(first.raw)
    for i, part_path in enumerate(paths[1:], start=1):
        part, _, state = _read_part(part_path, i)
        _check_part(part_path, part, i, len(paths))
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise ModelFormatError(f"{part_path}: tensor {min(twice)!r} is in an earlier part, too; download all again")
        tensors |= part.tensors
        digest.update(part.raw)
        states.append(state)
    n_expected = _whole(first_path, first, "split.tensors.count", default=len(tensors))
    if len(paths) > 1 and n_expected != len(tensors):
        raise ModelFormatError(
            f"{first_path}: its {len(paths)} parts hold {len(tensors)} tensors, expected {n_expected}; "
            "parts of different models may be mixed: download all of them again"
        )
    return GGUF(
        paths,
        tuple(states),
        first.version,
        MappingProxyType(first.metadata),
        MappingProxyType(tensors),
        first.alignment,
        sum(state.n_bytes for state in states) if form is None else form.n_model_bytes,
        digest.hexdigest(),
        len(first.raw),
        form,
    )


def _open(path: Path) -> BinaryIO:
    """Open a regular file; anything else is refused before it is opened, as opening a pipe would wait for ever."""
    try:
        stands = standing(path)
        mode = stands.stat().st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in NO_SUCH_FILE:
            raise
        raise ModelNotFoundError(f"{path}: there is no such file; check the name and the directory") from error
    if stat.S_ISDIR(mode):
        advice = "pass the .gguf file inside it"
        if (path / "config.json").is_file():
            advice = f"it looks like a checkpoint, of which a file is made by: edgedec export {path} --to gguf"
        raise ModelFormatError(f"{path}: a directory, expected a file; {advice}")
    if not stat.S_ISREG(mode):
        raise ModelFormatError(f"{path}: a device, pipe or socket, expected a regular file; pass a .gguf file")
    return stands.open("rb")


def _read_part(path: Path, shard: int) -> tuple[Header, TiledForm | None, FileState]:
    """Return the header of one file, its form where that is no GGUF's, and the state of the file that was read."""
    with reading(path), _open(path) as file:
        state = FileState.of(path, os.fstat(file.fileno()))
        head = file.read(len(_MAGIC))
        if not head:
            raise ModelFormatError(f"{path}: an empty file, expected a GGUF model; download it again")
        file.seek(0)
        if head == _MAGIC[: len(head)]:
            return read_header(file, state.n_bytes, str(path), shard=shard), None, state
        if (file_form := read_form(file, path)) is None:
            raise _not_a_gguf(file, path)
        form, raw = file_form
        return read_header(io.BytesIO(raw), form.n_model_bytes, str(path), shard=shard), form, state


def _not_a_gguf(file: BinaryIO, path: Path) -> ModelFormatError:
    from edgedec.gguf.formats import HEAD_BYTES, name_format  # here, as most files are GGUFs

    file.seek(0)
    return ModelFormatError(f"{path}: expected a GGUF model, found {name_format(file.read(HEAD_BYTES))}")


def _part_paths(path: Path, header: Header) -> tuple[Path, ...]:
    """Return the paths of all parts of the model whose first part is `header`."""
    n_parts = _whole(path, header, "split.count", default=1, at_most=_MAX_PARTS)
    if n_parts <= 1:
        return (path,)
    number = _whole(path, header, "split.no")
    name = _PART_NAME.fullmatch(path.name)
    stem = name["stem"] if name else path.stem
    paths = tuple(path.with_name(f"{stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1))
    if number != 0:
        raise ModelFormatError(
            f"{path}: part {number + 1} of a model in {n_parts} parts, expected the first; pass {paths[0].name}"
        )
    if path != paths[0]:
        raise ModelFormatError(
            f"{path}: the first part of a model in {n_parts} parts must keep the name it was made with, such as "
            f"{paths[0].name}, for the others to be found; rename it"
        )
    return paths


def _check_part(path: Path, part: Header, index: int, n_parts: int) -> None:
    """Refuse a part that is not the one its file name says."""
    number = _whole(path, part, "split.no")
    count = _whole(path, part, "split.count", default=1)
    if (number, count) != (index, n_parts):
        raise ModelFormatError(
            f"{path}: its metadata says part {number + 1} of {count}, expected part {index + 1} of {n_parts}; "
            "files may be mixed up: download all parts again"
        )


def _whole(path: Path, header: Header, key: str, *, default: int | None = None, at_most: int = 2**31 - 1) -> int:
    """Return a whole number of the metadata, or the default where the key is absent."""
    if key not in header.metadata and default is not None:
        return default
    value = header.metadata.get(key, "missing")
    if type(value) is not int or not 0 <= value <= at_most:
        raise ModelFormatError(f"{path}: {key} is {show(value)}, expected 0 to {at_most}; download the file again")
    return value


def _shrunk(path: Path, name: str) -> ModelFormatError:
    return ModelFormatError(
        f"{path}: tensor {name!r} reaches beyond the file's end; the file got shorter since it was opened: "
        "download or copy it again"
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into the error of `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the error to raise for what the system said of reading a file."""
    if isinstance(error, PermissionError):
        return StorageError(f"{path}: no permission to read it ({error.strerror}); change its permissions")
    return StorageError(f"{path}: reading failed ({error.strerror or error}); check the disk and the connection to it")

"""Reading the values of a GGUF header, one after another, within hard bounds.

Every count and length is compared with the bytes that are left in the file before anything is allocated or looped over.
The header is read, never mapped: a file that shrinks meanwhile causes an error, where a mapping would cause a SIGBUS.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, all little endian.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError

# No model comes near these limits; they bound the time and the memory that a hostile file can cost.
MAX_HEADER_BYTES = 128 * 2**20
MAX_NESTED_ARRAYS = 2**16
MAX_ARRAY_DEPTH = 4

_AGAIN = "the file is damaged or incomplete; download or copy it again"
_FIRST_READ_BYTES = 2**18
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """The type of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("u1"),
    ValueType.INT8: np.dtype("i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array of the metadata. Its bounds were checked when the header was read; its elements are decoded on demand.

    Attributes:
        element_type: Type of every element.
        n: Number of elements.
        data: The elements as the file holds them.
    """

    element_type: ValueType
    n: int
    data: bytes = field(repr=False)

    def __len__(self) -> int:
        """Return the number of elements."""
        return self.n

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements: str, int, float, bool or GGUFArray."""
        if self.element_type is ValueType.STRING:
            return (string.decode(errors="replace") for string in self.strings())
        if self.element_type is ValueType.ARRAY:
            return self._arrays()
        return iter(self.numpy().tolist())

    def tolist(self) -> list[Any]:
        """Return the elements as a list, nested arrays as lists; malformed UTF-8 becomes U+FFFD."""
        if self.element_type is ValueType.ARRAY:
            return [array.tolist() for array in self._arrays()]
        return list(self)

    def numpy(self) -> NDArray[Any]:
        """Return the numbers or booleans as a read-only array of their own type, without a copy.

        Raises:
            ModelFormatError: The elements are strings or arrays.
        """
        if self.element_type not in _DTYPES:
            raise ModelFormatError(f"the array holds {self.element_type.name} elements, expected numbers; {_AGAIN}")
        return np.frombuffer(self.data, _DTYPES[self.element_type])

    def strings(self) -> list[bytes]:
        """Return the strings of an array of strings, in the bytes of the file, be they valid UTF-8 or not."""
        offsets = string_offsets(self.data, 0, self.n).tolist()
        return [self.data[start + 8 : end] for start, end in itertools.pairwise(offsets)]

    def _arrays(self) -> Iterator["GGUFArray"]:
        reader = HeaderReader.of_bytes(self.data)
        for _ in range(self.n):
            yield reader.array("array", depth=1)


Value = int | float | bool | str | GGUFArray


def show(value: Value) -> str:
    """Return a value for a message: shortened, on one line and without control characters."""
    return repr(value[:60] if isinstance(value, str) else value)


class HeaderReader:
    """Reads values one after another, never beyond the end of the file or MAX_HEADER_BYTES.

    Args:
        file: The file, at its start; None for bytes in memory.
        n_bytes: The file's size.
        name: The file's name, for messages.
    """

    def __init__(self, file: BinaryIO | None, n_bytes: int, name: str) -> None:
        self.name = name
        self.position = 0
        self.buffer = bytearray()
        self._file = file
        self._n_file_bytes = n_bytes
        self._limit = min(n_bytes, MAX_HEADER_BYTES)
        self._n_nested = 0

    @classmethod
    def of_bytes(cls, data: bytes) -> "HeaderReader":
        """Return a reader of bytes that are already in memory."""
        reader = cls(None, len(data), "array")
        reader.buffer = bytearray(data)
        return reader

    def fail(self, message: str) -> NoReturn:
        """Raise ModelFormatError with this message, the file's name and what to do."""
        raise ModelFormatError(f"{self.name}: {message}; {_AGAIN}")

    def require(self, n_bytes: int, what: str) -> None:
        """Refuse `what`, which takes n_bytes from here on, if it ends beyond the file or beyond the largest header."""
        end = self.position + n_bytes
        if end > self._n_file_bytes:
            self.fail(f"{what} needs {n_bytes} bytes at byte {self.position}, but the file has {self._n_file_bytes}")
        if end > self._limit:
            self.fail(f"{what} would make the header larger than {MAX_HEADER_BYTES} bytes, more than any model's")

    def take(self, n_bytes: int, what: str) -> int:
        """Step over n_bytes, which are in `buffer` afterwards, and return the position at which they start."""
        start = self.position
        self.require(n_bytes, what)
        self._fill(start + n_bytes)
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        """Return the next unsigned 32-bit number."""
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """Return the next unsigned 64-bit number."""
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def name_of(self, what: str, max_bytes: int) -> str:
        """Return the next name of a key or tensor: UTF-8, printable, not empty, at most max_bytes long."""
        n_bytes = self.u64(f"the length of {what}")
        if not 0 < n_bytes <= max_bytes:
            self.fail(f"{what} is {n_bytes} bytes long, expected 1 to {max_bytes}")
        start = self.take(n_bytes, what)
        raw = self._copy(start)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is {raw[:40]!r}, which is no UTF-8")
        if not name.isprintable():
            self.fail(f"{what} is {name[:80]!r}, with characters that no name has")
        return name

    def value_type(self, what: str) -> ValueType:
        """Take the type of a metadata value."""
        number = self.u32(f"the type of {what}")
        if number > ValueType.FLOAT64:
            self.fail(f"{what} has value type {number}, expected 0 to {int(ValueType.FLOAT64)}")
        return ValueType(number)

    def value(self, what: str) -> Value:
        """Return the next value, before which its type stands."""
        value_type = self.value_type(what)
        if value_type is ValueType.ARRAY:
            return self.array(what, depth=1)
        if value_type is ValueType.STRING:
            n_bytes = self.u64(f"the length of {what}")
            start = self.take(n_bytes, what)
            return self._copy(start).decode(errors="replace")
        data = self._elements(value_type, 1, what)
        scalar: int | float | bool = np.frombuffer(data, _DTYPES[value_type])[0].item()
        return scalar

    def array(self, what: str, *, depth: int) -> GGUFArray:
        """Return the next array, which stands `depth` arrays deep (1 is the outermost)."""
        element_type = self.value_type(what)
        n = self.u64(f"the length of {what}")
        start = self.position
        if element_type is ValueType.STRING:
            self._skip_strings(n, what)
        elif element_type is ValueType.ARRAY:
            self._skip_arrays(n, what, depth=depth)
        else:
            return GGUFArray(element_type, n, self._elements(element_type, n, what))
        return GGUFArray(element_type, n, self._copy(start))

    def _copy(self, start: int) -> bytes:
        with memoryview(self.buffer) as view:
            return bytes(view[start : self.position])

    def _elements(self, value_type: ValueType, n: int, what: str) -> bytes:
        n_bytes = n * _DTYPES[value_type].itemsize
        start = self.take(n_bytes, what)
        data = self._copy(start)
        if value_type is ValueType.BOOL and data.count(0) + data.count(1) != n:
            self.fail(f"{what} holds a boolean that is neither 0 nor 1")
        return data

    def _skip_strings(self, n: int, what: str) -> None:
        """Step over n strings."""
        self.require(n * 8, f"{what} (an array of {n} strings)")
        left = n
        while left:
            offsets = string_offsets(self.buffer, self.position, left)
            self.position, left = int(offsets[-1]), left - len(offsets) + 1
            if left:  # the buffer ends within the next string: read on, or find that the file ends there, too
                string = f"a string of {what}"
                self.take(self.u64(string), string)
                left -= 1

    def _skip_arrays(self, n: int, what: str, *, depth: int) -> None:
        self.require(n * 12, f"{what} (an array of {n} arrays)")
        self._n_nested += n
        if depth >= MAX_ARRAY_DEPTH or self._n_nested > MAX_NESTED_ARRAYS:
            self.fail(f"{what} nests {self._n_nested} arrays, at most {MAX_NESTED_ARRAYS} in {MAX_ARRAY_DEPTH} levels")
        for _ in range(n):
            self.array(what, depth=depth + 1)

    def _fill(self, end: int) -> None:
        """Read until `buffer` reaches `end`, which is within the limit, in pieces that grow with the header."""
        missing = end - len(self.buffer)
        if missing <= 0:
            return
        assert self._file is not None, "bytes in memory were checked when the file was read"
        piece = min(max(missing, len(self.buffer), _FIRST_READ_BYTES), self._limit - len(self.buffer))
        self.buffer += self._file.read(piece)
        if len(self.buffer) < end:
            self.fail(f"the file got shorter while it was read: {len(self.buffer)} bytes, expected {end} or more")


# Where a string of an array begins follows from the lengths of all strings before it. A vocabulary has 150,000 of them,
# and a step of Python for each would take longer than all else when a model is opened. But nearly all lengths are below
# 256, so seven zero bytes follow the first byte of a length. numpy finds all such places of a block at once; a place
# counts as a length only where the string before it ends there.
STRING_BLOCK_BYTES = 1 << 19
_N_SINGLE, _MAX_SINGLE = 64, 2**14


def string_offsets(buffer: bytes | bytearray, start: int, n: int) -> NDArray[np.int64]:
    r"""Return int64[k + 1]: where the lengths of strings 0 to k - 1 begin, and where string k - 1 ends.

    k is n, or the number of strings that the buffer holds whole from `start` on.

    >>> string_offsets(b"\3\0\0\0\0\0\0\0abc\0\0\0\0\0\0\0\0\1\0\0\0", 0, 3)
    array([ 0, 11, 19])
    """
    offsets = [np.array([start], np.int64)]
    position, left, n_steps = start, n, _N_SINGLE
    while left:
        leapt = _leap(buffer, position, left)
        # The less a leap covered, the more single steps follow it. So strings that are made to defeat the leaps cost
        # little more than their steps.
        n_steps = _N_SINGLE if len(leapt) > n_steps else min(2 * n_steps, _MAX_SINGLE)
        position = int(leapt[-1]) if len(leapt) else position
        stepped = _steps(buffer, position, min(left - len(leapt), n_steps))
        if not len(leapt) and not len(stepped):
            break
        offsets += [leapt, stepped]
        position = int(stepped[-1]) if len(stepped) else position
        left -= len(leapt) + len(stepped)
    return np.concatenate(offsets)


def _leap(buffer: bytes | bytearray, start: int, n: int) -> NDArray[np.int64]:
    """Return where the next strings of a block end, up to the first whose length is 256 bytes or more."""
    n_bytes = min(STRING_BLOCK_BYTES, len(buffer) - start)
    if n_bytes < _U64.size:
        return np.empty(0, np.int64)
    block = np.frombuffer(buffer, np.uint8, n_bytes, start)
    zero = block[1:] == 0
    zero = zero[:-1] & zero[1:]
    zero = zero[:-2] & zero[2:]
    places = np.flatnonzero(zero[:-3] & zero[3:])[:n]
    ends = places + _U64.size + block[places]
    begins = np.concatenate(([0], ends))[: len(places)]
    n_sound = int(np.argmin(np.append(places == begins, False)))
    sound = ends[:n_sound]
    return sound[: int(np.searchsorted(sound, n_bytes, side="right"))] + start


def _steps(buffer: bytes | bytearray, position: int, n: int) -> NDArray[np.int64]:
    """Return where the next n strings end, found one after another."""
    ends, unpack, end = [], _U64.unpack_from, len(buffer)
    for _ in range(n):
        if position > end - _U64.size:
            break
        position += _U64.size + unpack(buffer, position)[0]
        if position > end:
            break
        ends.append(position)
    return np.array(ends, np.int64)

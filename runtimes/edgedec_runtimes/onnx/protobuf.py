"""Reads protobuf messages field by field, from files that may be damaged or hostile.

A length beyond the message, a number of over 64 bits and a group are refused; nothing is copied. The wire format is
https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator

from edgedec.errors import ModelFormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10

Value = int | memoryview


def fields(message: memoryview) -> Iterator[tuple[int, int, Value]]:
    """Yield number, wire type and value of each field; the value is a number for VARINT, else a view of the bytes.

    >>> [(n, kind, bytes(v) if isinstance(v, memoryview) else v) for n, kind, v in fields(memoryview(b"\\x08\\x05"))]
    [(1, 0, 5)]

    Raises:
        ModelFormatError: The bytes are no protobuf message.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = varint(message, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise damaged("a field has the number 0")
        value: Value
        if kind == VARINT:
            value, at = varint(message, at)
        elif kind == BYTES:
            n_bytes, at = varint(message, at)
            value, at = _taken(message, at, n_bytes)
        elif kind in (FIXED64, FIXED32):
            value, at = _taken(message, at, 8 if kind == FIXED64 else 4)
        else:
            raise damaged(f"field {number} has the wire type {kind}")
        yield number, kind, value


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at the byte `at`, 0 to 2^64 - 1, and where the next field begins.

    Raises:
        ModelFormatError: The number ends beyond the message, or has over 64 bits.
    """
    if at < len(message) and message[at] < 0x80:  # nearly all numbers have one byte
        return message[at], at + 1
    value = 0
    for i in range(_MOST_VARINT_BYTES):
        if at + i >= len(message):
            raise damaged("a number goes on beyond its message")
        byte = message[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + i + 1
    raise damaged("a number has over 64 bits")


def signed(number: int) -> int:
    """Return the int64 that was written as the varint `number`.

    >>> signed(2**64 - 1), signed(7)
    (-1, 7)
    """
    return number - (1 << 64) if number >> 63 else number


def damaged(what: str) -> ModelFormatError:
    """Return the error of a damaged graph; the caller adds the name of the file."""
    return ModelFormatError(f"{what}; the file is damaged or not by `edgedec export`: export the model again")


def _taken(message: memoryview, at: int, n_bytes: int) -> tuple[memoryview, int]:
    if n_bytes > len(message) - at:
        raise damaged(f"a field of {n_bytes} bytes stands where {len(message) - at} are left")
    return message[at : at + n_bytes], at + n_bytes


def whole_numbers(value: int | memoryview) -> list[int]:
    """Return the int64s of a field, which may be packed."""
    if isinstance(value, int):
        return [signed(value)]
    numbers, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        numbers.append(signed(number))
    return numbers

"""Texts from outside: read within bounds, as UTF-8."""

from pathlib import Path

from edgedec.errors import RequestError, StorageError

MOST_BYTES = 64_000_000
"""Of one text, more than any context takes; a device or an endless pipe would fill the memory."""


def read_text(path: Path, most_bytes: int | None = None) -> str:
    """Return a text file's content, of so many bytes at the most.

    Raises:
        StorageError: It can't be read.
        RequestError: It is not UTF-8, or has no end in sight.
    """
    try:
        with path.open("rb") as file:
            data = file.read((most_bytes or MOST_BYTES) + 1)
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    return decoded(data, str(path), most_bytes)


def decoded(data: bytes, name: str, most_bytes: int | None = None) -> str:
    """Return bytes as a text, without a mark of UTF-8 at the start (RequestError where it is none, or too long)."""
    if len(data) > (most := most_bytes or MOST_BYTES):
        more = "" if most == MOST_BYTES else ", or allow more memory (--memory)"
        raise RequestError(f"{name} holds more than {most} bytes; give a shorter text{more}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1  # its object has no mark at the start
        found = f"byte {error.start}, in line {line}, is {error.object[error.start]:#04x}"
        raise RequestError(f"{name} is not UTF-8: {found}") from error

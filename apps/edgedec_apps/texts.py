"""Texts from outside: read within bounds, as UTF-8."""

from pathlib import Path

from edgedec.errors import RequestError, StorageError

MOST_BYTES = 64_000_000
"""Of one text, more than any context takes; a device or an endless pipe would fill the memory."""


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises:
        StorageError: It can't be read.
        RequestError: It is not UTF-8, or has no end in sight.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path} can't be read: {error.strerror or error}") from error
    return decoded(data, str(path))


def decoded(data: bytes, name: str) -> str:
    """Return bytes as a text, without a mark of UTF-8 at the start (RequestError where it is none, or too long)."""
    if len(data) > MOST_BYTES:
        raise RequestError(f"{name} holds more than {MOST_BYTES} bytes; give a shorter text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1  # its object has no mark at the start
        found = f"byte {error.start}, in line {line}, is {error.object[error.start]:#04x}"
        raise RequestError(f"{name} is not UTF-8: {found}") from error

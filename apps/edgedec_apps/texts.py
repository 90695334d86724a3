"""Texts that people write: files in UTF-8, up to a limit of size, and an adapter with its scale."""

from pathlib import Path

from edgedec.errors import RequestError, as_storage_error

MOST_BYTES = 64_000_000
"""The most bytes of a text: more than any context holds, and a limit for devices and pipes without an end."""


def read_text(path: Path, most_bytes: int | None = None) -> str:
    """Return the content of a text file of at most `most_bytes` bytes.

    Raises:
        StorageError: The file can't be read.
        RequestError: The file is not UTF-8, or too long.
    """
    with as_storage_error(f"{path} can't be read"), path.open("rb") as file:
        data = file.read((most_bytes or MOST_BYTES) + 1)
    return decoded(data, str(path), most_bytes)


def decoded(data: bytes, name: str, most_bytes: int | None = None) -> str:
    """Return UTF-8 bytes as a text, without a byte order mark (RequestError where they are not UTF-8 or too many)."""
    if len(data) > (most := most_bytes or MOST_BYTES):
        more = "" if most == MOST_BYTES else ", or allow more memory (--memory)"
        raise RequestError(f"{name} holds more than {most} bytes; give a shorter text{more}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1  # error.object has no byte order mark
        problem = f"byte {error.start}, in line {line}, is {error.object[error.start]:#04x}"
        raise RequestError(f"{name} is not UTF-8: {problem}") from error


def adapter(words: str) -> tuple[str, float]:
    """Return an adapter and its scale, from a text such as "tone.gguf=0.5"; the scale is 1 where none is given.

    >>> adapter("a=b.gguf=0.5"), adapter("a=b.gguf")
    (('a=b.gguf', 0.5), ('a=b.gguf', 1.0))
    """
    name, _, scale = words.rpartition("=")
    try:
        return name, float(scale)
    except ValueError:
        return words, 1.0

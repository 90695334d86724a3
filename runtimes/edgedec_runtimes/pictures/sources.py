"""What an application gives as a picture: a file's bytes, its path, or a PIL.Image; here each becomes one form."""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from edgedec.errors import RequestError
from edgedec_runtimes.pictures.contract import Picture
from edgedec_runtimes.pictures.decoding import of_image
from edgedec_runtimes.pictures.limits import Limits


@dataclass(frozen=True, slots=True)
class Source:
    """A picture before it is decoded, or the pixels that an application gave.

    Attributes:
        name: What messages call the picture.
        digest: SHA-256 of the file, or of size and pixels.
        data: The file's bytes; empty where there are pixels.
        pixels: The pixels, or None.
    """

    name: str
    digest: bytes
    data: bytes
    pixels: Picture | None = None


def source_of(given: Any, name: str, limits: Limits) -> Source:
    """Return what an application gave as a picture in one form.

    Args:
        given: The bytes of a file, a path, or a PIL.Image.
        name: What messages call the picture; "" to call a file by its name.
        limits: What a picture is refused for.

    Raises:
        RequestError: It is none of these, a file can't be read, or it is beyond the limits.
    """
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        return source_of(_read(path, limits), name or path.name, limits)
    name = name or "the picture"
    if isinstance(given, bytes | bytearray | memoryview):
        data = bytes(given)
        limits.require_bytes(len(data), name)
        return Source(name, sha256(data).digest(), data)
    if hasattr(given, "getexif") and hasattr(given, "convert"):
        pixels = of_image(given, limits, name)
        size = f"{pixels.width} x {pixels.height}: ".encode()
        return Source(name, sha256(size + pixels.rgb).digest(), b"", pixels)
    raise RequestError(
        f"{name}: a picture is given as the bytes of a file, a path or a PIL.Image, found {type(given).__name__}"
    )


def _read(path: Path, limits: Limits) -> bytes:
    """Return the bytes of a file, at most one more than the limits allow (RequestError where it can't be read)."""
    try:
        if not path.is_file():
            raise RequestError(
                f"the picture {str(path)!r} does not exist, or is no file (the current folder is {Path.cwd()})"
            )
        with path.open("rb") as file:
            return file.read(limits.n_bytes + 1)
    except OSError as error:
        raise RequestError(f"the picture {str(path)!r} can't be read: {error.strerror or error}") from error

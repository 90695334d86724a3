"""URLs: how to show them, the checksum in them, the local file or the file of the cache that they stand for."""

import hashlib
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from edgedec.errors import ModelNotFoundError


def redact(url: str) -> str:
    """Return a URL without its user name and password.

    >>> redact("https://me:secret@host/simple")
    'https://host/simple'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def checksum_of(url: str) -> str | None:
    """Return the SHA-256 in the fragment (#sha256=HEX) of a URL, in lower case; None where there is none.

    >>> checksum_of("https://host/a.gguf#sha256=" + "AB" * 32) == "ab" * 32
    True
    """
    match = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", urlsplit(url).fragment)
    return match[1].lower() if match else None


def local_file(url: str) -> Path:
    """Return the path that a file:// URL stands for.

    Raises:
        ModelNotFoundError: The URL names another host, or a path that does not exist.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ModelNotFoundError(f"{url!r:.200} is no address: {error}; write file:///PATH") from error
    if parts.netloc not in ("", "localhost"):
        raise ModelNotFoundError(
            f"{url} names the host {parts.netloc!r}, expected none; write a local file as file:///, with three slashes"
        )
    path = Path(url2pathname(parts.path))
    if not path.is_absolute() or not path.exists():
        raise ModelNotFoundError(f"{url} stands for {path}, which does not exist; check the path")
    return path


def url_path(url: str, models: Path) -> Path:
    """Return the path of the cache's file for an http or https URL; the URL's fragment is ignored.

    Raises:
        ModelNotFoundError: The URL is malformed.
    """
    url = url.partition("#")[0]
    try:
        url.encode()
        urlsplit(url).port  # noqa: B018  # raises ValueError for a port that is none
    except ValueError as error:
        raise ModelNotFoundError(f"{url!r:.200} is no address: {error}; write https://HOST/PATH") from error
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2]).removesuffix(".gguf").strip("._")
    return models / "url" / digest / f"{stem[:100] or 'model'}.gguf"

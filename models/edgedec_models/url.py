"""Models behind a URL: https and http, resumable, and file:// in place."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from edgedec.errors import ModelNotFoundError
from edgedec.resolver import ResolveOptions
from edgedec_models.download import Remote, download
from edgedec_models.record import Wanted
from edgedec_models.web import open_client


def local_file(url: str) -> Path:
    """Return the path that a file:// URL names.

    Raises:
        ModelNotFoundError: It names another host, or nothing is there.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ModelNotFoundError(f"{url} names the host {parts.netloc!r}; a local file is file:///, three slashes")
    path = Path(url2pathname(parts.path))
    if not path.is_absolute() or not path.exists():
        raise ModelNotFoundError(f"{url} names {path}, which does not exist")
    return path


def fetch_url(url: str, wanted: Wanted, options: ResolveOptions) -> str:
    """Fetch the file behind an http or https URL and return its SHA-256.

    Raises:
        ModelNotFoundError, PullError, StorageError, CancelledError: As download().
    """
    remote = Remote(url.partition("#")[0], magic=b"GGUF")
    with open_client() as client:
        return download(client, remote, wanted, options)

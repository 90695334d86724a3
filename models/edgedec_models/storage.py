"""The disk: free space, atomic writes, and errors of the system as StorageError."""

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgedec.errors import StorageError
from edgedec.storage.whole_file import write_atomically

BLOCK_BYTES = 1 << 20
MARGIN_BYTES = 16 << 20  # stays free, so that a pull does not fill the disk to the last byte

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


def human_bytes(n_bytes: int) -> str:
    """Return a size as a text, in powers of ten.

    >>> human_bytes(98_362_432)
    '98.4 MB'
    """
    size = float(n_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{n_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that says what was done to which path, and what to do."""
    try:
        yield
    except OSError as error:
        raise _explained(error, doing, path) from error


def free_bytes(folder: Path) -> int:
    """Return the space that this user may use on the disk of `folder`."""
    return shutil.disk_usage(folder).free


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, links not followed; 0 where a pull has just renamed it."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def require_space(folder: Path, n_bytes: int, what: str, note: str = "") -> None:
    """Check that n_bytes more fit into `folder`.

    Args:
        what: The work, which begins the message.
        note: What stays for a later attempt, which ends the message.

    Raises:
        StorageError: They do not fit; the message has both sizes.
    """
    with storage_errors("look at the free space of", folder):
        free = free_bytes(folder)
    if free < n_bytes + MARGIN_BYTES:
        raise StorageError(
            f"{what}: {human_bytes(n_bytes)} more are needed in {folder}, but {human_bytes(free)} are free; make "
            f"room, or set EDGEDEC_CACHE to a folder on a larger disk{note}"
        )


def is_full(error: OSError) -> bool:
    """Tell whether an error means that the disk, or the user's share of it, is full."""
    return error.errno in _NO_SPACE


def make_folder(folder: Path) -> None:
    """Create a folder and those above it.

    Raises:
        StorageError: The folder cannot be created.
    """
    with storage_errors("create the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a small JSON file so that readers see the old file or the new one, never half of it.

    Raises:
        StorageError: The file cannot be written.
    """
    with storage_errors("write", path):
        write_atomically(path, json.dumps(value, indent=1).encode())


def _explained(error: OSError, doing: str, path: Path) -> StorageError:
    reason = error.strerror or str(error)
    if is_full(error):
        reason += "; make room, or set EDGEDEC_CACHE, or for presets EDGEDEC_CONFIG, to a folder elsewhere"
    elif error.errno in _NO_PERMISSION:
        reason += "; change its permissions, or set EDGEDEC_CACHE, or for presets EDGEDEC_CONFIG, to a folder of yours"
    return StorageError(f"cannot {doing} {path}: {reason}")

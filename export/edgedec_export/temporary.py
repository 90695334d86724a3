"""Where an export is made: under a name of its own beside its place, and gone from there however it ends.

What a program that was killed left goes with the next export to the same place. A lock tells the two apart: the
system gives it back when its holder is gone (edgedec.storage.file_lock).
"""

import logging
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from edgedec.errors import StorageError
from edgedec.storage.file_lock import FileLock, lock_path, try_lock
from edgedec_models.storage import is_full

logger = logging.getLogger("edgedec.export")
logger.addHandler(logging.NullHandler())


@contextmanager
def temporary_path(out: Path) -> Iterator[Path]:
    """Yield a path beside `out` for a file or a folder, `.NAME-XXXXXXXX.part`; what is there at the end is deleted.

    Before that, what killed programs left there of the same `out` is deleted, and a warning of the log says so.

    Raises:
        StorageError: The system refused something in the block, such as room on the disk.
    """
    out = out.absolute()
    _delete_left(out)
    part = out.with_name(f".{out.name}-{secrets.token_hex(4)}.part")
    with storage_errors(out), _locked(part) or nullcontext():
        try:
            yield part
        finally:
            _delete(part)


@contextmanager
def storage_errors(out: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError about writing `out`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        remedy = "make room, or choose another disk" if is_full(error) else "choose a folder that you may write to"
        raise StorageError(f"{out}: cannot be written: {error.strerror or error}{where}; {remedy} (--out)") from error


def _delete_left(out: Path) -> None:
    """Delete the parts of `out` that nobody works on, and earlier exports that had made room for a new one."""
    mine = re.compile(rf"(\.{re.escape(out.name)}-[0-9a-f]{{8}})\.(?:part|old|part\.lock)")
    try:
        found = {match[1] for path in out.parent.iterdir() if (match := mine.fullmatch(path.name))}
    except OSError:  # no such folder, or one that can't be read: making the export says so
        return
    for name in sorted(found):
        part, aside = out.with_name(f"{name}.part"), out.with_name(f"{name}.old")
        with suppress(OSError), _locked(part) or nullcontext() as lock:
            if lock is None:  # somebody's, or on a disk without locks, where nobody can tell
                continue
            there = [path for path in (part, aside) if path.exists() and (path == part or out.exists())]
            for path in there:
                _delete(path)
            if there and not any(path.exists() for path in there):
                logger.warning("deleted %s, which an export that was killed had left", there[0])


def _locked(part: Path) -> FileLock | None:
    try:
        return try_lock(part)
    except OSError:  # no locks on this disk: a file made for one would stay
        _delete(lock_path(part))
        return None


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

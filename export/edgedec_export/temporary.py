"""Temporary paths: a file or folder is written under a name of its own beside its place, and deleted if that fails.

An export that is killed leaves its temporary path behind. The next export to the same place deletes it: a lock, which
the system releases when the process that holds it ends, tells a dead export from one that is still running
(edgedec_runtimes.shared.file_lock).
"""

import logging
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from edgedec.errors import StorageError
from edgedec_models.storage import is_full
from edgedec_runtimes.shared.file_lock import FileLock, lock_path, try_lock

logger = logging.getLogger("edgedec.export")
logger.addHandler(logging.NullHandler())


@contextmanager
def temporary_path(out: Path) -> Iterator[Path]:
    """Yield the path `.NAME-XXXXXXXX.part` beside `out`, for a file or folder; delete it when the block ends.

    First delete what killed exports to the same `out` left behind, and log a warning for each.

    Raises:
        StorageError: The block raised an OSError, because for example the disk is full.
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
    """Turn an OSError of the block into a StorageError which says that `out` cannot be written."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        remedy = "make room, or choose another disk" if is_full(error) else "choose a folder that you may write to"
        raise StorageError(f"{out}: cannot be written: {error.strerror or error}{where}; {remedy} (--out)") from error


def _delete_left(out: Path) -> None:
    """Delete the temporary paths of `out` that no process holds, and earlier exports that were moved aside."""
    mine = re.compile(rf"(\.{re.escape(out.name)}-[0-9a-f]{{8}})\.(?:part|old|part\.lock)")
    try:
        tokens = {match[1] for path in out.parent.iterdir() if (match := mine.fullmatch(path.name))}
    except OSError:  # the folder is missing or unreadable: creating the export reports that
        return
    for name in sorted(tokens):
        part, aside = out.with_name(f"{name}.part"), out.with_name(f"{name}.old")
        with suppress(OSError), _locked(part) or nullcontext() as lock:
            if lock is None:  # in use, or on a disk without locks, where a dead export looks like a running one
                continue
            there = [path for path in (part, aside) if path.exists() and (path == part or out.exists())]
            for path in there:
                _delete(path)
            if there and not any(path.exists() for path in there):
                logger.warning("deleted %s, which a killed export left behind", there[0])


def _locked(part: Path) -> FileLock | None:
    """Take the lock of a temporary path; return None where another process has it, or the disk has no locks."""
    try:
        return try_lock(part)
    except OSError:  # this disk has no locks; delete the lock file that was created for one
        _delete(lock_path(part))
        return None


def _delete(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

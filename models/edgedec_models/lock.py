"""A lock between processes and threads that fetch the same file: a lock on `FILE.lock`, gone with its holder."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgedec.errors import PullError
from edgedec.progress import Progress
from edgedec.resolver import ResolveOptions
from edgedec_models.storage import make_folder, storage_errors

POLL_S = 0.1

if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def locked(path: Path, label: str, options: ResolveOptions) -> Iterator[None]:
    """Hold the lock of `path`; wait while another process has it, reporting how far that one is.

    Raises:
        CancelledError: Cancelled while waiting.
        StorageError: The lock file cannot be made.
    """
    make_folder(path.parent)
    while (fd := _acquire(path)) is None:
        if options.cancel is not None:
            options.cancel.check(f"wait for another pull of {label}")
        if options.on_progress is not None:
            options.on_progress(Progress("wait", _partial_bytes(path), None, "bytes", f"another pull of {label}"))
        time.sleep(POLL_S)
    try:
        yield
    finally:
        _release(path, fd)


@contextmanager
def locked_now(path: Path, label: str) -> Iterator[None]:
    """Hold the lock of `path` or fail at once.

    Raises:
        PullError: Another process is fetching this file.
        StorageError: The lock file cannot be made.
    """
    fd = _acquire(path)
    if fd is None:
        raise PullError(f"{label} is being pulled by another process; wait for it or stop it first")
    try:
        yield
    finally:
        _release(path, fd)


def _acquire(path: Path) -> int | None:
    lock = path.with_name(path.name + ".lock")
    while True:
        with storage_errors("lock", lock):
            fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if not _try_lock(fd):
                    os.close(fd)
                    return None
            except OSError:
                os.close(fd)
                raise
        if _is_current(fd, lock):
            return fd
        os.close(fd)  # its former holder removed the file between our open and our lock


def _release(path: Path, fd: int) -> None:
    lock = path.with_name(path.name + ".lock")
    if sys.platform == "win32":
        os.close(fd)  # an open file cannot be removed there; nor can one that another process has just opened
        try:
            lock.unlink(missing_ok=True)
        except PermissionError:
            return
    else:
        try:
            lock.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _is_current(fd: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(lock))
    except FileNotFoundError:
        return False


def _partial_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + ".partial").stat().st_size
    except FileNotFoundError:
        return 0

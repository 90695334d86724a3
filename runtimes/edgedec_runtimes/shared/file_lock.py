"""Locks on files that several processes share; a lock is gone with the process that holds it."""

import os
import sys
from pathlib import Path
from typing import Self

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


class FileLock:
    """A lock that is held, against other threads as well as other processes. Leaving its context gives it back.

    Attributes:
        path: The lock file, `FILE.lock`; it exists while the lock is held, or where its holder was killed.
    """

    def __init__(self, path: Path, fd: int) -> None:
        """Take over the open and locked file of `path`, as try_lock does."""
        self.path = path
        self._fd = fd

    def __enter__(self) -> Self:
        """Return the lock."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self.release()

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if sys.platform == "win32":
            os.close(self._fd)  # Windows removes no file that is open, be it in this process or in another one
            try:
                self.path.unlink(missing_ok=True)
            except PermissionError:
                return
        else:
            try:
                self.path.unlink(missing_ok=True)
            finally:
                os.close(self._fd)


def lock_path(path: Path) -> Path:
    """Return the path of the lock file of a file."""
    return path.with_name(path.name + ".lock")


def try_lock(path: Path) -> FileLock | None:
    """Return the lock of the file `path`, which need not exist; None while it is held elsewhere.

    Raises:
        OSError: The lock file cannot be made, or the file system has no locks.
    """
    lock = lock_path(path)
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _try_lock(fd):
                os.close(fd)
                return None
        except OSError:
            os.close(fd)
            raise
        if _is_current(fd, lock):
            return FileLock(lock, fd)
        os.close(fd)  # the former holder removed the file after it was opened here


def _is_current(fd: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(lock))
    except FileNotFoundError:
        return False

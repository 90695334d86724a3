"""A lock between processes and threads that fetch the same file: a system lock on `FILE.lock`.

The system releases it when its holder ends.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgedec.errors import PullError
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled, report_progress
from edgedec_models.fetching.partial import partial_path
from edgedec_models.storage import make_folder, size_of, storage_errors
from edgedec_runtimes.shared.file_lock import FileLock, lock_path, try_lock

POLL_S = 0.1


@contextmanager
def locked(path: Path, label: str, options: ResolveOptions) -> Iterator[None]:
    """Hold the lock of `path` during the block. While another process has it, wait, and report how far that one is.

    Raises:
        CancelledError: `options.cancel` was cancelled while waiting.
        StorageError: The lock file cannot be created.
    """
    make_folder(path.parent)
    while (lock := _acquire(path)) is None:
        check_cancelled(options.cancel, f"wait for another pull of {label}")
        report_progress(
            options.on_progress, "wait", size_of(partial_path(path)), None, "bytes", f"another pull of {label}"
        )
        time.sleep(POLL_S)
    with lock:
        yield


@contextmanager
def locked_now(path: Path, label: str) -> Iterator[None]:
    """Hold the lock of `path` during the block, or fail at once.

    Raises:
        PullError: Another process is fetching this file.
        StorageError: The lock file cannot be created.
    """
    lock = _acquire(path)
    if lock is None:
        raise PullError(f"{label} is being pulled by another process; wait for it or stop it first")
    with lock:
        yield


def _acquire(path: Path) -> FileLock | None:
    with storage_errors("lock", lock_path(path)):
        return try_lock(path)

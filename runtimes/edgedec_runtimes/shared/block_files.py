"""Files of blocks that many processes share: each is named by what it holds, and the ones used last stay.

A folder of blocks has a folder for each model, of files NAME.KIND: a header of 64 bytes (magic, SHA-256 of the name,
bytes of the data, checksum of the data), then the data. A file appears whole or not at all, so readers take no lock;
a file that another process deletes meanwhile is absent, and one that is damaged is deleted. The order of use is that
of the files' times of modification.
"""

import logging
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from shutil import disk_usage

import numpy as np
from numpy.typing import NDArray

from edgedec.storage import cache_files
from edgedec.storage.whole_file import write_atomically

FOLDER = "prompts"
"""The folder of all blocks in edgedec's cache."""

_MAGIC = b"edgedec block 1\n"
_HEADER = struct.Struct("<16s32sQQ")
_FREE_SHARE = 4  # of the disk's free bytes and those of the blocks, one part in so many is for blocks
_AFTER_EVICTION = 0.9  # of what the files may take
_RECOUNT = 16  # times for each filling: other processes write, too
_LEFT_S = 3600.0  # a temporary file of that age was left by a process that was killed
_IDLE_S = 5.0
_CLOSING_S = 10.0

logger = logging.getLogger("edgedec.prompts")


@dataclass(frozen=True, slots=True)
class _Job:
    path: Path
    data: NDArray[np.uint8]
    used_s: float


class BlockFiles:
    """The blocks of one model. Any thread may use them; a thread of their own writes.

    Attributes:
        note: Why nothing is written any more, for a person; empty while files are written.
    """

    def __init__(
        self, folder: Path, most_bytes: int, sum_of: Callable[[NDArray[np.uint8]], int], *, n_queued: int
    ) -> None:
        """Keep blocks in a folder, which need not exist.

        Args:
            folder: The model's folder, in the folder of all blocks.
            most_bytes: Most bytes that the blocks of all models take.
            sum_of: Returns a checksum of 64 bits.
            n_queued: Most files that wait to be written.
        """
        self.note = ""
        self._folder, self._most_bytes, self._sum_of = folder, most_bytes, sum_of
        self._jobs: queue.Queue[_Job | None] = queue.Queue(n_queued)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._until_count = 0  # bytes that may be written before all files are counted again

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name."""
        return os.path.exists(self._folder / name)

    def read(self, name: str, least_bytes: int, most_bytes: int) -> NDArray[np.uint8] | None:
        """Return the data of a file; None where it is absent, or was damaged and is deleted now."""
        path = self._folder / name
        try:
            with open(path, "rb", buffering=0) as file:
                n_bytes = os.fstat(file.fileno()).st_size - _HEADER.size
                head = file.read(_HEADER.size)
                if least_bytes <= n_bytes <= most_bytes:
                    data = np.empty(n_bytes, np.uint8)
                    n_read, view = 0, data.data
                    while n_read < n_bytes and (n := file.readinto(view[n_read:])):
                        n_read += n
                    if n_read == n_bytes and head == self._header(name, data):
                        return data
        except OSError:
            return None
        logger.warning("%s is damaged, and deleted; its tokens are read again", path)
        with suppress(OSError):
            if not self._folder.is_symlink():
                path.unlink()
        return None

    def use(self, names: Sequence[str], used_s: float) -> None:
        """Note that files were used at a time: the first of the names goes last when files have to go."""
        for i, name in enumerate(names):
            with suppress(OSError):
                os.utime(self._folder / name, (used_s, used_s - 0.001 * i))

    @property
    def n_free(self) -> int:
        """How many files write() would take now."""
        return 0 if self.note else self._jobs.maxsize - self._jobs.qsize()

    def write(self, name: str, data: NDArray[np.uint8], used_s: float) -> None:
        """Write a file in the background, as one used at a time; it is dropped where too many wait to be written."""
        with self._lock, suppress(queue.Full):
            self._jobs.put_nowait(_Job(self._folder / name, data, used_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="edgedec-prompts", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until what was given to write() is written, at most some seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            with suppress(queue.Full):
                self._jobs.put(None, timeout=_CLOSING_S)
                thread.join(_CLOSING_S)

    def _write_all(self) -> None:
        """Write files until there have been none for a while."""
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = None
            if job is not None:
                self._write(job)
                continue
            with self._lock:
                if self._jobs.empty():
                    self._thread = None
                    return

    def _write(self, job: _Job) -> None:
        if self.note:
            return
        try:
            job.path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            job.path.parent.mkdir(mode=0o700, exist_ok=True)
            self._until_count -= job.data.nbytes
            if self._until_count < 0:
                self._until_count = make_room(job.path.parent.parent, self._most_bytes, job.data.nbytes)
                if self._until_count < 0:
                    return
            write_atomically(job.path, self._header(job.path.name, job.data), job.data.data, private=True)
            os.utime(job.path, (job.used_s, job.used_s))
        except OSError as error:
            self.note = f"prompts can't be kept in {job.path.parent}: {error.strerror or error}; free or name a disk"
            logger.warning("%s", self.note)

    def _header(self, name: str, data: NDArray[np.uint8]) -> bytes:
        return _HEADER.pack(_MAGIC, sha256(name.encode()).digest(), data.nbytes, self._sum_of(data))


@dataclass(frozen=True, slots=True)
class BlockFolder:
    """The blocks of a model on the disk.

    Attributes:
        name: The folder's name, which begins with the model's.
        n_files, n_bytes: How many files there are, and what they take.
        last_used_s: When one was used last, in seconds since 1970.
    """

    name: str
    n_files: int
    n_bytes: int
    last_used_s: float


def folder_name(model: str, fingerprint: str) -> str:
    """Return the name of a model's folder.

    >>> folder_name("Qwen2.5 Coder/1.5B", "0123456789abcdef")
    'Qwen2.5-Coder-1.5B-01234567'
    """
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', model).strip('.-')[:60] or 'model'}-{fingerprint[:8]}"


def make_room(root: Path, most_bytes: int, n_bytes: int) -> int:
    """Delete the files used longest ago where there is no room for more, and those that killed processes have left.

    Args:
        root: The folder of all blocks.
        most_bytes: Most bytes that they take; fewer where the disk has little free.
        n_bytes: Those that are about to be written.

    Returns:
        How many bytes may be written then before this is called again; negative where not even these may.

    Raises:
        OSError: The folder can't be read.
    """
    files, now, n_held = [], time.time(), 0
    for path, state in _files(root.resolve()):  # the folder that is written to may be a link
        if path.suffix == ".tmp":
            if now - state.st_mtime > _LEFT_S:
                with suppress(OSError):
                    path.unlink()
            continue
        files.append((state.st_mtime, state.st_size, path))
        n_held += state.st_size
    most = min(most_bytes, (disk_usage(root).free + n_held) // _FREE_SHARE)
    if n_held + n_bytes > most:
        for _, size, path in sorted(files):
            if n_held + n_bytes <= most * _AFTER_EVICTION:
                break
            with suppress(OSError):  # another process makes room, too
                path.unlink()
            n_held -= size
    return min(most - n_held - n_bytes, most // _RECOUNT)


def list_folders(root: Path) -> list[BlockFolder]:
    """Return what models have blocks in the folder of all blocks, the last used first."""
    by_folder: dict[str, list[os.stat_result]] = {}
    for path, state in _files(root):
        by_folder.setdefault(path.parent.name, []).append(state)
    folders = [
        BlockFolder(name, len(states), sum(s.st_size for s in states), max(s.st_mtime for s in states))
        for name, states in by_folder.items()
    ]
    return sorted(folders, key=lambda folder: -folder.last_used_s)


def delete_folder(root: Path, name: str) -> None:
    """Delete the blocks of a model; what can't be deleted stays."""
    with suppress(OSError):
        cache_files.delete_folder(root / name, FOLDER)


def _files(root: Path) -> list[tuple[Path, os.stat_result]]:
    """Return all files of blocks with what the system knows of them; those that vanish meanwhile are left out."""
    files = []
    for path in root.glob("*/*"):
        if cache_files.is_ours(path, root, FOLDER):
            with suppress(OSError):
                files.append((path, path.lstat()))
    return files

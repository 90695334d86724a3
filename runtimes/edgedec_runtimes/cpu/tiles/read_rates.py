"""How fast weights are read: from a file around the system's cache, and from memory. Memory plans predict with it."""

import math
import os
import random
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter

from edgedec.errors import as_storage_error
from edgedec.processor import machine_name
from edgedec.storage import probe_cache
from edgedec_runtimes.cpu.library import read_bandwidth
from edgedec_runtimes.cpu.tiles.paged_file import HUGE_PAGE_BYTES, PAGE_BYTES, PagedFile, page_buffer
from edgedec_runtimes.shared.pages import is_mostly_hole

_READ_BYTES = 4 << 20
_EXPERT_READERS = 4  # threads, as in native/forward/expert_store.cpp
_SCATTERED_BYTES = 512 << 20  # of a file, that pieces at random places are read from
_LEAST_BURSTS = 2  # the first one also starts the threads
_N_MEMORY_READS = 3
LEAST_KEPT_BYTES = 64 << 20
"""The least memory whose reading is kept: a processor's cache may hold less, and reads faster than memory."""
_KIND, _N_READINGS = "read rate", 5
_memory_rates: dict[int, float] = {}  # by the number of threads, in this process


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast weights are read, in bytes per second.

    Attributes:
        disk: Those that are missing, from their file.
        memory: Those that are multiplied, from memory, by all threads of a forward.
    """

    disk: float
    memory: float


def read_rate(path: Path, *, most_bytes: int = 64 << 20, most_s: float = 0.5) -> float:
    """Return how fast the middle of a file is read from its storage, in bytes per second, measured without the cache.

    At most `most_bytes` are read, one after another, for `most_s` seconds or a little more.

    Raises:
        StorageError: The file can't be read, or is empty.
    """
    with PagedFile(path) as file:
        n_bytes = min(most_bytes, file.n_bytes)
        start = (file.n_bytes - n_bytes) // 2
        file.forget(start, n_bytes)
        out = page_buffer(_READ_BYTES + PAGE_BYTES)
        out[::PAGE_BYTES] = 1  # so that its pages are in memory
        done, began = 0, perf_counter()
        while done < n_bytes and (done == 0 or perf_counter() - began < most_s):
            step = min(_READ_BYTES, n_bytes - done)
            file.read(start + done, step, out)
            done += step
        return max(1, done) / max(1e-9, perf_counter() - began)


def scattered_rate(path: Path, piece_bytes: int, n_pieces: int, *, most_s: float = 0.5) -> float:
    """Return how fast pieces at random places in a file's middle are read by several threads, in bytes per second.

    As in a layer with experts, `n_pieces` are asked for at a time, and all of them are awaited before the next ones:
    the fewer they are, the less there is for each thread. The rate is that of the median of such bursts.

    Raises:
        StorageError: The file can't be read, or is empty.
    """
    with PagedFile(path) as file:
        n_bytes = min(_SCATTERED_BYTES, file.n_bytes)
        piece_bytes, start = min(piece_bytes, n_bytes), (file.n_bytes - n_bytes) // 2
        room = (piece_bytes // PAGE_BYTES + 2) * PAGE_BYTES
        # As large as a huge page at least: experts have such memory, and the disk may be twice as fast with it.
        memory = page_buffer(max(HUGE_PAGE_BYTES, _EXPERT_READERS * room))
        memory[::PAGE_BYTES] = 1
        file.forget(start, n_bytes)
        places: deque[int] = deque()
        rng, seconds = random.Random(0), list[float]()

        def work(reader: int) -> None:
            out = memory[reader * room : (reader + 1) * room]
            with suppress(IndexError):  # none is left
                while True:
                    file.read(places.popleft(), piece_bytes, out)

        until = perf_counter() + most_s
        with ThreadPoolExecutor(_EXPERT_READERS) as pool:
            while len(seconds) < _LEAST_BURSTS or perf_counter() < until:
                places.extend(start + rng.randrange(n_bytes - piece_bytes + 1) for _ in range(n_pieces))
                began = perf_counter()
                for _ in pool.map(work, range(_EXPERT_READERS)):
                    pass
                seconds.append(perf_counter() - began)
        return max(1, n_pieces * piece_bytes) / max(1e-9, statistics.median(seconds))


def remembered_rate(path: Path, piece_bytes: int = 0, n_pieces: int = 1, cache_dir: Path | None = None) -> float:
    """Return the rate at which a file is read, measured once in this process as long as the file does not change.

    It is the median of the readings of this disk that the cache holds: of the first starts, so that plans agree.

    The rate is infinite where most of the file is a hole: it stands in for a model that is not on this machine.

    Args:
        piece_bytes: Pieces of so many bytes are read at random places (scattered_rate); 0: all in order (read_rate).
        n_pieces: How many of them at a time.
        cache_dir: The cache's root; None for no cache.

    Raises:
        StorageError: The file can't be read, or is empty.
    """
    with as_storage_error(str(path), "check the disk"):
        status = os.stat(path)
    if is_mostly_hole(status):
        return math.inf
    of_disk = cache_dir, f"{status.st_dev} {piece_bytes} {n_pieces}"
    return _rate(path, status.st_size, status.st_mtime_ns, piece_bytes, n_pieces, of_disk)


@lru_cache(maxsize=16)
def _rate(
    path: Path, _n_bytes: int, _mtime_ns: int, piece_bytes: int, n_pieces: int, of_disk: tuple[Path | None, str]
) -> float:
    def read() -> float:
        return scattered_rate(path, piece_bytes, n_pieces) if piece_bytes else read_rate(path)

    return statistics.median_low(_readings(*of_disk, read) or [read()])


def _readings(cache_dir: Path | None, what: str, read: Callable[[], float], *, keeps: bool = True) -> list[float]:
    """Return the kept readings of a rate on this machine, with a new one where there are not yet five.

    What is read while other programs keep the machine busy is left out, as it says nothing of the machine. Without
    `keeps` the new one is not kept.
    """
    key = f"{machine_name()} {what}"
    readings = probe_cache.get_numbers(cache_dir, _KIND, key)
    if len(readings) < _N_READINGS:
        reading, is_quiet = probe_cache.quietly(read)
        if reading > 0 and is_quiet:
            readings.append(reading)
            if keeps:
                probe_cache.put(cache_dir, _KIND, key, readings)
    return readings


def memory_rate(n_threads: int, most_bytes: int, cache_dir: Path | None = None) -> float:
    """Return how many bytes per second `n_threads` threads read from memory; measured once in this process.

    It is the best of this reading and of those that the cache holds, as other programs only slow readings down.

    Args:
        n_threads: The threads.
        most_bytes: As much memory may be taken to measure. Where that is less than a megabyte, and while the machine is
            busy, a rate that was not measured before is infinite.
        cache_dir: The cache's root; None for no cache.
    """
    if n_threads not in _memory_rates:

        def read() -> float:
            return max(read_bandwidth(n_threads, most_bytes) for _ in range(_N_MEMORY_READS))

        keeps = most_bytes >= LEAST_KEPT_BYTES
        rate = max(_readings(cache_dir, f"memory {n_threads}", read, keeps=keeps), default=0.0)
        if not rate:
            return math.inf
        _memory_rates[n_threads] = rate
    return _memory_rates[n_threads]

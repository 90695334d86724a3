"""Reads from outside what a process and its children hold together, as often as it can."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_EVERY_S = 0.002


class HeldTogether:
    """The most bytes of resident memory that a process and its children were seen to hold at one time.

    Attributes:
        peak_bytes: The most so far.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak_bytes = 0

    def read(self) -> None:
        """Look once."""
        n_bytes = sum(status_bytes(pid, "VmRSS") for pid in (self._pid, *children(self._pid)))
        self.peak_bytes = max(self.peak_bytes, n_bytes)


@contextmanager
def watching(pid: int) -> Iterator[HeldTogether]:
    """Look again and again in a thread, 500 times a second, while the block runs."""
    held, ended = HeldTogether(pid), threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            held.read()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text(encoding="ascii").split())
    return found


def status_bytes(pid: int, name: str) -> int:
    """Return a line of a process's status in bytes, such as VmRSS or VmHWM; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return 0 if match is None else 1024 * int(match[1])

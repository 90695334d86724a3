"""How long a process waits for the answer of an rpc-server before the server counts as lost."""

import math
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic

from edgedec.progress import OnProgress, Progress

LEAST_S = 30.0
"""Seconds without an answer after which a server counts as lost, where forwards take less than a quarter of that."""
_TIMES = 4  # as long as a forward took until now
# After 10 s of silence a machine is asked whether it is there; after 3 questions in vain it is not.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Patience:
    """Sets how long this process waits on its connections to servers; llama.cpp ends the process after that.

    A machine that is gone, and one that takes no data, is noticed after LEAST_S. A server that hangs on a machine that
    is there looks like one that computes, so the limit grows with the forwards that were timed.

    Attributes:
        slowest: The longest time of a forward, in seconds, by its number of rows.
        limit_s: The limit that is set.
    """

    def __init__(self) -> None:
        self.slowest: dict[int, float] = {}
        self.limit_s = 0.0

    @contextmanager
    def loading(self, on_progress: OnProgress | None) -> Iterator[OnProgress]:
        """Connect and load inside the block, which reports to what it gets; that passes the reports on.

        A server that says nothing before the first report, or later, ends this process. llama.cpp may connect again
        while it loads, so the limits are set at each report.
        """
        timer = threading.Timer(LEAST_S, _give_up)
        timer.daemon = True
        latest: int | None = None

        def report(progress: Progress) -> None:
            nonlocal latest
            if progress.done != latest:
                latest = progress.done
                timer.cancel()
                self._limit(LEAST_S)
            if on_progress is not None:
                on_progress(progress)

        timer.start()
        try:
            yield report
        finally:
            timer.cancel()
        self._limit(LEAST_S)

    @contextmanager
    def forward(self, n_rows: int) -> Iterator[None]:
        """Set the limit for a forward of so many rows, and time it, inside the block."""
        limit_s = limit_of(self.slowest, n_rows)
        if limit_s != self.limit_s:
            self._limit(limit_s)
        begun = monotonic()
        yield
        self.slowest[n_rows] = max(monotonic() - begun, self.slowest.get(n_rows, 0.0))

    def _limit(self, seconds: float) -> None:
        self.limit_s = seconds
        for number in range(3, 1024):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as connection:
                        _set_limits(connection, seconds)


def limit_of(slowest: Mapping[int, float], n_rows: int) -> float:
    """Return after how many seconds without an answer a server counts as lost during a forward of `n_rows` rows.

    `slowest` has the longest time of forwards by their number of rows. More rows at once take at most the time that
    they take one after another.

    >>> limit_of({}, 512), limit_of({1: 0.02}, 100), limit_of({1: 0.5, 16: 2.0}, 512)
    (30.0, 30.0, 256.0)
    """
    expected = [-(-n_rows // n) * seconds for n, seconds in slowest.items()]
    return max(LEAST_S, _TIMES * min(expected, default=0.0))


def _give_up() -> None:
    print(f"a server took the connection and has said nothing for {LEAST_S:g} s", file=sys.stderr, flush=True)
    os._exit(1)


def _set_limits(connection: socket.socket, seconds: float) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(1000 * LEAST_S))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", math.ceil(seconds), 0))

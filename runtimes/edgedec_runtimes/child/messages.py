"""What the two processes say to each other, and the pipe on which they say it.

Both ends are edgedec's own, and nobody else holds the pipe, so messages are pickled.
"""

import pickle
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from edgedec.errors import EdgedecError
from edgedec.progress import Progress

_LENGTH = struct.Struct("<Q")
LOAD = 0
"""The number that cancels the loading, where a session's number cancels its forward."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a method in the child.

    Attributes:
        number: The call's own number, which its reports and its answer carry.
        method: The name of a method of what the child hosts (edgedec_runtimes.child.host.Hosted).
        arguments: The method's arguments.
        reports: Whether the caller wants progress.
        sessions: The numbers of the sessions whose forward it is; empty for other calls.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    reports: bool = False
    sessions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned.

    Attributes:
        number: The call's number.
        value: What it returned; None where it failed.
        failure: What it raised, or None.
        n_cached: For each open session's number, how many tokens its KV cache holds now.
    """

    number: int
    value: Any = None
    failure: EdgedecError | None = None
    n_cached: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Progress of a call; the child waits for GoOn."""

    number: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class GoOn:
    """The answer to a Report; `stop` where the application's callback raised an exception."""

    stop: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends the forward of a session, or the loading (LOAD)."""

    session: int


Message = Ask | Answer | Report | GoOn | Cancel


class Channel:
    """One end of the pipe; any thread may send, and one thread receives."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._sending = threading.Lock()

    def send(self, message: Message, patience_s: float = -1) -> None:
        """Send a message (OSError where the other process has ended).

        Raises:
            TimeoutError: Another thread was sending for `patience_s` seconds; -1 waits for as long as it takes.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._turn(patience_s):
            self._outgoing.write(_LENGTH.pack(len(data)) + data)
            self._outgoing.flush()

    def receive(self) -> Message | None:
        """Return the next message; None where the other process has ended."""
        head = self._incoming.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (n_bytes,) = _LENGTH.unpack(head)
        data = self._incoming.read(n_bytes)
        if len(data) < n_bytes:
            return None
        message: Message = pickle.loads(data)  # of edgedec's own process, on a pipe that nobody else has
        return message

    @contextmanager
    def _turn(self, patience_s: float) -> Iterator[None]:
        if not self._sending.acquire(timeout=patience_s):
            raise TimeoutError("another thread is sending")
        try:
            yield
        finally:
            self._sending.release()

    def hang_up(self, patience_s: float = -1) -> None:
        """Close this end for sending: the other process then receives None (TimeoutError as of send())."""
        with self._turn(patience_s), suppress(OSError):  # what was not sent yet goes to nobody
            self._outgoing.close()

    def close(self) -> None:
        """Close this end, once nothing more is received."""
        self.hang_up()
        self._incoming.close()

"""Who may use a model at a time, and how another thread stops a forward that is running."""

import ctypes
import os
import sys
import threading

from edgedec.errors import CancelledError, EdgedecError, SessionError
from edgedec.model import Session
from edgedec_runtimes.shared.session_state import CheckedItem

_SET = int.from_bytes(b"\1\0\0\0", sys.byteorder)


class ModelLock:
    """Lets one thread at a time touch what a model and its sessions hold in native memory.

    The lock is reentrant: a thread that is inside may enter again.

    Attributes:
        threads: The lock alone, for closing: whoever takes it is not refused.
        refusal: The error that entering raises from now on (the model is closed, its weights are damaged), or None.
    """

    def __init__(self) -> None:
        self.threads = threading.RLock()
        self.refusal: EdgedecError | None = None
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Wait until no other thread is inside.

        Raises:
            SessionError: This process is a fork of the one that loaded the model. It does not wait: a thread of the
                parent may have been inside at the fork, and that thread is not in the child.
            EdgedecError: `refusal`.
        """
        if os.getpid() != self._pid:
            raise SessionError("the model was loaded before fork(); a child process must load its own")
        self.threads.acquire()
        if self.refusal is not None:
            self.threads.release()
            self.check()

    def __exit__(self, *_: object) -> None:
        """Let the next thread in."""
        self.threads.release()

    def check(self) -> None:
        """Raise `refusal`, if there is one."""
        if self.refusal is not None:
            raise type(self.refusal)(str(self.refusal))

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that loaded the model."""
        return os.getpid() == self._pid


class Stop:
    """Ends a model's forward early when one of the sessions in it is cancelled.

    A forward is entered by adding its items to `running`, and left by leave(), whatever ended it:

        outer = stop.running
        try:
            stop.running = (*outer, *checked)
            ...
        finally:
            stop.leave(outer)

    A forward that starts inside another one (from a progress callback) is cancelled together with the outer one.

    Attributes:
        flag: 0, or another number from a cancel() to the end of the outermost forward. Native code may read the flag
            as an int32, or as a C string of length 0 or 1; the flag stays at its address.
        running: The items of the forwards that are running, those of the outermost first.
    """

    def __init__(self) -> None:
        self.flag = ctypes.c_int32(0)
        self.running: tuple[CheckedItem, ...] = ()
        self._lock = threading.RLock()  # reentrant, as a signal handler may cancel in the thread that holds the lock

    def leave(self, outer: tuple[CheckedItem, ...]) -> None:
        """End a forward; `outer` is what was running around it."""
        with self._lock:
            self.running = outer
            if not outer:
                self.flag.value = 0

    def cancel(self, session: Session) -> None:
        """Stop the forward that the session is in, from any thread; without one, nothing happens."""
        with self._lock:
            if any(item.session is session for item in self.running):
                self.flag.value = _SET

    def check(self) -> None:
        """Raise CancelledError when the forward that is running was cancelled."""
        if self.flag.value:
            n_cached = " and ".join(str(item.session.n_cached) for item in self.running)
            raise CancelledError(f"the forward was cancelled; {n_cached} tokens are cached")

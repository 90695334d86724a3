"""Who may use a model at a time, and who may not use it any more."""

import os
import threading

from edgedec.errors import EdgedecError, SessionError


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

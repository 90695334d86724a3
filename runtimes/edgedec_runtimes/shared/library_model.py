"""What the models of all runtimes share: who may use one at a time, the way into a forward, and how it is stopped."""

import ctypes
import os
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from edgedec.closeable import Closeable
from edgedec.errors import CancelledError, EdgedecError, MemoryCapError, SessionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward, ForwardItem, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.shared.requests import Limits, check_items
from edgedec_runtimes.shared.session_state import CheckedItem

H = TypeVar("H")
S = TypeVar("S", bound=Session)

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


class LibraryModel(Closeable, Generic[H, S]):
    """The part of edgedec.model.Model that does not depend on the library that computes.

    Attributes:
        card: The facts of the model.
        capabilities: What the runtime can do with it.
        tokenizer: Its vocabulary.
        handle: What the library has opened; use it inside `lock`.
        lock: Held by whatever touches the handle and its sessions; it refuses a closed model, and a forked process.
        stop: Cancels a forward.
        tree_rows: Most rows of a tree, and of rows that see each other.
        has_places: Whether pictures' rows turn to places of their own, by height and width.
    """

    has_places = False

    def __init__(  # more than 7 parameters: one for each part that a runtime makes of a model
        self,
        handle: H,
        card: ModelCard,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        free: Callable[[], None],
        cache_dir: Path | None = None,
        tree_rows: int = 0,
        logit_rows: int = 0,
    ) -> None:
        """Take over what the library has opened; the attributes say what is not told here.

        Args:
            terms: Makes the memory plan for a context and a number of rows.
            free: Gives the handle back. Called once, in the process that loaded the model; must not refer to the model.
            cache_dir: Where a MeasuredModel keeps what is measured, if anywhere.
            logit_rows: Most rows of logits of a forward of several sessions, where one session may ask for fewer.
        """
        self.handle = handle
        self.lock = ModelLock()
        self.stop = Stop()
        self.card = card
        self.capabilities = capabilities
        self.tokenizer = tokenizer
        self._terms = terms
        self._cache_dir = cache_dir
        self.tree_rows = tree_rows
        self._limits = Limits(card, capabilities, max(logit_rows, capabilities.max_rows), tree_rows)
        self._sessions: weakref.WeakSet[S] = weakref.WeakSet()
        self._finalizer = freed_with(self, free)

    @property
    @abstractmethod
    def batch_invariant(self) -> int | Literal[True]:
        """How many rows of a forward are bit-equal to single steps; see edgedec.model.Model."""

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    @abstractmethod
    def session(self, n_ctx: int) -> S:
        """Open an empty session of `n_ctx` tokens."""

    def adopt(self, session: S) -> S:
        """Close a session together with the model; return the session."""
        self._sessions.add(session)
        return session

    @property
    def n_sessions(self) -> int:
        """How many sessions are open, or closed and not collected yet."""
        return len(self._sessions)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions; see edgedec.model.Model."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is called with the tokens of a long prefill."""
        with self.lock:
            checked = check_items(items, self, self._limits)
            outer = self.stop.running
            try:
                self.stop.running = (*outer, *checked)
                return self._evaluate(checked, on_progress)
            except MemoryError as error:
                raise MemoryCapError("no memory for a forward's results; ask for fewer rows or taps") from error
            finally:
                self.stop.leave(outer)

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate checked items, here one after another; called inside the lock."""
        return [self._run(item, on_progress) for item in checked]

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate one item."""
        raise NotImplementedError

    def recall(self, session: S, token_ids: Sequence[int], n_held: int) -> int:
        """Return how many tokens of a prompt a session holds, after it took what is kept elsewhere; here nothing is."""
        return n_held

    def recalled(self, session: S) -> list[str]:
        """Return sentences on what a session took of its latest prompt."""
        return []

    def cancel(self, session: S) -> None:
        """Stop the forward that the session is in, from any thread; without one, nothing happens."""
        self.stop.cancel(session)

    def close(self) -> None:
        """Free the weights and every session; calling it again, or in a forked process, does nothing."""
        if self.lock.is_ours:
            with self.lock.threads:
                self.lock.refusal = SessionError("the model is closed; load it again")
                for session in list(self._sessions):
                    session.close()
                self._finalizer()
                self.__dict__.pop("handle", None)


def freed_with(owner: object, free: Callable[..., object], *arguments: object) -> "weakref.finalize[..., object]":
    """Return what frees native memory once, at the latest with its owner, by `free(*arguments)`.

    A forked process leaves the parent's memory alone. At the end of the process nothing is freed: a daemon thread may
    be in a forward then.
    """
    finalizer = weakref.finalize(owner, _free, os.getpid(), free, *arguments)
    finalizer.atexit = False
    return finalizer


def _free(pid: int, free: Callable[..., object], *arguments: object) -> None:
    if os.getpid() == pid:
        free(*arguments)

"""A model in a process of its own, behind the same protocol as every other model."""

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.closeable import Closeable
from edgedec.errors import EdgedecError, RuntimeLostError, RuntimeUnavailableError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec.model import ExactRows, Forward, ForwardItem, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, check_cancelled
from edgedec_runtimes.child.host import Opened, Result
from edgedec_runtimes.child.messages import LOAD
from edgedec_runtimes.child.process import PATIENCE_S, Child
from edgedec_runtimes.child.rows import SharedRows
from edgedec_runtimes.child.tokenizer import ChildTokenizer
from edgedec_runtimes.shared.library_model import ModelLock


class ChildSession(Session):
    """Implements edgedec.model.Session. Its KV cache is lost with the child; it then begins empty in the next one.

    Attributes:
        number: What parent and child call the session.
        child: The process that it is open in, or None.
        is_closed: Whether close() was called.
        exact: What exact_rows() says at the n_past that the next forward may have; empty where nobody has asked.
    """

    def __init__(self, model: "ChildModel", number: int, n_ctx: int, child: Child | None = None) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self.number = number
        self.child = child
        self.is_closed = False
        self.exact: dict[int, ExactRows] = {}

    @property
    def model(self) -> "ChildModel":
        """The model this session belongs to."""
        return self._model

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self._n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self._model.n_cached(self)

    def check_open(self) -> None:
        """Raise SessionError once the session is closed."""
        if self.is_closed:
            raise SessionError("the session is closed; open another with model.session()")

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item; see edgedec.model.Session."""
        return self._model.evaluate((item,), on_progress)[0]

    def final_states(self, tokens: NDArray[np.int32], n_first: int | None = None) -> NDArray[np.float32]:
        """Return f32[n, n_embd], the final state of each token; see edgedec.model.EncoderSession."""
        states: NDArray[np.float32] = self._model.ask("final_states", self, tokens, n_first)
        return states

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return what the session in the child says."""
        if measure:  # which may change what it says elsewhere
            self.exact.clear()
        if n_past not in self.exact:
            self.exact[n_past] = self._model.ask("exact_rows", self, n_past, measure)
        return self.exact[n_past]

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows; see edgedec.model.Session."""
        self._model.ask("keep", self, rows)

    def fork(self) -> "ChildSession":
        """Open a second session with the cached prefix of this one."""
        return self._model.fork(self)

    def save(self) -> bytes:
        """Serialize the cached KV; see edgedec.model.Session."""
        data: bytes = self._model.ask("save", self)
        return data

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned for `n_tokens` tokens; see edgedec.model.Session."""
        self._model.ask("load", self, data, n_tokens)

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        self._model.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        self._model.release(self)


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Hosting:
    """What a child loads, and what a runtime knows of what the child depends on.

    Attributes:
        target: The function that loads the model in the child ("module:function"); it takes the path and the options.
        path: The model file.
        options: How it is loaded.
        terms: Makes the memory plan for a context and a number of rows. The plan has the child's own terms, too
            (edgedec_runtimes.child.rows).
        prepare: Called before a child is started; raises where what it depends on is not there.
        explain: Says what was lost, as a clause, from how the child ended.
        advice: What the caller can do after a loss.
    """

    target: str
    path: Path
    options: LoadOptions
    terms: Callable[[int, int], tuple[MemoryTerm, ...]]
    prepare: Callable[[], None] = _nothing
    explain: Callable[[str], str] = "the process that ran the model was lost ({})".format
    advice: str = "ask again to load the model anew"


class ChildModel(Closeable):
    """Implements edgedec.model.Model. A child that was lost is started again by the next call that needs it.

    Attributes:
        card: The facts of the model.
        capabilities: What the runtime in the child can do with it.
        tokenizer: The model's tokenizer.
        lock: Lets one thread at a time call; it refuses a closed model, and a forked process.
    """

    def __init__(self, hosting: Hosting) -> None:
        """Start a child and load the model in it (raises what Runtime.load raises)."""
        self._hosting = hosting
        self._numbers = itertools.count(LOAD + 1)
        self._running: list[Child] = []  # the child, or nothing; the finalizer has it, too
        self._starting: Child | None = None
        self._finalizer = weakref.finalize(self, _end, self._running, os.getpid())
        self.lock = ModelLock()
        opened = self._start(hosting.options)
        self.card: ModelCard = opened.card
        self.capabilities: Capabilities = opened.capabilities
        self.tokenizer = ChildTokenizer(opened.vocabulary, self._ask_tokenizer)

    def _start(self, options: LoadOptions) -> Opened:
        """Start a child, load the model in it, and share the memory for its logits."""
        self._hosting.prepare()
        child = self._starting = Child()
        cancel = options.cancel
        plain = replace(options, on_progress=None, cancel=None)
        try:
            with cancel.calling(lambda: child.cancel(LOAD)) if cancel is not None else nullcontext():
                check_cancelled(cancel, f"loading {self._hosting.path.name}")
                answer = child.ask(
                    "open", self._hosting.target, self._hosting.path, plain, on_progress=options.on_progress
                )
            opened: Opened = answer.value
            n_rows = opened.capabilities.max_rows
            self._rows = SharedRows.create(n_rows, opened.card.n_vocab)
            try:
                child.ask("share_rows", self._rows.path, len(self._rows.rows))
            finally:
                self._rows.unlink()
        except RuntimeLostError as error:
            check_cancelled(cancel, f"loading {self._hosting.path.name}")  # it hung, and was ended
            raise self._lost(error) from None
        except BaseException:
            child.kill()
            raise
        finally:
            self._starting = None
        self._running.append(child)
        return opened

    @property
    def child(self) -> Child | None:
        """The process that runs the model; None where it was lost."""
        return self._running[0] if self._running and self._running[0].ending is None else None

    @property
    def processes(self) -> tuple[int, ...]:
        """The process that runs the model; see edgedec.runtime.HasProcesses."""
        child = self.child
        return () if child is None else (child.pid,)

    def _child(self, on_progress: OnProgress | None = None) -> Child:
        """Return the process that runs the model; start another one where it was lost.

        Raises:
            RuntimeLostError: It was lost, and can't be started again yet.
        """
        if (child := self.child) is not None:
            return child
        self._running.clear()
        try:
            opened = self._start(replace(self._hosting.options, on_progress=on_progress, cancel=None))
        except RuntimeLostError:
            raise
        except RuntimeUnavailableError as error:
            loss = f"the model was lost, and can't be loaded again yet: {error.marked}"
            raise RuntimeLostError(loss) from error
        if opened.card.fingerprint != self.card.fingerprint:
            raise SessionError("the model's file or its runtime has changed since it was loaded; load it again")
        return self._running[0]

    def _lost(self, error: RuntimeLostError) -> RuntimeLostError:
        self._running.clear()
        return RuntimeLostError(self._hosting.explain(error.marked), self._hosting.advice)

    def _call(self, method: str, *arguments: Any, **rest: Any) -> Any:
        child = self._child()
        try:
            return child.ask(method, *arguments, **rest).value
        except RuntimeLostError as error:
            raise self._lost(error) from None

    def _ask_tokenizer(self, method: str, *arguments: Any) -> Any:
        """Call the tokenizer, which does not wait for a forward."""
        self.lock.check()
        if self.lock.is_ours and (child := self.child) is not None:
            with suppress(RuntimeLostError):
                return child.ask(method, *arguments).value
        with self.lock:
            return self._call(method, *arguments)

    def _number(self, session: ChildSession) -> int:
        """Return the number of a session, which is opened where it is not open in the running child."""
        if not isinstance(session, ChildSession) or session.model is not self:
            raise SessionError("the session belongs to another model; open one with model.session()")
        session.check_open()
        child = self._child()
        if session.child is not child:
            self._call("session", session.number, session.n_ctx)
            session.child = child
        return session.number

    def ask(self, method: str, session: ChildSession, *arguments: Any) -> Any:
        """Call a method in the child, with the session's number before the arguments."""
        with self.lock:
            return self._call(method, self._number(session), *arguments)

    @cached_property
    def batch_invariant(self) -> int | Literal[True]:  # measured in the child, at the first read
        """How many rows of one forward are bit-equal to single steps; see edgedec.model.Model."""
        with self.lock:
            n_rows: int | Literal[True] = self._call("batch_invariant")
            return n_rows

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what this machine will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._hosting.terms(n_ctx, n_rows)

    def session(self, n_ctx: int) -> ChildSession:
        """Open an empty session of `n_ctx` tokens."""
        with self.lock:
            session = ChildSession(self, next(self._numbers), n_ctx)
            self._number(session)
            return session

    def fork(self, session: ChildSession) -> ChildSession:
        """Fork a session in the child."""
        with self.lock:
            twin = next(self._numbers)
            self._call("fork", self._number(session), twin)
            return ChildSession(self, twin, session.n_ctx, self.child)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions; see edgedec.model.Model."""
        return self.evaluate(items, None)

    def evaluate(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate items in the child; their rows of logits are views of shared memory, or arrays of their own."""
        with self.lock:
            for item in items:
                self._require_text(item)
            self._child(on_progress)
            numbers = tuple(self._number(item.session) for item in items)  # type: ignore[arg-type]  # checked there
            sessions: list[ChildSession] = [item.session for item in items]  # type: ignore[misc]  # checked above
            sent = [
                (session.number, replace(item, session=None), bool(session.exact))  # type: ignore[arg-type]  # put back
                for session, item in zip(sessions, items, strict=True)
            ]
            results: list[Result] = self._call("forward", sent, on_progress=on_progress, sessions=numbers)
            for session, result in zip(sessions, results, strict=True):
                session.exact = result.exact
            return [self._forward(result) for result in results]

    def _require_text(self, item: ForwardItem) -> None:
        """Raise RuntimeLostError where an item goes on behind tokens that were lost with a child, the first time."""
        session = item.session
        if isinstance(session, ChildSession) and session.child is not None and session.child is not self.child:
            session.child = None
            if item.n_past:
                raise RuntimeLostError(
                    "the process that held the text was lost with what it held", "read the text again"
                )

    def _forward(self, result: Result) -> Forward:
        if result.row is None:
            assert result.logits is not None, "rows that are not shared come along"
            return Forward(result.logits, result.hidden, best=result.best, is_own=True)
        rows = self._rows.rows[result.row : result.row + result.shape[0]]
        return Forward(rows, result.hidden, best=result.best)

    def n_cached(self, session: ChildSession) -> int:
        """Return how many tokens a session holds; 0 where it is in no child that runs."""
        child = self.child
        return 0 if child is None or session.child is not child else child.n_cached.get(session.number, 0)

    def cancel(self, session: ChildSession) -> None:
        """Cancel the forward that the session is in, or the loading that it waits for, from any thread."""
        if (starting := self._starting) is not None:
            starting.cancel(LOAD)
        if (child := self.child) is not None and session.child is child:
            child.cancel(session.number)

    def release(self, session: ChildSession) -> None:
        """Close a session; calling it again, or in a forked process, does nothing."""
        if not self.lock.is_ours or session.is_closed:
            return
        with self.lock.threads:
            session.is_closed = True
            if (child := self.child) is not None and session.child is child:
                with suppress(EdgedecError):  # it is gone with the process
                    child.ask("close_session", session.number, patience_s=PATIENCE_S)

    def close(self) -> None:
        """End the child; calling it again, or in a forked process, does nothing."""
        if self.lock.is_ours:
            with self.lock.threads:
                self.lock.refusal = SessionError("the model is closed; load it again")
                self._finalizer()


def _end(running: list[Child], pid: int) -> None:
    """End the child, once it has freed the model; a forked process leaves the parent's child alone."""
    if os.getpid() != pid:
        return
    while running:
        child = running.pop()
        with suppress(EdgedecError):
            child.ask("close", patience_s=PATIENCE_S)
        child.end()

"""A model on the cpu runtime: native weights, and forwards that go through the layers in chunks."""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, EdgedecError, MemoryCapError, RequestError, SessionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard, Session
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.cpu.damage import explain
from edgedec_runtimes.cpu.library import (
    CANCELLED,
    NOT_FINITE,
    OPERATIONS,
    UNREADABLE,
    Item,
    address,
    check,
    last_error,
    native,
)
from edgedec_runtimes.cpu.logit_ops import NativeRowOps
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.cpu.tiles.cache import Tiles
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.cpu.weights import MAX_ROWS
from edgedec_runtimes.shared.bookkeeping import Checked, ModelLock, Shape, Stop, check_items, check_step


@dataclass(slots=True)
class Work:
    """One item of a forward, and where its results go."""

    session: CpuSession
    checked: Checked
    logits: NDArray[np.float32]
    hidden: dict[int, NDArray[np.float32]]


class CpuModel:
    """Implements edgedec.model.Model.

    Attributes:
        lock: Held by whatever touches the native model and its sessions; see exclusive().
        stop: What cancels a forward.
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        tiles: Tiles | StreamedTiles,
        tokenizer: Tokenizer,
        card: ModelCard,
        kv_type: int,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        n_kept_rows: int,
    ) -> None:
        """Take over the native model.

        Args:
            handle: The native model.
            tiles: Its weights.
            tokenizer: The vocabulary.
            card: The facts.
            kv_type: Of sessions, as the library numbers it.
            terms: Makes the memory plan for a context and a number of rows.
            n_kept_rows: Rows of logits that have their place between forwards; one that wants more gets its own.
        """
        self._handle = handle
        self._tiles = tiles
        self._failure: EdgedecError | None = None
        self._tokenizer = tokenizer
        self._card = card
        self._kv_type = kv_type
        self._terms = terms
        self._shape = Shape(card.n_vocab, card.n_embd, card.n_layer, MAX_ROWS)
        self._ops = NativeRowOps(native().ec_model_instruction_set(handle))
        self._logits = np.empty((n_kept_rows, card.n_vocab), np.float32)
        self._logits_address = address(self._logits)
        self._one_row = Forward(self._logits[:1], {}, self._ops)
        self.lock = ModelLock()
        self.stop = Stop()
        self._flag_address = ctypes.addressof(self.stop.flag)
        self._sessions: weakref.WeakSet[CpuSession] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _free, handle, tiles, os.getpid())
        self._finalizer.atexit = False  # a daemon thread may be in a forward then

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return Capabilities(
            rollback=True,
            trees=True,
            fork=True,
            layers=True,
            taps=True,
            hidden_input=True,
            max_rows=MAX_ROWS,
            prefill_chunk=1,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the file."""
        return self._tokenizer

    @property
    def batch_invariant(self) -> Literal[True]:
        """True by construction: see native/kernels.h."""
        return True

    @property
    def instruction_set(self) -> str:
        """Which kernels compute ("avx512vnni", ...)."""
        with self.exclusive():
            return str(native().ec_model_instruction_set(self._handle).decode())

    def operation_seconds(self) -> dict[str, float]:
        """Return the seconds that all forwards so far spent in each operation."""
        seconds = np.zeros(len(OPERATIONS))
        with self.exclusive():
            native().ec_model_seconds(self._handle, address(seconds))
        return dict(zip(OPERATIONS, seconds.tolist(), strict=True))

    def streamed_bytes(self) -> int:
        """Return how many bytes of weights were read for forwards so far; 0 where all stay in memory."""
        with self.exclusive():
            return int(native().ec_model_streamed_bytes(self._handle))

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    def session(self, n_ctx: int) -> CpuSession:
        """Open an empty session; its pages are allocated as they are written."""
        with self.exclusive():
            if n_ctx < 1 or n_ctx > 1 << 24:
                raise RequestError(f"n_ctx is {n_ctx}; a session holds 1 to {1 << 24} tokens")
            handle = ctypes.c_void_p()
            code = native().ec_session_open(self._handle, n_ctx, self._kv_type, ctypes.byref(handle))
            check(code, f"a session of {n_ctx} tokens")
            try:
                return self.adopt(handle, n_ctx)
            except MemoryError as error:
                raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error

    def adopt(self, handle: ctypes.c_void_p, n_ctx: int) -> CpuSession:
        """Take over a native session."""
        session = CpuSession(self, handle, n_ctx)
        self._sessions.add(session)
        return session

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions together."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.exclusive():
            work = self._prepare(items)
            with self.stop.running([w.session for w in work]):
                for w in work:
                    w.session.state.begin(w.checked)
                self._run(work, on_progress)
            return [Forward(w.logits, w.hidden, self._ops) for w in work]

    def step(self, session: CpuSession, tokens: NDArray[np.int32], n_past: int) -> Forward:
        """Evaluate one token of a session that holds whole tokens: a forward with less to prepare."""
        with self.lock:
            self._check_alive()
            state, step = session.state, session.step
            check_step(tokens, n_past, state, self._shape)
            outer: tuple[Session, ...] = ()
            try:
                outer = self.stop.enter((session,))
                state.begin_step(n_past)
                step.item.n_past = n_past
                step.token[0] = tokens[0]
                code = native().ec_forward(self._handle, step.pointer, 1, self._logits_address, self._flag_address)
                if code:
                    self._refuse(code)
                state.advance_step()
            finally:
                self.stop.leave(outer)
            return self._one_row

    def _prepare(self, items: Sequence[ForwardItem]) -> list[Work]:
        checked = check_items(items, self, self._shape)
        if any(c.parents is not None and c.n_rows > MAX_ROWS for c in checked):
            raise CapabilityError(f"a tree has over {MAX_ROWS} rows; a forward takes at most that")
        try:
            return list(self._with_results(items, checked))
        except MemoryError as error:
            raise MemoryCapError("no memory for a forward's results; ask for fewer rows or taps") from error

    def _with_results(self, items: Sequence[ForwardItem], checked: list[Checked]) -> Iterator[Work]:
        n_wanted, first = sum(len(c.wanted) for c in checked), 0
        logits = self._logits
        if len(logits) < n_wanted:
            logits = np.empty((n_wanted, self._card.n_vocab), np.float32)
        for item, c in zip(items, checked, strict=True):
            assert isinstance(item.session, CpuSession), "a session of this model is one of this class"
            hidden = {tap: np.empty((c.n_rows, self._card.n_embd), np.float32) for tap in c.taps}
            yield Work(item.session, c, logits[first : first + len(c.wanted)], hidden)
            first += len(c.wanted)

    def _run(self, work: list[Work], on_progress: OnProgress | None) -> None:
        """Evaluate long chains in chunks by themselves, the ends of all items together."""
        n_total, n_done = sum(w.checked.n_rows for w in work), 0
        groups, last = _groups(work)
        for group in [*groups, *last]:
            n_done += self._native_forward(group)
            if on_progress is not None and n_total > MAX_ROWS:
                on_progress(Progress("prefill", n_done, n_total, "tokens"))

    def _native_forward(self, group: list[tuple[Work, int, int]]) -> int:
        pieces = [Piece(work, begin, end, self._card.n_embd) for work, begin, end in group]
        items = (Item * len(pieces))(*(piece.item for piece in pieces))
        n_wanted = sum(piece.n_wanted for piece in pieces)
        logits = np.empty((n_wanted, self._card.n_vocab), np.float32) if len(pieces) > 1 else pieces[0].logits
        code = native().ec_forward(self._handle, items, len(pieces), address(logits), self._flag_address)
        if code:
            self._refuse(code)
        first = 0
        for piece in pieces:
            if len(pieces) > 1:
                piece.logits[:] = logits[first : first + piece.n_wanted]
                first += piece.n_wanted
            piece.finish()
        return sum(end - begin for _, begin, end in group)

    def _refuse(self, code: int) -> NoReturn:
        """Raise the error of a forward; with weights that are of no use it is that of every later one, too."""
        if code == CANCELLED:
            self.stop.check()
        if code == NOT_FINITE or (code == UNREADABLE and isinstance(self._tiles, Tiles)):
            self._failure = explain(code, last_error(), self._tiles)
            raise self._failure
        check(code, "a forward")
        raise AssertionError("a forward that failed has an error")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let nobody else use the native model and its sessions.

        Raises:
            SessionError: The model is closed, or of the process that this one is a fork of.
            StorageError, ModelFormatError: Its weights were found to be damaged, in an earlier forward.
        """
        with self.lock:
            self._check_alive()
            yield

    def _check_alive(self) -> None:
        self.lock.check_process()
        if not self._finalizer.alive:
            raise SessionError("the model is closed; load it again")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""
        with self.lock:
            for session in list(self._sessions):
                session.close()
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Piece:
    """Rows [begin, end) of an item as the native library takes them; keeps what the pointers point to."""

    def __init__(self, work: Work, begin: int, end: int, n_embd: int) -> None:
        c = work.checked
        self._work, self._begin, self._end = work, begin, end
        first, last = np.searchsorted(c.wanted, (begin, end))
        self._wanted = np.ascontiguousarray(c.wanted[first:last] - begin)
        self.n_wanted = len(self._wanted)
        self.logits = work.logits[first:last]
        self._tokens = None if c.tokens is None else c.tokens[begin:end]
        self._hidden = None if c.hidden is None else c.hidden[begin:end]
        self._masks = None if c.layers is None else [m.astype(np.uint8) for m in (c.layers.attn, c.layers.mlp)]
        self._taps = np.array(c.taps, dtype=np.int32)
        self._tapped = np.empty((len(c.taps), end - begin, n_embd), np.float32)
        self.item = Item(
            session=work.session.handle,
            n_past=c.n_past + begin,
            n_rows=end - begin,
            tokens=_pointer(self._tokens),
            hidden=_pointer(self._hidden),
            first_layer=c.first_layer,
            n_wanted=self.n_wanted,
            wanted=_pointer(self._wanted),
            parents=_pointer(c.parents),
            attn=_pointer(self._masks[0] if self._masks else None),
            mlp=_pointer(self._masks[1] if self._masks else None),
            taps=_pointer(self._taps),
            tapped=_pointer(self._tapped),
            n_taps=len(c.taps),
        )

    def finish(self) -> None:
        """Count the rows as cached and put the hidden states where they belong."""
        state, c = self._work.session.state, self._work.checked
        for tap, states in zip(c.taps, self._tapped, strict=True):
            self._work.hidden[tap][self._begin : self._end] = states
        if c.parents is None:
            state.advance(self._end - self._begin)
        else:
            state.become_branched()


def _pointer(array: NDArray[Any] | None) -> int | None:
    return None if array is None else address(array)


def _groups(work: list[Work]) -> tuple[list[list[tuple[Work, int, int]]], list[list[tuple[Work, int, int]]]]:
    """Cut items into forwards of at most MAX_ROWS rows: the beginnings of long chains, then all ends."""
    beginnings, ends = [], [list[tuple[Work, int, int]]()]
    for w in work:
        begin, n = 0, w.checked.n_rows
        while n - begin > MAX_ROWS:
            beginnings.append([(w, begin, begin + MAX_ROWS)])
            begin += MAX_ROWS
        if sum(e - b for _, b, e in ends[-1]) + n - begin > MAX_ROWS:
            ends.append([])
        ends[-1].append((w, begin, n))
    return beginnings, [group for group in ends if group]


def _free(handle: ctypes.c_void_p, tiles: Tiles | StreamedTiles, pid: int) -> None:
    """Free native memory; a forked child leaves the parent's alone."""
    if os.getpid() == pid:
        native().ec_model_destroy(handle)
        tiles.close()

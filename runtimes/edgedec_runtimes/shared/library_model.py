"""The part of a model that does not depend on what it evaluates with: what it holds until it is closed."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

from edgedec.errors import SessionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward, ForwardItem, ModelCard, Session
from edgedec.progress import OnProgress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.shared.bookkeeping import ModelLock, Shape, Stop

H = TypeVar("H")
S = TypeVar("S", bound=Session)


class LibraryModel(Generic[H, S]):
    """The part of edgedec.model.Model that is the same for models of one thing that a library has opened.

    Attributes:
        lock: Held by whatever touches the handle and its sessions; see exclusive().
        stop: What cancels a forward.
    """

    def __init__(
        self,
        handle: H,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        max_rows: int,
    ) -> None:
        """Take over what evaluates.

        Args:
            handle: What a library has opened; `_free` gives it back.
            tokenizer: The vocabulary.
            card: The facts.
            terms: Makes the memory plan for a context and a number of rows.
            max_rows: Most rows of logits of a forward.
        """
        self._handle: H | None = handle
        self._tokenizer = tokenizer
        self._card = card
        self._terms = terms
        self._shape = Shape(card.n_vocab, card.n_embd, card.n_layer, max_rows)
        self.lock = ModelLock()
        self.stop = Stop()
        self._sessions: weakref.WeakSet[S] = weakref.WeakSet()

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the export."""
        return self._tokenizer

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions, one after another."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        raise NotImplementedError

    @contextmanager
    def exclusive(self) -> Iterator[H]:
        """Let nobody else use the handle and its sessions.

        Raises:
            SessionError: The model is closed, or of the process that this one is a fork of.
        """
        with self.lock:
            self.lock.check_process()
            if self._handle is None:
                raise SessionError("the model is closed; load it again")
            yield self._handle

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""
        with self.lock:
            for session in list(self._sessions):
                session.close()
            if self._handle is not None:
                self._free(self._handle)
            self._handle = None

    def _free(self, handle: H) -> None:
        """Do what ends it, beside dropping it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

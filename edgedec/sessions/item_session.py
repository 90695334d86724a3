"""Base classes of sessions: one turns a forward's parameters into an item, one passes calls on to another session."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.draft_call import DraftCall
from edgedec.errors import CapabilityError, argument
from edgedec.head_state import HeadState
from edgedec.model import Forward, ForwardItem, LayerSet, Model, Rows, Session
from edgedec.progress import OnProgress
from edgedec.stats import DecodeStats


class ItemSession(Session):
    """A Session whose subclasses implement `evaluate` instead of `forward`.

    The nine parameters of Session.forward are written out there, for callers and type checkers, and here, where they
    become a ForwardItem; everything behind takes that item.
    """

    def forward(
        self,
        tokens: NDArray[np.int32] | None = None,
        *,
        n_past: int,
        hidden: NDArray[np.float32] | None = None,
        resume_after: int | None = None,
        parents: NDArray[np.int32] | None = None,
        layers: LayerSet | None = None,
        rows: Rows = "last",
        taps: tuple[int, ...] = (),
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate new rows; see edgedec.model.Session."""
        item = ForwardItem(self, n_past, tokens, hidden, resume_after, parents, layers, rows, taps)
        return self.evaluate(item, on_progress)

    @abstractmethod
    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item of this session (raises what Session.forward raises)."""

    @cached_property
    def _exact_rows(self) -> int | None:
        claim, most = self.model.batch_invariant, self.model.capabilities.max_rows
        exact = most if claim is True else min(claim, most)
        return exact if exact > 1 else None

    def exact_rows(self, n_past: int) -> int | None:
        """Return what the model says for contexts of any length; see edgedec.model.Session."""
        return self._exact_rows

    def has_exact_rows(self, n_past: int, n_rows: int, *, measure: bool = True) -> bool:
        """Tell what the model says for contexts of any length; see edgedec.model.Session."""
        return n_rows <= (self.exact_rows(n_past) or 1)


class OuterSession(ItemSession):
    """A session around another one, to which it passes on what its subclasses do not change.

    Attributes:
        inner: The session inside.
    """

    def __init__(self, inner: Session) -> None:
        self.inner = inner

    @property
    def model(self) -> Model:
        """The model this session belongs to."""
        return self.inner.model

    @property
    def n_ctx(self) -> int:
        """Most tokens that the KV cache holds."""
        return self.inner.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self.inner.n_cached

    @property
    def shared(self) -> SharedForward | None:
        """The latest forward, where it may have been shared with other sessions."""
        return self.inner.shared

    @property
    def draft_head(self) -> HeadState | None:
        """The draft head that follows the session inside."""
        return self.inner.draft_head

    def answer(self, calls: Sequence[tuple[Session, DraftCall]]) -> list[SharedForward]:
        """Let the session inside answer calls for its text, and those for texts of other sessions of this kind."""
        inner = [(session.inner if isinstance(session, OuterSession) else session, call) for session, call in calls]
        return self.inner.answer(inner)

    def exact_rows(self, n_past: int) -> int | None:
        """Return what the session inside says."""
        return self.inner.exact_rows(n_past)

    def has_exact_rows(self, n_past: int, n_rows: int, *, measure: bool = True) -> bool:
        """Tell what the session inside says."""
        return self.inner.has_exact_rows(n_past, n_rows, measure=measure)

    def generating(self, n_prompt: int) -> AbstractContextManager[None]:
        """Begin a text that ends with the block; see edgedec.model.Session."""
        return self.inner.generating(n_prompt)

    def count_text(self, stats: DecodeStats, n_generated: int) -> None:
        """Let the session inside add what it knows of the text."""
        self.inner.count_text(stats, n_generated)

    def open(self, n_ctx: int) -> Session:
        """Open a session like the one inside."""
        return self.inner.open(n_ctx)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        self.inner.keep(rows)

    def fork(self) -> Session:
        """Open a second session that shares this one's cached prefix."""
        return self.inner.fork()

    def save(self) -> bytes:
        """Serialize the cached KV."""
        return self.inner.save()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned."""
        self.inner.load(data, n_tokens)

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        self.inner.cancel()

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        self.inner.close()


class UnsavedSession(ItemSession):
    """A session whose state is more than a KV cache: it can't be forked, saved or restored.

    Attributes:
        what: What holds that state, for the message.
        option: The option of edgedec.load to leave out instead.
    """

    what: str
    option: str

    def fork(self) -> Session:
        """Refuse (CapabilityError)."""
        raise self._refusal("forked")

    def save(self) -> bytes:
        """Refuse (CapabilityError)."""
        raise self._refusal("saved")

    def load(self, data: bytes, n_tokens: int) -> None:
        """Refuse (CapabilityError)."""
        raise self._refusal("restored")

    def _refusal(self, action: str) -> CapabilityError:
        return CapabilityError(f"{self.what} can't be {action}; load the model without {argument(self.option)}")

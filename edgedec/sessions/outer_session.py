"""Base classes of sessions around another session: what they do not change is the inner session's own."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.closeable import Closeable
from edgedec.cost_curve import SharedForward
from edgedec.errors import CapabilityError, ModelFormatError, argument
from edgedec.head_state import DraftCall, HeadState
from edgedec.memory_plan import MemoryTerm
from edgedec.model import ExactRows, Forward, ForwardItem, Model, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress
from edgedec.runtime import processes_of
from edgedec.sampling import SamplingParams
from edgedec.stats import DecodeStats
from edgedec.tokenizer import Tokenizer


class OuterSession(Session):
    """A session around another one, to which it passes on what its subclasses do not change; see Session.

    Where the model is another one than the inner session's (edgedec.sessions.outer_session.OuterModel), its fingerprint
    marks what save() returns, so that no other model loads it.

    Attributes:
        inner: The session inside.
    """

    def __init__(self, inner: Session, model: Model | None = None) -> None:
        """Stand around `inner`, as a session of `model`; None for the inner session's model."""
        self.inner = inner
        self._model = inner.model if model is None else model

    @property
    def model(self) -> Model:
        return self._model

    @property
    def n_ctx(self) -> int:
        return self.inner.n_ctx

    @property
    def n_cached(self) -> int:
        return self.inner.n_cached

    @property
    def draft_head(self) -> HeadState | None:
        """The draft head that follows the session inside; its calls go the way of answer()."""
        head = self.inner.draft_head
        return None if head is None else head.seen_by(joined=lambda call: self.answer([(self, call)])[0])

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        return self.inner.evaluate(replace(item, session=self.inner), on_progress)

    def answer(self, calls: Sequence[tuple[Session, DraftCall]]) -> list[SharedForward]:
        """Let the session inside answer calls for its text, and those for texts of other sessions of this kind."""
        inner = [(session.inner if isinstance(session, OuterSession) else session, call) for session, call in calls]
        return self.inner.answer(inner)

    @property
    def scales(self) -> tuple[float, ...]:
        return self.inner.scales

    @scales.setter
    def scales(self, scales: tuple[float, ...]) -> None:
        self.inner.scales = scales
        self._emptied()

    def _emptied(self) -> None:
        """Note that the session inside holds no token any more."""

    def room(self, n_tokens: int) -> int:
        """Return what the session inside has room for, within the longest text."""
        return min(self.n_ctx - n_tokens, self.inner.room(n_tokens))

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        return self.inner.exact_rows(n_past, measure)

    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> AbstractContextManager[None]:
        return self.inner.generating(n_prompt, sampling, seed, stats)

    def keep(self, rows: NDArray[np.int32]) -> None:
        self.inner.keep(rows)

    def fork(self) -> Session:
        """Open a second session that shares this one's cached prefix, around a fork of the session inside."""
        return type(self)(self.inner.fork(), self.model)

    def save(self) -> bytes:
        """Serialize the cached KV, marked where the model is another one than the inner session's."""
        return self._mark + self.inner.save()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned (ModelFormatError where a session of another model returned it)."""
        mark = self._mark
        if not data.startswith(mark):
            raise ModelFormatError(
                "the saved state was made by another model, or with other layers; evaluate the tokens again"
            )
        self.inner.load(data[len(mark) :], n_tokens)

    @property
    def _mark(self) -> bytes:
        fingerprint, inner = self.model.card.fingerprint, self.inner.model.card.fingerprint
        return b"" if fingerprint == inner else fingerprint.encode()

    def cancel(self) -> None:
        self.inner.cancel()

    def close(self) -> None:
        self.inner.close()


class UnsavedSession(Session):
    """A session whose state is more than a KV cache: it can't be forked, saved or restored (CapabilityError).

    Attributes:
        what: What holds that state, for the message.
        option: The option of edgedec.load to leave out instead.
    """

    what: str
    option: str

    def fork(self) -> Session:
        raise self._refusal("forked")

    def save(self) -> bytes:
        raise self._refusal("saved")

    def load(self, data: bytes, n_tokens: int) -> None:
        raise self._refusal("restored")

    def _refusal(self, action: str) -> CapabilityError:
        return CapabilityError(f"{self.what} can't be {action}; load the model without {argument(self.option)}")


class OuterModel(Closeable):
    """The part of edgedec.model.Model that a model around another one passes on; see Model.

    Attributes:
        inner: The model inside, which is closed with this one.
        card: The facts of this model; its fingerprint is another than the inner model's where a logit is.
        capabilities: What sessions of this model can do.
    """

    def __init__(self, inner: Model, card: ModelCard, capabilities: Capabilities) -> None:
        self.inner = inner
        self.card = card
        self.capabilities = capabilities

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inner.tokenizer

    @property
    def batch_invariant(self) -> int | Literal[True]:
        """How many rows of a forward are bit-equal to single steps, as the model inside says."""
        return self.inner.batch_invariant

    @property
    def processes(self) -> tuple[int, ...]:
        """The further processes of the model inside."""
        return processes_of(self.inner)

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        return self.inner.memory(n_ctx, n_rows)

    def close(self) -> None:
        self.inner.close()

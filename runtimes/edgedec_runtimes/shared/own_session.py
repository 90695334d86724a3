"""What sessions share whose runtime keeps their KV cache itself, and counts what it holds with a SessionState."""

import struct
from typing import Generic, Protocol, TypeVar

from edgedec.errors import ModelFormatError
from edgedec.model import Forward, ForwardItem, Model
from edgedec.progress import OnProgress
from edgedec.sessions.item_session import ItemSession
from edgedec_runtimes.shared.bookkeeping import SessionState

_HEAD = struct.Struct("<64sI")


class ReportingModel(Model, Protocol):
    """A model that tells of a long prefill."""

    def forward_with_progress(self, items: list[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""


M = TypeVar("M", bound=ReportingModel)


class OwnSession(ItemSession, Generic[M]):
    """The part of edgedec.model.Session that does not depend on where keys and values lie.

    Attributes:
        state: What the cache holds.
    """

    def __init__(self, model: M, n_ctx: int) -> None:
        """Begin empty."""
        self._model = model
        self.state = SessionState(n_ctx, model.card.n_layer)

    @property
    def model(self) -> M:
        """The model this session belongs to."""
        return self._model

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self.state.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self.state.n_cached

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item; see edgedec.model.Session."""
        return self._model.forward_with_progress([item], on_progress)[0]

    def _saved_head(self, n_tokens: int) -> bytes:
        """Return what save() begins with: the model's fingerprint, and how many tokens follow."""
        return _HEAD.pack(self._model.card.fingerprint.encode(), n_tokens)

    def _check_saved_tokens(self, n_tokens: int) -> None:
        """Raise ModelFormatError where a saved state holds more tokens than the session may."""
        if not 0 <= n_tokens <= self.n_ctx:
            raise ModelFormatError(
                f"the saved state holds {n_tokens} tokens, the session {self.n_ctx}; open a longer one"
            )

    def _saved_body(self, data: bytes, n_tokens: int, n_bytes: int) -> int:
        """Return where the body of a saved state begins (ModelFormatError: another head, or no body of `n_bytes`)."""
        head = self._saved_head(n_tokens)
        if data[: len(head)] != head or len(data) != len(head) + n_bytes:
            raise ModelFormatError(
                f"the saved state ({len(data)} bytes) is not one of {n_tokens} tokens of this model with these "
                "options; evaluate the tokens again"
            )
        return len(head)

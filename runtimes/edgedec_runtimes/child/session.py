"""One sequence's KV cache on a model in a child."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import SessionError
from edgedec.model import ExactRows, Forward, ForwardItem, Model, Session
from edgedec.progress import OnProgress
from edgedec_runtimes.child.process import Child


class Hosted(Model, Protocol):
    """What a session needs of its model."""

    def ask(self, method: str, session: "ChildSession", *arguments: Any) -> Any:
        """Call a method in the child, with the session's number before the arguments."""

    def evaluate(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate items in the child."""

    def fork(self, session: "ChildSession") -> "ChildSession":
        """Fork a session in the child."""

    def n_cached(self, session: "ChildSession") -> int:
        """Return how many tokens a session holds; 0 where it is in no child that runs."""

    def cancel(self, session: "ChildSession") -> None:
        """Cancel a session's forward."""

    def release(self, session: "ChildSession") -> None:
        """Close a session in the child."""


class ChildSession(Session):
    """Implements edgedec.model.Session. Its KV cache is lost with the child; it then begins empty in the next one.

    Attributes:
        number: What parent and child call the session.
        child: The process that it is open in, or None.
        is_closed: Whether close() was called.
        exact: What exact_rows() says at the n_past that the next forward may have; empty where nobody has asked.
    """

    def __init__(self, model: Hosted, number: int, n_ctx: int, child: Child | None = None) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self.number = number
        self.child = child
        self.is_closed = False
        self.exact: dict[int, ExactRows] = {}

    @property
    def model(self) -> Hosted:
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

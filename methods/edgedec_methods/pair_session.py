"""Two models of one vocabulary on whose sessions a text is written: what every such session has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, SessionError, argument
from edgedec.model import ForwardItem, Model, Session
from edgedec.sampling import SamplingParams
from edgedec.sessions.outer_session import UnsavedSession
from edgedec.stats import DecodeStats


class PairSession(UnsavedSession):
    """Implements the part of edgedec.model.Session that does not depend on how two models write together.

    Args:
        first: A session of the model that the text is said to be of.
        second: A session of a model with the same vocabulary. The rows of neither model may depend on how a prefill is
            cut (Capabilities.prefill_chunk is 1), as the text would depend on that, too.

    Raises:
        CapabilityError: The rows of a model depend on how a prefill is cut, or a model can't go back.
    """

    what = "what two models hold"
    together: ClassVar[str]
    """What the two models do, after "two models that", as in "write in turn"."""

    def __init__(self, first: Session, second: Session) -> None:
        for session in (first, second):
            card, capabilities = session.model.card, session.model.capabilities
            capabilities.require("rollback", card.runtime)
            if capabilities.prefill_chunk != 1:
                raise CapabilityError(
                    f"on the {card.runtime} runtime a text depends on how its prompt is cut, so {name_of(session)} "
                    f"can't {self.together} with another model; choose another runtime (cpu), or leave "
                    f"{argument(self.option)} out"
                )
        self.sessions = (first, second)
        self._first = 0  # position of the prompt's last token: the first row that a token is drawn from

    @property
    def model(self) -> Model:
        """The first model."""
        return self.sessions[0].model

    @property
    def n_ctx(self) -> int:
        """Most tokens that both models can hold."""
        return min(session.n_ctx for session in self.sessions)

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Begin a text whose first `n_prompt` tokens are its prompt; it ends with the block."""
        self.begin(n_prompt)
        try:
            yield
        finally:
            if stats is not None:
                self._count(stats)

    def begin(self, n_prompt: int) -> None:
        """Begin a text whose first `n_prompt` tokens are its prompt."""
        self._first = n_prompt - 1

    def _count(self, stats: DecodeStats) -> None:
        """Put into the statistics how a text was written."""
        raise NotImplementedError

    def chain_of(self, item: ForwardItem) -> NDArray[np.int32]:
        """Return the tokens of an item.

        Raises:
            CapabilityError: The item is no chain of tokens, or its rows don't pass all layers.
            SessionError: The text has less than `n_past` tokens.
        """
        if item.chain is None:
            raise CapabilityError(f"two models that {self.together} take chains of tokens, through all of their layers")
        if not 0 <= item.n_past <= self.n_cached:
            raise SessionError(f"n_past is {item.n_past}; the session has evaluated {self.n_cached} tokens")
        return item.chain

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Raise SessionError: two models evaluate no trees."""
        raise SessionError(f"keep() follows a tree, and two models that {self.together} take none")

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        for session in self.sessions:
            session.cancel()

    def close(self) -> None:
        """Free both KV caches; calling it again does nothing."""
        for session in self.sessions:
            session.close()


def name_of(session: Session) -> str:
    """Return the name of a session's model, its architecture where it has none."""
    card = session.model.card
    return card.name or card.architecture

"""A drafter's call of a model for one text; calls for several texts are answered together."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from edgedec.cost_curve import SharedForward


class DraftCall(Protocol):
    """A call of a trained head or of a draft model for one session's text.

    Calls for several texts are answered together where they are of one kind, so that each reading of the weights serves
    all of them. Each call gets the bits that it would get alone.
    """

    @property
    def kind(self) -> Hashable:
        """Calls of one kind can be answered together."""

    @property
    def n_rows(self) -> int:
        """How many rows were evaluated, once the call was answered."""

    def answer(self, others: Sequence["DraftCall"]) -> None:
        """Answer this call, and calls of the same kind for other texts, together.

        Raises:
            EdgedecError: The weights are damaged, one of the sessions is closed, or a forward failed; no call counts as
                answered then, and each can be answered again.
        """


JoinedCalls = Callable[[DraftCall], SharedForward]
"""Answers a call, maybe together with other texts' calls, and returns what was answered together."""

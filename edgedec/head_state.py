"""Drafts that models make for a session's text: calls of a model, and a trained head that follows the text.

A head reads hidden states of the target, so what it knows of a text belongs to the target's session: it is dropped
beyond n_past, kept, forked, saved and restored together with the KV cache.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import DraftPrice, SharedForward
from edgedec.logit_ops import LogitOps


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


@dataclass(frozen=True, slots=True)
class ChainRules:
    """When a drafted chain ends.

    Attributes:
        n_max: Most nodes.
        least_path: The chain ends with the node at which the product of the corrected probabilities falls below this.
        edges: Ascending borders of the ranges in which probabilities are corrected alike.
        factors: What a probability is multiplied by in each range, one more than there are edges; the product is at
            most 0.995. None corrects nothing.
        most_s: Seconds after which no further node is drafted.
    """

    n_max: int
    least_path: float = 0.0
    edges: tuple[float, ...] = ()
    factors: tuple[float, ...] | None = None
    most_s: float = inf


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """A chain of a head's most probable tokens, and at each place the second one.

    Attributes:
        tokens: The target's ids of the chain's tokens.
        p: The head's probability of each, given the tokens before it.
        second_tokens: The second most probable token at each place; -1 where the head knows no other token.
        second_p: Its probability.
        sure: The chance that each is accepted if all before it are, by the head's confidence; p where it has none.
    """

    tokens: tuple[int, ...]
    p: tuple[float, ...]
    second_tokens: tuple[int, ...]
    second_p: tuple[float, ...]
    sure: tuple[float, ...]


class HeadState(Protocol):
    """A trained head and what it knows of one session's text.

    `n_past` counts tokens as Session.forward does; `token` is the one at position n_past, which no forward has
    evaluated yet.
    """

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens that the head can draft, int32[n]: a score's index -> the target's token id."""

    @property
    def ops(self) -> LogitOps:
        """Operations on a row of logits over the target's vocabulary."""

    @property
    def summary(self) -> str:
        """The head's name and the bytes of its weights, for a person."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the head and its target, in sentences."""

    @property
    def reach(self) -> tuple[float, ...]:
        """The chance that a draft is right up to its first, second, ... token, as its trainer measured."""

    def judge(self, n_drafts: int, n_right: int) -> str | None:
        """Return a sentence where so few of `n_drafts` first tokens were right that something is wrong, else None."""

    @property
    def price(self) -> DraftPrice:
        """What a draft is expected to take, in forwards of the target over one row, by the bytes that each reads."""

    @property
    def read_s(self) -> float:
        """Seconds that the head has spent on texts so far, in forwards of the session; drafting is not included."""

    @property
    def n_bytes(self) -> int:
        """Bytes of what the head knows of the text."""

    @property
    def shared(self) -> SharedForward:
        """The latest call of chain(), begin() or next(), in which other sessions may have had texts (`n_items`)."""

    @property
    def evaluated(self) -> Sequence[tuple[int, float]]:
        """The forwards of the latest call of chain(), begin(), next() or branches(): rows of each, and a share.

        The share is the bytes of weights that the forward read, of those that a token of the target reads.
        """

    def chain(self, n_past: int, token: int, rules: ChainRules) -> DraftedChain:
        """Draft what follows `token`; empty where the head does not know the text before it.

        Raises:
            EdgedecError: The head's weights are damaged, or the session is closed.
        """

    def begin(self, n_past: int, token: int) -> NDArray[np.float32] | None:
        """Return the scores (logits, f32[n]) of what follows `token`; None where the text before it is not known."""

    def next(self, token: int) -> NDArray[np.float32] | None:
        """Return the scores of what follows one more drafted token, after begin(); None where there is no room."""

    def branches(self, tokens: Sequence[int], parents: Sequence[int], n_new: int) -> NDArray[np.float32] | None:
        """Return the scores of what follows each of the last `n_new` nodes of a tree, f32[n_new, n]; None without room.

        The tree is drafted behind the token of the last begin(). A parent is -1 for that token, or an earlier node. The
        nodes before the last `n_new` are those of the last call for this tree.
        """

    @property
    def held_bytes(self) -> int:
        """Bytes of the head's weights, and of what it knows of the texts of all sessions of the model."""

    @property
    def gone(self) -> bool:
        """Whether let_go() was called for a session of the model."""

    def let_go(self) -> None:
        """Free the weights and what is known of all texts; the head of every session of the model rests for good.

        Any thread may call it; a call of the head that is running ends first.
        """

    def rest(self) -> None:
        """Stop following the text, which then costs nothing; drafts are empty until follow()."""

    def follow(self) -> None:
        """Follow the text again after rest(); a head that follows it already, or is gone, stays as it is.

        What the session read meanwhile is not known, so drafts begin behind it.
        """

    def seen_by(self, *, place: Callable[[int], int] | None = None, joined: JoinedCalls | None = None) -> "HeadState":
        """Return the same head for a session around the one that it follows.

        Args:
            place: Turns the outer session's n_past into this head's; -1 where the head does not know the text.
            joined: Answers the head's calls.
        """


@runtime_checkable
class Arranging(Protocol):
    """A head that adds something to forwards of the target, where the cost of forwards says how much."""

    def arrange(self, cost: Callable[[int], float] | None) -> str | None:
        """Choose what the head adds to forwards of the target from now on.

        `cost` returns the seconds of a step by the rows of its forward; None where that is not known. Returns a
        sentence where the head costs more than it brings, so that it should rest; else None.
        """

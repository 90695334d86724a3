"""Drafts, how they are drawn, and the outcome of verifying one.

p is the target's distribution and q the drafter's, as in Leviathan et al. 2023 (arXiv:2211.17192).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import PluginError
from edgedec.sampling import Distribution, Noise, SamplingParams

_NUMBER = (float, int)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow the sequence: a chain or a tree.

    Attributes:
        tokens: By node, the proposed token id.
        parents: By node, the index in the draft of its parent, -1 where the node follows the last accepted token. A
            parent stands before its children.
        p_accept: By node, the drafter's estimate of P(node accepted | parent accepted).
        q: By node, the distribution that the node was drawn from, None for a node that was looked up. None instead of
            the tuple where no node was drawn. Only rules of guests look at q.

    A chain of three, and a root with two children:

    >>> Draft.chain([5, 6, 7]).parents
    (-1, 0, 1)
    >>> Draft((5, 6, 7), (-1, 0, 0), (1.0, 1.0, 1.0)).is_chain
    False
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    p_accept: tuple[float, ...]
    q: tuple[Distribution | None, ...] | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], p_accept: float = 1.0) -> "Draft":
        """Return the draft in which each token follows the one before; every node gets the same `p_accept`."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), (p_accept,) * n)

    @classmethod
    def tree(cls, tokens: Sequence[int], parents: Sequence[int], p_accept: Sequence[float]) -> "Draft":
        """Return a draft made of lists, which hold what the attributes of the same names say."""
        return cls(tuple(tokens), tuple(parents), tuple(p_accept))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """Return how many tokens deep each node is, 1 for one that follows the last accepted token.

        >>> Draft.tree([5, 6, 7], [-1, 0, 0], [1.0, 1.0, 1.0]).depths()
        [1, 2, 2]
        """
        result: list[int] = []
        for parent in self.parents:
            result.append(1 + (result[parent] if parent >= 0 else 0))
        return result

    def truncated(self, n_max: int) -> "Draft":
        """Return the first `n_max` nodes as a draft; their parents are among them, as parents stand first."""
        if len(self.tokens) <= n_max:
            return self
        q = None if self.q is None else self.q[:n_max]
        return Draft(self.tokens[:n_max], self.parents[:n_max], self.p_accept[:n_max], q)

    def check(self, n_vocab: int) -> None:
        """Raise PluginError unless types and lengths agree, parents stand first and the vocabulary has every token."""
        if not type(self.tokens) is type(self.parents) is type(self.p_accept) is tuple:
            kinds = (type(self.tokens), type(self.parents), type(self.p_accept))
            names = ", ".join(kind.__name__ for kind in kinds)
            raise PluginError(f"a draft's tokens, parents and p_accept must be tuples, found {names}; use Draft.tree()")
        lengths = len(self.tokens), len(self.parents), len(self.p_accept)
        if not lengths[0] == lengths[1] == lengths[2]:
            raise PluginError(f"a draft's tokens, parents and p_accept must have one length, found {lengths}")
        for i, (token, parent, p) in enumerate(zip(self.tokens, self.parents, self.p_accept, strict=True)):
            if type(token) is not int or type(parent) is not int or not isinstance(p, _NUMBER):
                names = ", ".join(type(value).__name__ for value in (token, parent, p))
                raise PluginError(
                    f"a draft's tokens and parents must be of type int and its p_accept float, found {names}; "
                    "tolist() of a numpy array has these types"
                )
            if not 0 <= token < n_vocab:
                raise PluginError(f"a draft holds a token id outside the vocabulary of {n_vocab}")
            if not -1 <= parent < i:
                raise PluginError("in a draft each parent must be -1 or stand before its child")
            if not 0 <= p <= 1:
                raise PluginError("a draft's p_accept must lie between 0 and 1")
        if self.q is not None and len(self.q) != lengths[0]:
            raise PluginError(
                f"a draft of {lengths[0]} nodes has {len(self.q)} distributions in q; it must have one a node"
            )


EMPTY_DRAFT = Draft.chain([])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The target's most probable tokens after some rows: the last token before the draft, then every node of the draft.

    Attributes:
        tokens: int32[n], the token of each row.
        parents: int32[n], the row that each row follows; -1 for the first.
        ids: int32[n, k], the k most probable tokens after each row, most probable first.
        probs: f32[n, k], the probabilities of these tokens at temperature 1, before any transform.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    ids: NDArray[np.int32]
    probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of verifying a draft.

    Attributes:
        path: Accepted nodes of the draft, root first.
        token_ids: What the step adds to the text: the accepted tokens, then the bonus token or, where the draft
            went wrong, the corrected token.
        candidates: The target's most probable tokens, for a drafter that needs them.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    candidates: Candidates | None = None

    @property
    def token(self) -> int:
        """The bonus or corrected token."""
        return self.token_ids[-1]


class Draws(Enum):
    """What a drafter draws from distributions of its own, under a rule or for a shape that looks at these."""

    UNKNOWN = "the drafter does not say"
    NOTHING = "its tokens are looked up, or the most probable ones"
    CHAINS = "chains"
    SHAPES = "trees of every shape"


RowsAfter = Callable[[Sequence[tuple[int, ...]]], Sequence[Any]]
"""Drafted paths, all of one length -> what a model says after each, one object for equal paths: its distribution or,
where nothing is drawn, its most probable tokens (Level). None where nothing can follow."""


class DraftNumbers(Protocol):
    """Makes one drafter's drafts of a model's distributions, with random numbers that nothing else uses."""

    def begin(self) -> None:
        """Start a text: the numbers begin anew."""

    def draw(self, law: Distribution) -> tuple[int, float]:
        """Return a token that is drawn from a distribution, and the chance that it is accepted."""

    def tree(self, rows: RowsAfter, n_max: int, least_path: float, corrected: Callable[[float], float]) -> Draft:
        """Return a tree of at most `n_max` nodes, drawn or of the most probable tokens; `rows` is called once a level.

        Nodes below the path probability `least_path`, in which tokens count with their corrected P, have no children.
        """


class Drawing(Protocol):
    """How the drafts of a generation are made of a model's distributions, where a guest's rule or shape says that."""

    @property
    def params(self) -> SamplingParams | None:
        """What the distributions are made with that tokens are drawn from; None where none are drawn."""

    @property
    def is_tree(self) -> bool:
        """Whether drafts are trees, and no chains."""

    def numbers(self, noise: Noise, label: int) -> DraftNumbers:
        """Return what makes the drafts of the drafter with this label, which no position of a text is as large as."""

    def notes(self, draws: Iterable[Draws]) -> Sequence[str]:
        """Return sentences on what this does not do for drafters that draw so."""

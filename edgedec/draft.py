"""Drafts, their verification's outcome, and what a drafter is.

p is the target's distribution and q the drafter's, as in Leviathan et al. 2023 (arXiv:2211.17192).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import PluginError
from edgedec.model import Session
from edgedec.noise import Noise
from edgedec.sampling import SamplingParams
from edgedec.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow the sequence: a chain or a tree.

    Attributes:
        tokens: int32[n], proposed token ids.
        parents: int32[n], index of each node's parent in the draft, -1 for the last accepted token. A parent
            stands before its children.
        p_accept: float32[n], the drafter's estimate of P(node accepted | parent accepted).
        q: float32[n, n_vocab], the distribution each node was drawn from, or None.

    A chain of three, and a root with two children:

    >>> Draft.chain([5, 6, 7]).parents.tolist()
    [-1, 0, 1]
    >>> tree = Draft(np.array([5, 6, 7], np.int32), np.array([-1, 0, 0], np.int32), np.ones(3, np.float32))
    >>> tree.is_chain
    False
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    p_accept: NDArray[np.float32]
    q: NDArray[np.float32] | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], p_accept: float = 1.0) -> "Draft":
        """Build the draft in which each token follows the one before."""
        n = len(tokens)
        return cls(
            np.asarray(tokens, dtype=np.int32).reshape(n),
            np.arange(-1, n - 1, dtype=np.int32),
            np.full(n, p_accept, dtype=np.float32),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each node's parent is the node before it."""
        return bool(np.array_equal(self.parents, np.arange(-1, len(self) - 1)))

    def truncated(self, n_max: int) -> "Draft":
        """Return the first `n_max` nodes; as parents stand first, they form a draft again."""
        if len(self) <= n_max:
            return self
        q = None if self.q is None else self.q[:n_max]
        return Draft(self.tokens[:n_max], self.parents[:n_max], self.p_accept[:n_max], q)

    def check(self, n_vocab: int) -> None:
        """Raise PluginError unless types and shapes agree, parents stand first and every token is in the vocabulary."""
        n = len(self.tokens)
        dtypes = (self.tokens.dtype.name, self.parents.dtype.name, self.p_accept.dtype.name)
        if dtypes != ("int32", "int32", "float32"):
            raise PluginError(f"a draft's tokens, parents and p_accept must be int32, int32, float32, found {dtypes}")
        shapes = (self.tokens.shape, self.parents.shape, self.p_accept.shape)
        if shapes != ((n,), (n,), (n,)):
            raise PluginError(f"a draft's tokens, parents and p_accept must have one length, found {shapes}")
        if n and not (int(self.tokens.min()) >= 0 and int(self.tokens.max()) < n_vocab):
            raise PluginError(f"a draft holds a token id outside the vocabulary of {n_vocab}")
        if n and not (np.all(self.parents >= -1) and np.all(self.parents < np.arange(n))):
            raise PluginError("in a draft each parent must be -1 or stand before its child")
        if n and not np.all((self.p_accept >= 0) & (self.p_accept <= 1)):
            raise PluginError("a draft's p_accept must lie between 0 and 1")


EMPTY_DRAFT = Draft.chain([])


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of a draft.

    Attributes:
        path: Accepted nodes of the draft, root first.
        token_ids: What the step adds to the text: the accepted tokens, then the bonus token or, where the draft
            went wrong, the correction.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def token(self) -> int:
        """The bonus or corrected token."""
        return self.token_ids[-1]


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter asks of the target: layers whose hidden states accept() gets, and whether it skips layers."""

    taps: tuple[int, ...] = ()
    layers: bool = False


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is opened with.

    Attributes:
        target: The target's session (its model, its KV).
        tokenizer: The target's tokenizer.
        sampling: How the target's tokens will be drawn.
        noise: The random numbers of this generation; a drafter that samples draws with the same.
        budget_bytes: Most memory the drafter may hold, or None.
    """

    target: Session
    tokenizer: Tokenizer
    sampling: SamplingParams
    noise: Noise
    budget_bytes: int | None = None


class Drafter(Protocol):
    """Proposes tokens for one generation. Made by a factory `(DraftContext) -> Drafter` (`edgedec.drafters`)."""

    @property
    def needs(self) -> DrafterNeeds:
        """What it asks of the target."""

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Propose at most `n_max` nodes before the monotonic clock reads `deadline_s`; an empty draft is fine."""

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome of every step, drafted or plain, and the hidden states asked for of the rows kept."""

    def memory_bytes(self) -> int:
        """Return the memory it holds."""


class DrafterFactory(Protocol):
    """What an entry point of `edgedec.drafters` names; a class with this constructor will do."""

    def __call__(self, context: DraftContext) -> Drafter: ...

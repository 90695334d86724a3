"""Drafts, the outcome of verifying one, and what a drafter is.

p is the target's distribution and q the drafter's, as in Leviathan et al. 2023 (arXiv:2211.17192).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve, SharedForward
from edgedec.draft_constants import MOST_P
from edgedec.errors import PluginError
from edgedec.model import LayerSet, Session
from edgedec.noise import Noise
from edgedec.sampling import Distribution, SamplingParams
from edgedec.sorted_text import SortedText
from edgedec.tokenizer import Tokenizer
from edgedec.tree_shapes import ONE_CHAIN, TreeShape


class DrafterRestsError(PluginError):
    """A drafter draws the conclusion that it is of no use here; generations go on without it."""


STORE_BYTES = 32_000_000
"""Most bytes that a drafter keeps between requests where memory is ample."""
_NUMBER = (float, int)


def store_limit(budget_bytes: int | None) -> int:
    """Return the most bytes that a drafter keeps between requests: at most half of its budget, where it has one."""
    return STORE_BYTES if budget_bytes is None else min(STORE_BYTES, budget_bytes // 2)


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow the sequence: a chain or a tree.

    Attributes:
        tokens: By node, the proposed token id.
        parents: By node, the index in the draft of its parent, -1 where the node follows the last accepted token. A
            parent stands before its children.
        p_accept: By node, the drafter's estimate of P(node accepted | parent accepted).
        q: By node, the distribution that the node was drawn from, None for a node that was looked up. None instead of
            the tuple where no node was drawn. Only the opt-in rules of edgedec.verification look at q.

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
            found = ", ".join(kind.__name__ for kind in kinds)
            raise PluginError(f"a draft's tokens, parents and p_accept must be tuples, found {found}; use Draft.tree()")
        lengths = len(self.tokens), len(self.parents), len(self.p_accept)
        if not lengths[0] == lengths[1] == lengths[2]:
            raise PluginError(f"a draft's tokens, parents and p_accept must have one length, found {lengths}")
        for i, (token, parent, p) in enumerate(zip(self.tokens, self.parents, self.p_accept, strict=True)):
            if type(token) is not int or type(parent) is not int or not isinstance(p, _NUMBER):
                found = ", ".join(type(value).__name__ for value in (token, parent, p))
                raise PluginError(
                    f"a draft's tokens and parents must be of type int and its p_accept float, found {found}; "
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


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter needs of the target.

    Attributes:
        taps: Layers whose hidden states learn() gets.
        layers: Whether the drafter runs the target with layers left out.
        candidates: How many of the most probable tokens of each row learn() gets.
        varies: Whether these needs may change with every step.
    """

    taps: tuple[int, ...] = ()
    layers: bool = False
    candidates: int = 0
    varies: bool = False

    @property
    def of_each_step(self) -> bool:
        """Whether learn() gets something that is lost with its step, so that the drafter can't take the step in later.

        Any other drafter may rest: the tokens of the steps that it missed come in one learn() before the next
        propose().
        """
        return bool(self.taps or self.candidates)


class Correction:
    """What a drafter's estimates of P(node accepted | parent accepted) were worth so far; at first they are believed.

    Attributes:
        edges: Ascending borders of the ranges of estimates that are corrected alike.
        factors: What an estimate is multiplied by in each range; one more than there are edges.
    """

    __slots__ = ("edges", "factors")

    def __init__(self, edges: tuple[float, ...] = ()) -> None:
        self.edges = edges
        self.factors = [1.0] * (len(edges) + 1)

    def corrected(self, p: float) -> float:
        """Return the estimate p, 0 to 1, corrected by what was observed: 0 to MOST_P."""
        return min(MOST_P, p * self.factors[bisect_right(self.edges, p)])


@dataclass(slots=True)
class Floor:
    """The path probability below which drafting a node does not pay; the policy sets it before each step."""

    path_probability: float = 0.0


class ForwardLog(Protocol):
    """Notes the forwards that drafters make, while drafts are recorded."""

    def evaluated(self, n_rows: int, part: LayerSet | float | None) -> None:
        """Note a forward over `n_rows` rows: through half-layers of the target, through weights that have this share of
        the bytes which a token of the target reads or, for None, a draft model's.
        """


class Corpus(Protocol):
    """A small text in the target's tokens that all requests share."""

    @property
    def automaton(self) -> Any:
        """The contexts of the text: a suffix automaton (edgedec.drafters.suffix.automaton), which is only read."""

    def shed(self) -> None:
        """Drop the contexts; `automaton` makes them anew."""

    def memory_bytes(self) -> int:
        """Return about how much memory the contexts take."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is opened with.

    Attributes:
        target: The target's session, with its model and its KV cache.
        tokenizer: The target's tokenizer.
        sampling: How the target's tokens will be drawn.
        noise: The random numbers of this generation; a drafter that samples draws with the same numbers.
        budget_bytes: Most memory that the drafter may hold, or None.
        store: What drafters keep between requests, each under its own name; Engine.forget() empties it.
        floor: The path probability below which a node does not pay now, for a drafter that takes time for every node.
        coupled: Whether the verification rule is the coupled one: a drafter that samples then draws with `noise` at the
            absolute position. Otherwise it draws with numbers of its own, new ones in every step, and gives its q.
        common: A small text in the target's tokens to begin with, or None.
        recorder: Notes the forwards that the drafter makes, while drafts are recorded; else None.
        lock: Held while `store` or what it holds is read or changed, as several texts may be written at the same time.
        constraint: The grammar that the text keeps to, or None. A drafter may ask it for the tokens that are allowed,
            in propose() and in no other thread; nodes that it rules out are removed from every draft in any case.
        learned: The user's own files in the target's tokens, or None.
        shape: How a drafter that evaluates a model branches, so that the rule verifies its drafts exactly.
        predicted: Tokens that the request expects the text to have; they may be wrong.
        curve: What forwards of the target take; a drafter that runs a part of it notes there what that takes.
        correction: What the drafter's own estimates were worth so far.
        token_s: Seconds that the draft model takes for a token, as timed at load; None where it was not timed.
        note_ahead: `(tokens drafted while the target verified, those of use)` notes these sums so far.
        note_late: Notes a draft that did not come by its deadline.
    """

    target: Session
    tokenizer: Tokenizer
    sampling: SamplingParams
    noise: Noise
    budget_bytes: int | None = None
    store: dict[str, Any] = field(default_factory=dict)
    floor: Floor = field(default_factory=Floor)
    coupled: bool = True
    common: Corpus | None = None
    recorder: ForwardLog | None = None
    constraint: Constraint | None = None
    learned: SortedText | None = None
    shape: TreeShape = ONE_CHAIN
    predicted: tuple[int, ...] = ()
    lock: AbstractContextManager[object] = field(default_factory=RLock)
    curve: CostCurve = field(default_factory=CostCurve)
    correction: Correction = field(default_factory=Correction)
    token_s: float | None = None
    note_ahead: Callable[[int, int], None] = lambda n_ahead, n_used: None
    note_late: Callable[[], None] = lambda: None


class Drafter(Protocol):
    """Proposes tokens for one generation. Made by a factory `(DraftContext) -> Drafter` (`edgedec.drafters`)."""

    @property
    def needs(self) -> DrafterNeeds:
        """What the drafter needs of the target."""

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt, before the first propose()."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose at most `n_max` nodes before the monotonic clock reads `deadline_s`; an empty draft is fine."""

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome of a step, drafted or plain, and by tapped layer the hidden states of the kept rows."""

    def memory_bytes(self) -> int:
        """Return the bytes of memory that the drafter holds."""


class DrafterFactory(Protocol):
    """Makes the drafter of one generation; entry points of `edgedec.drafters` name factories, or classes like this.

    An attribute `shedding` may say what the drafter loses where memory runs short, as Shedding, or None where it holds
    next to nothing that it could lose.
    """

    def __call__(self, context: DraftContext) -> Drafter: ...


class LoadedDraftModel(Protocol):
    """A loaded draft model, which several factories may share."""

    @property
    def n_ctx(self) -> int:
        """Tokens of the KV cache of each of its sessions."""

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes of the draft model, KV caches included, and of the KV caches alone."""

    def shrink(self) -> None:
        """Go on with smaller KV caches (raises what Model.session raises)."""

    def close(self) -> None:
        """Free the model; calling it again does nothing."""


@runtime_checkable
class ModelFactory(DrafterFactory, Protocol):
    """A DrafterFactory that holds a loaded model, which its drafters evaluate."""

    @property
    def source(self) -> LoadedDraftModel:
        """The model."""

    def forget(self) -> None:
        """Forget the tokens that the model's sessions hold, so that the next generation reads its prompt anew."""

    def close(self) -> None:
        """Free the model; calling it again does nothing."""


@runtime_checkable
class Closing(Protocol):
    """A drafter that holds something until the generation ends: a thread, or a session of another model."""

    def close(self) -> None:
        """Let that go; calling close() again does nothing."""


@runtime_checkable
class JointDrafter(Protocol):
    """A drafter whose calls of a model may be answered together with those of other texts' drafters."""

    @property
    def calls(self) -> Sequence[SharedForward]:
        """The calls for the latest draft, with what each of them was answered together with."""

    @property
    def own_s(self) -> float:
        """Seconds of its thread that the latest draft took beside these calls."""

"""The contract of a drafter: what proposes tokens for a generation, what it is opened with, and what it may offer."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from pathlib import Path
from threading import RLock
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve, SharedForward
from edgedec.draft import Draft, Drawing, Verification
from edgedec.draft_constants import MEMORY, MOST_P, PRIOR
from edgedec.errors import PluginError
from edgedec.model import LayerSet, Session
from edgedec.sampling import Noise, SamplingParams

STORE_BYTES = 32_000_000
"""Most bytes that a drafter keeps between requests where memory is ample."""


class Store(dict[str, Any]):
    """What drafters keep between requests, each under its own name; Engine.forget() empties it.

    Attributes:
        budget_bytes: Most memory that each drafter may hold, or None.
        cache_dir: Where is kept what was measured of the model, as in LoadOptions; None for nowhere.
        lock: Held while the store or what it holds is read or changed, as several texts may be written at a time.
    """

    def __init__(self, budget_bytes: int | None = None, cache_dir: Path | None = None) -> None:
        super().__init__()
        self.budget_bytes, self.cache_dir = budget_bytes, cache_dir
        self.lock: AbstractContextManager[object] = RLock()

    @property
    def most_bytes(self) -> int:
        """The most bytes that a drafter keeps between requests: at most half of its budget, where it has one."""
        return STORE_BYTES if self.budget_bytes is None else min(STORE_BYTES, self.budget_bytes // 2)

    def half(self, name: str) -> "Store":
        """Return the store of a drafter within the drafter `name`: half of this one's budget, and this one's lock."""
        made = Store(None if self.budget_bytes is None else self.budget_bytes // 2, self.cache_dir)
        made.lock = self.lock
        store = self.setdefault(name, made)
        assert isinstance(store, Store), "the store's entry of this name is ours"
        return store


class DrafterRestsError(PluginError):
    """A drafter draws the conclusion that it is of no use here; generations go on without it."""


class DraftLateError(PluginError):
    """A draft did not come by its deadline; the step goes on without it.

    Attributes:
        is_last: Whether so many were late that the drafter is not asked again.
    """

    def __init__(self, message: str, *, is_last: bool = False) -> None:
        super().__init__(message)
        self.is_last = is_last


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter needs of the target.

    Attributes:
        taps: Layers whose hidden states learn() gets.
        layers: Whether the drafter runs the target with layers left out.
        candidates: How many of the most probable tokens of each row learn() gets.
        varies: Whether these needs may change with every step.
        of_each_step: Whether learn() gets something that is lost with its step, so that the drafter can't take the step
            in later. Any other drafter may rest: the tokens of the steps that it missed come in one learn() before the
            next propose().
    """

    taps: tuple[int, ...] = ()
    layers: bool = False
    candidates: int = 0
    varies: bool = False
    of_each_step: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_each_step", bool(self.taps or self.candidates))


class Calibration:
    """P(node accepted | parent accepted) from the drafter's own estimate, which is believed at first.

    A bin of estimates keeps the sum of the estimates and the sum of the acceptances; an estimate is scaled by their
    ratio, so the order within a bin stays. What is wrong with all estimates together is half expected of a bin that has
    not seen much: a head is too sure of itself where tokens are drawn, one match in a text tells little of others.

    >>> calibration = Calibration()
    >>> for _ in range(94):
    ...     calibration.observe(0.5, False)
    >>> round(calibration.corrected(0.5), 3), round(calibration.corrected(0.25), 3)
    (0.005, 0.036)

    Attributes:
        edges: Ascending borders of the ranges of estimates that are corrected alike.
    """

    __slots__ = ("_accepted", "_estimated", "_factors", "_sums")
    edges = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)

    def __init__(self) -> None:
        self._factors = list[float]()
        self._estimated = [0.0] * len(_PRIORS)
        self._accepted = [0.0] * len(_PRIORS)
        self._sums = (0.0, 0.0)  # of all bins: estimated, accepted

    def observe(self, p: float, accepted: bool) -> None:
        """Take a node with the estimate p whose parent was accepted, and whether the node was right itself."""
        i = bisect_right(self.edges, p)
        estimated, hits = self._estimated[i] + p, self._accepted[i] + accepted
        if estimated > MEMORY * max(p, 0.05):
            estimated, hits = estimated / 2, hits / 2
        self._estimated[i], self._accepted[i] = estimated, hits
        estimated, hits = self._sums[0] + p, self._sums[1] + accepted
        self._sums = (estimated / 2, hits / 2) if estimated > MEMORY else (estimated, hits)
        self._factors = []

    @property
    def factors(self) -> list[float]:
        """What an estimate is multiplied by in each range; one more than there are edges."""
        if not self._factors:
            expected = sqrt((self._sums[1] + 1) / (self._sums[0] + 1))
            self._factors = [
                (hits + prior * expected) / (estimated + prior)
                for hits, estimated, prior in zip(self._accepted, self._estimated, _PRIORS, strict=True)
            ]
        return self._factors

    def corrected(self, p: float) -> float:
        """Return the estimate p, 0 to 1, corrected by what was observed: 0 to MOST_P."""
        return min(MOST_P, p * self.factors[bisect_right(self.edges, p)])

    def all_corrected(self, chances: Sequence[float]) -> list[float]:
        """Return estimates, each corrected like one."""
        edges, factors = self.edges, self.factors
        return [min(MOST_P, p * factors[bisect_right(edges, p)]) for p in chances]


_PRIORS = tuple([PRIOR * max(0.01, (low + high) / 2) for low, high in pairwise((0.0, *Calibration.edges, 1.0))])


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


class ProposalLog(ForwardLog, Protocol):
    """Is told what drafters propose at every position of one text, and of the forwards that this takes."""

    def drafted(self, places: Sequence[int], depths: Sequence[int]) -> None:
        """Note a draft: by node its index in the tree of all drafts, and how many tokens deep it is.

        New nodes have the next indices.
        """

    def end(self, tokens: Sequence[int], parents: Sequence[int], paths: Sequence[float], draft_s: float) -> None:
        """Note the tree of all drafts of a position, which took `draft_s` seconds; the next position follows.

        By node these are its token, the index of its parent (-1: it follows the text), and P(path to it accepted).
        """


@dataclass(frozen=True, slots=True)
class SortedText:
    """A text in a model's tokens whose suffixes are sorted, so that every place of a context is found by bisection.

    It takes eight bytes a token, read from a mapped file.

    Attributes:
        tokens: int32[n], the token ids; -1 ends each file, the last one, too.
        order: int32[n], the places of the text, sorted by the tokens from there on, of which the first 64 count.
    """

    tokens: NDArray[np.int32]
    order: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter is opened with.

    Attributes:
        target: The target's session, with its model and its KV cache.
        sampling: How the target's tokens will be drawn.
        noise: The random numbers of this generation; a drafter that samples draws with the same numbers.
        store: What drafters keep between requests, each under its own name.
        floor: The path probability below which a node does not pay now, for a drafter that takes time for every node.
        drawing: How drafts are made of a model's distributions, where the request or the user asks for a guest's way:
            they are drawn with numbers of their own, and come with their q, or they are trees. None under the coupled
            rule: a drafter draws with `noise` at the absolute position.
        recorder: Notes the forwards that the drafter makes, while drafts are recorded; else None.
        constraint: The grammar that the text keeps to, or None. A drafter may ask it for the tokens that are allowed,
            in propose() and in no other thread; nodes that it rules out are removed from every draft in any case.
        predicted: Tokens that the request expects the text to have; they may be wrong.
        curve: What forwards of the target take.
        correction: What the drafter's own estimates were worth so far.
        note_ahead: `(tokens drafted while the target verified, those of use)` notes these sums so far.
        note: Adds a sentence for a person to the statistics of the text.
    """

    target: Session
    sampling: SamplingParams
    noise: Noise
    store: Store = field(default_factory=Store)
    floor: Floor = field(default_factory=Floor)
    drawing: Drawing | None = None
    recorder: ForwardLog | None = None
    constraint: Constraint | None = None
    predicted: tuple[int, ...] = ()
    curve: CostCurve = field(default_factory=CostCurve)
    correction: Calibration = field(default_factory=Calibration)
    note_ahead: Callable[[int, int], None] = lambda n_ahead, n_used: None
    note: Callable[[str], None] = lambda sentence: None


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

    It may declare what its drafters need when the model is loaded, what they hold, when a memory plan leaves them out,
    and what they lose where memory runs short (edgedec.drafter_traits: Demanding, Losing, Opening).
    """

    def __call__(self, context: DraftContext) -> Drafter: ...


class LoadedDraftModel(Protocol):
    """A loaded draft model, which several factories may share."""

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes of the draft model, KV caches included, and of the KV caches alone."""

    def spare_bytes(self) -> int:
        """Return the bytes that shrink() would free."""

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

"""What is known of a drafter: what its estimates are worth, what its drafts take, and what they bring."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgedec.cost_curve import Budget, DraftPrice
from edgedec.draft import Draft
from edgedec.draft_constants import (
    CLEAR_GAIN,
    FIRST,
    KEPT,
    KEPT_OF_TRIALS,
    MOST_P,
    NEWEST,
    NEXT_TO_NOTHING,
    NOTICED,
    ODD,
    PRIOR,
    STALE,
    TRIAL_SHARE,
    TRIAL_STEPS,
)
from edgedec.drafter import Calibration
from edgedec.drafter_traits import DrafterTraits


def score(draft: Draft, token_ids: Sequence[int], calibration: Calibration) -> tuple[list[int], int, int]:
    """Compare a draft with the tokens that came, verified or not, and let its drafter's calibration observe them.

    Returns the nodes that are the text, root first; the number of nodes whose parents are the text; and how many tokens
    deep the deepest of these is.
    """
    depths = {-1: 0}
    last, seen, is_drawn = -1, set(), draft.q is not None
    n_tried = deepest = 0
    nodes = zip(draft.tokens, draft.parents, draft.p_accept, strict=True)
    for node, (token, parent, p) in enumerate(nodes):
        depth = depths.get(parent)
        if depth is None or depth >= len(token_ids):
            continue
        right = token == token_ids[depth]
        if (depth, token) not in seen:  # paths side by side may hold a token twice, which is one chance
            seen.add((depth, token))
            calibration.observe(p, right)
            n_tried += 1
        deepest = max(deepest, depth + 1)
        if right and (depth == depths[last] or is_drawn):  # of two siblings with the same token the first
            depths[node] = depth + 1
            last = node if depth == depths[last] else last
    path: list[int] = []
    while last >= 0:
        path.insert(0, last)
        last = draft.parents[last]
    return path, n_tried, deepest


class DraftSeconds:
    """The seconds of a draft by its levels: a line through the drafts that were timed, later ones counting more.

    What passes once is the forward of a block drafter; the first level of another head takes longer than the next ones,
    as its weights come from memory, and theirs from the cache. Where all drafts have as many levels, the two parts stay
    in the proportion that was declared.

    >>> seconds = DraftSeconds(DraftPrice(1.0))
    >>> for _ in range(300):
    ...     seconds.note(1, 3.0)
    ...     seconds.note(3, 4.0)
    >>> round(seconds.price.level, 1), round(seconds.price.once, 1)
    (0.5, 2.5)

    Attributes:
        price: That line.
    """

    __slots__ = ("_declared", "_sums", "price")

    def __init__(self, price: DraftPrice) -> None:
        """Expect a price, as if PRIOR drafts had taken that."""
        self._declared = self.price = price
        self._sums = [0.0] * 5  # of the weights, and weighted: levels, their squares, seconds, levels times seconds

    def _add(self, n: int, seconds: float, weight: float) -> None:
        added = (1.0, n, n * n, seconds, n * seconds)
        self._sums = [KEPT * total + weight * new for total, new in zip(self._sums, added, strict=True)]

    def note(self, n_levels: int, seconds: float) -> None:
        """Take a draft of so many levels; one that took far longer than expected counts as a few times as long."""
        expected = self.price.of(n_levels)
        if not self._sums[0]:
            self._add(n_levels, expected, PRIOR)
        self._add(n_levels, min(seconds, ODD * expected), 1.0)
        n, squares, mean_s, products = (total / self._sums[0] for total in self._sums[1:])
        declared = self._declared.times(mean_s / self._declared.of(n))
        level = (products - n * mean_s + NEXT_TO_NOTHING * declared.level) / (squares - n * n + NEXT_TO_NOTHING)
        level = min(max(level, NOTICED * mean_s / n), mean_s / n)
        self.price = DraftPrice(level, mean_s - n * level)


@dataclass(slots=True)
class Worth:
    """What a drafter's drafts are worth, where the other drafters propose something and where not.

    Attributes:
        price_s: Seconds that a draft takes; 0 before any was expected to take some.
        gains: The mean tokens that a draft is worth, [nothing else to verify, other nodes to verify].
        n_drafts: How many drafts each mean comes from.
        paid: Whether the next draft was expected to pay when that was last asked.
    """

    price_s: float = 0.0
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    n_drafts: list[int] = field(default_factory=lambda: [0, 0])
    paid: bool = True

    def pays(self, token_s: float, *, among_others: bool = False) -> bool:
        """Tell whether the next draft is expected to be worth its price, where a token is worth `token_s` seconds.

        The first drafts are made to find out.
        """
        is_new = self.n_drafts[among_others] < FIRST
        return is_new or self.gains[among_others] * token_s >= CLEAR_GAIN * self.price_s

    def note(self, gain: float, price_s: float, *, among_others: bool = False, is_trial: bool) -> None:
        """Take a draft that was worth `gain` tokens and took `price_s` seconds."""
        known_s = self.price_s or price_s
        self.price_s = known_s + (1 - KEPT_OF_TRIALS) * (min(price_s, ODD * known_s) - known_s)
        self.n_drafts[among_others] += 1
        new = max(1 / self.n_drafts[among_others], 1 - (KEPT_OF_TRIALS if is_trial else KEPT))
        self.gains[among_others] += new * (gain - self.gains[among_others])


@dataclass(slots=True)
class Followed:
    """What reading texts along took, and what drafts gained there: sums over earlier texts, later ones counting more.

    Attributes:
        n_texts: Texts.
        n_read: Tokens that were read.
        n_tokens: Tokens that came.
        read_s: Seconds that reading took.
        gained_s: Seconds that drafts gained, what drafting took left out.
    """

    n_texts: float = 0.0
    n_read: float = 0.0
    n_tokens: float = 0.0
    read_s: float = 0.0
    gained_s: float = 0.0

    def note(self, n_read: int, n_tokens: int, read_s: float, gained_s: float) -> None:
        """Take a text that was followed."""
        decay = 1 - NEWEST
        self.n_texts, self.n_read = decay * self.n_texts + 1, decay * self.n_read + n_read
        self.n_tokens = decay * self.n_tokens + n_tokens
        self.read_s, self.gained_s = decay * self.read_s + read_s, decay * self.gained_s + gained_s

    def loss_s(self, n_unread: int, most: int | None) -> float:
        """Return the seconds that following a text of so many unread tokens is expected to lose, and 0 where it gains.

        The text is expected to become as long as earlier ones, and at most `most` tokens.
        """
        if self.n_tokens < STALE:
            return 0.0
        n_tokens = self.n_tokens / self.n_texts
        n_tokens = n_tokens if most is None else min(n_tokens, most)
        reading_s = (n_unread + n_tokens) * self.read_s / self.n_read
        return max(0.0, reading_s - n_tokens * self.gained_s / self.n_tokens)


@dataclass(slots=True)
class DrafterRecord:
    """What is known of a drafter; outlives a request.

    Attributes:
        calibration: What the drafter's estimates are worth, [sampling, greedy].
        price: Seconds that a costly drafter's drafts take; None before one was timed.
        offered: Depth down to which its drafts were compared with the text, summed and slowly forgotten,
            [sampling, greedy].
        accepted: Depth down to which they were right, in the same way.
        trials: What its trials have cost, of the steps in which it could have been tried.
        n_granted: How many of the texts that share a forward may still try it, of those that were allowed to together.
        trial_s: Seconds that the latest trial has cost.
        read_s: Seconds that the drafter takes for each token of the text that it has not read yet.
        first_s: Seconds that reading the prompt took in the latest generation that asked it; None before the first.
        worth: What the drafts are worth of a drafter that may be asked before any step, [sampling, greedy].
        draft_seconds: What such a drafter's drafts take, by their levels; None before the first.
        followed: What a drafter that follows texts took and gained, [sampling, greedy].
    """

    calibration: tuple[Calibration, Calibration] = field(default_factory=lambda: (Calibration(), Calibration()))
    price: DraftPrice | None = None
    offered: list[float] = field(default_factory=lambda: [PRIOR] * 2)
    accepted: list[float] = field(default_factory=lambda: [PRIOR * DrafterTraits().rate] * 2)
    trials: Budget = field(default_factory=Budget)
    n_granted: int = 0
    trial_s: float = 0.0
    read_s: float = 0.0
    first_s: float | None = None
    worth: tuple[Worth, Worth] = field(default_factory=lambda: (Worth(), Worth()))
    draft_seconds: DraftSeconds | None = None
    followed: tuple[Followed, Followed] = field(default_factory=lambda: (Followed(), Followed()))
    is_new: bool = True

    def expect(self, traits: DrafterTraits) -> None:
        """Take what a drafter declares, as far as nothing better is known."""
        if self.is_new:
            self.accepted = [traits.rate * offered for offered in self.offered]
        if self.price is None and traits.level_s is not None:
            self.price = DraftPrice(traits.level_s, traits.once_s)
        self.is_new = False

    def rate(self, greedy: bool) -> float:
        """Return P(a node is accepted | its parent was accepted), at most MOST_P."""
        return min(MOST_P, self.accepted[greedy] / self.offered[greedy])

    def wait_s(self, seconds: float, share: float, n_texts: int) -> float:
        """Return how many seconds have to pass before a trial may lose so many, for each of `n_texts` texts alike.

        A trial may lose this share of the time; time in which nothing was tried is saved up for a few trials. All texts
        that share a forward try a drafter in the same step, as calls of models cost less together.
        """
        trials, wanted_s = self.trials, n_texts * seconds
        trials.lost_s = max(trials.lost_s, share * trials.total_s - TRIAL_STEPS * wanted_s)
        return 0.0 if self.n_granted else max(0.0, -trials.left_s(share, -wanted_s) / share)

    def goes_without(self, greedy: bool, loss_s: float = 0.0) -> bool:
        """Tell whether a drafter that follows texts leaves the next one alone, where that is expected to lose `loss_s`.

        It does where following loses, or its drafts did not pay lately, and its trials, to which following belongs,
        have lost their share.
        """
        loses = loss_s > 0 or not self.worth[greedy].paid
        return loses and self.trials.left_s(TRIAL_SHARE, -loss_s) < 0

    def observe(self, n_right: int, depth: int, *, greedy: bool, is_trial: bool) -> None:
        """Take a draft that was right `n_right` tokens deep, where `depth` tokens were compared with the text."""
        decay = KEPT_OF_TRIALS if is_trial else KEPT
        self.offered[greedy] = self.offered[greedy] * decay + depth
        self.accepted[greedy] = self.accepted[greedy] * decay + n_right

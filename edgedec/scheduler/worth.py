"""Whether it pays to ask a drafter: what its drafts bring, and what asking it takes of everyone who waits for that.

A drafter that looks tokens up and a trained head may be asked before any step. What they bring differs from step to
step, so mean acceptance says little. So the worth of a draft is measured itself: the tokens that a step gains by it,
less those that verifying it for longer costs. A token is worth a plain step, or the part of one that falls to each text
where several texts share the step; what asking takes, every one of them waits for.
"""

from dataclasses import dataclass, field

_PRIOR_LEVELS = (1.0, 4.0)  # of the drafts that stand for what is expected before any was timed
_PRIOR = 2.0  # drafts that each of them counts for
_LINE_KEPT = 0.98  # of the weight of earlier drafts, with every draft
_LEAST_LEVEL = 0.1  # of the mean seconds of a level: a level more never takes less
_FIRST = 8  # drafts before their worth is judged
_KEPT = 0.97  # of the mean, with every draft
_KEPT_OF_TRIALS = 0.85  # trials are few and far between
_LEAST_GAIN = 1.15  # times its price that a draft must be worth: nodes are chosen where estimates are too high
_ODD = 3.0  # times the expected price: more than that is a busy machine or a first call, not a price


class DraftSeconds:
    """The seconds of a draft by its levels: a line through the drafts that were timed, later ones counting more.

    The first level takes longer than the others, as its weights come from memory, and theirs from the cache.

    >>> seconds = DraftSeconds(1.0)
    >>> for _ in range(300):
    ...     seconds.note(1, 3.0)
    ...     seconds.note(3, 4.0)
    >>> round(seconds.level_s, 2)
    0.5
    """

    __slots__ = ("_products", "_seconds", "_squares", "_sum", "_weight")

    def __init__(self, level_s: float) -> None:
        """Expect `level_s` seconds for each level."""
        self._weight = self._sum = self._squares = self._seconds = self._products = 0.0
        for n in _PRIOR_LEVELS:
            self._add(n, n * level_s, _PRIOR)

    def _add(self, n: float, seconds: float, weight: float) -> None:
        self._weight += weight
        self._sum += weight * n
        self._squares += weight * n * n
        self._seconds += weight * seconds
        self._products += weight * n * seconds

    def note(self, n_levels: int, seconds: float) -> None:
        """Take a draft of so many levels; one that took far longer than expected counts as a few times as long."""
        expected = self._seconds / self._weight + self.level_s * (n_levels - self._sum / self._weight)
        seconds = min(seconds, _ODD * max(expected, self.level_s * n_levels))
        self._weight, self._sum, self._squares, self._seconds, self._products = (
            _LINE_KEPT * value for value in (self._weight, self._sum, self._squares, self._seconds, self._products)
        )
        self._add(n_levels, seconds, 1.0)

    @property
    def level_s(self) -> float:
        """Seconds that one level more takes."""
        spread = self._weight * self._squares - self._sum * self._sum
        least = _LEAST_LEVEL * self._seconds / self._sum
        if spread < 1e-3 * self._weight * self._weight:  # all drafts had as many levels
            return self._seconds / self._sum
        return max(least, (self._weight * self._products - self._sum * self._seconds) / spread)


@dataclass(slots=True)
class Worth:
    """What a drafter's drafts are worth, where the other drafters propose something and where not.

    Attributes:
        price_s: Seconds that a draft takes.
        gains: The mean tokens that a draft is worth, [nothing else to verify, other nodes to verify].
        n_drafts: How many drafts each mean comes from.
    """

    price_s: float
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    n_drafts: list[int] = field(default_factory=lambda: [0, 0])

    def pays(self, token_s: float, *, among_others: bool = False) -> bool:
        """Tell whether the next draft is expected to be worth its price, where a token is worth `token_s` seconds.

        The first drafts are made to find out.
        """
        is_new = self.n_drafts[among_others] < _FIRST
        return is_new or self.gains[among_others] * token_s >= _LEAST_GAIN * self.price_s

    def note(self, gain: float, price_s: float, *, among_others: bool = False, is_trial: bool) -> None:
        """Take a draft that was worth `gain` tokens and took `price_s` seconds."""
        self.price_s += (1 - _KEPT_OF_TRIALS) * (self.believed(price_s) - self.price_s)
        self.n_drafts[among_others] += 1
        new = max(1 / self.n_drafts[among_others], 1 - (_KEPT_OF_TRIALS if is_trial else _KEPT))
        self.gains[among_others] += new * (gain - self.gains[among_others])

    def believed(self, price_s: float) -> float:
        """Return the seconds that a draft counts as: far more than expected is a busy machine, or a prompt to read."""
        return min(price_s, _ODD * self.price_s)

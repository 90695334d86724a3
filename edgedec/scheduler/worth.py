"""When to ask a drafter that has read the text already, such as a trained head: while its drafts are worth their time.

Such a drafter may be asked before any step, and what it promises differs from step to step: its mean acceptance says
little about the steps at which it is sure. So the worth of a draft is measured itself: the tokens that the nodes chosen
with it promise beyond those chosen without it, less the seconds that verifying them takes longer.
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
    """What a drafter's drafts are worth, in plain steps, where the other drafters propose something and where not.

    Attributes:
        price: What a draft takes, in plain steps.
        gains: The mean worth of a draft, [nothing else to verify, other nodes to verify].
        n_drafts: How many drafts each mean comes from.
    """

    price: float
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    n_drafts: list[int] = field(default_factory=lambda: [0, 0])

    def pays(self, among_others: bool) -> bool:
        """Tell whether the next draft is expected to be worth its price; the first drafts are made to find out."""
        return self.n_drafts[among_others] < _FIRST or self.gains[among_others] > _LEAST_GAIN * self.price

    def note(self, gain: float, price: float, *, among_others: bool, is_trial: bool) -> None:
        """Take a draft that was worth `gain` and took `price`, both in plain steps."""
        self.price += (1 - _KEPT_OF_TRIALS) * (min(price, _ODD * self.price) - self.price)
        self.n_drafts[among_others] += 1
        new = max(1 / self.n_drafts[among_others], 1 - (_KEPT_OF_TRIALS if is_trial else _KEPT))
        self.gains[among_others] += new * (gain - self.gains[among_others])

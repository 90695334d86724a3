"""Is it worth it? The mathematics by which the scheduler decides, and what it knows of the worth of drafts.

**The score.** A step that verifies n nodes gives E = 1 + sum of P(path to a node is accepted) tokens, and others gain m
tokens by the same forward. It takes s seconds of drafting and T(n) seconds of forward. The scheduler maximises

    rate(n) = (m + E) / (s + T(n))        n = 0 is the plain step, with E = 1

over the sets of nodes (`node_choice.best_part`) or, where nothing is drafted yet, over the lengths of a chain whose
tokens are accepted with the mean rate a, at l seconds a token (`cost_curve.best_length`):

    rate(n) = (m + 1 + a + ... + a^n) / (n l + T(n))

**The worth.** Whatever may be done (ask a drafter, verify more rows, take a plain step among drafts) is expected to
gain g tokens and to take c seconds more. A token is worth w seconds: those of a plain step, divided by the texts that
share the step, as all of them wait. So it is done

    because it pays     if g w >= k c
    to find out         if its expected loss, max(0, c - g w), fits the budget

The margin k is 1 where g and c are measured, GAIN where g is a mean, CLEAR_GAIN where estimates are known to be too
high, and CAUTION where the gain comes later or the text has lost time already.

**The budget.** Of the t seconds that have passed, finding out may have lost a share b (`cost_curve.Budget`):

    lost <= b t + beyond

| what is tried | its budget | b | beyond |
|---|---|---|---|
| drafts that a model makes | `DrafterRecord.trials` | TRIAL_SHARE | at most TRIAL_STEPS trials are saved |
| drafts that are looked up | `DrafterRecord.trials` | LOOKED_UP_SHARE | the same |
| row counts that look too dear | `CostCurve.trials` | LOSS_SHARE | CAUTION plain steps where they were never timed |
| the nodes of one text, at k = 1 | `Policy` | LOSS_SHARE | CAUTION plain steps; then k = CAUTION |
| a plain step among d drafts in a row | `RowTrials` | TRIAL_SHARE | it loses rate w - 1 of d steps |

Where n texts share the forward, all of them try a drafter in the same step, and its share is divided by the root of n.
What a drafter takes in each step, asked or not, as a head that reads the text along with the target, is lost as well
while its drafts do not pay; once that share is spent, the head leaves whole texts alone.

A drafter rests for as long as its budget needs to grow: (lost + c - b t) / b seconds. If all of them rest, no step is
looked at in the meantime. To measure which rows are exact waits until drafts have promised as much as it takes, which
is at most twice the best possible (renting skis until they would have been paid for).

**What is known.** T(n) comes from the cost curve, P from the drafter's estimates, as corrected by what came
(`acceptance`). For a draft model g is the gain of the best length at the mean rate, as it has to read the text before
it can be asked. A drafter that looks tokens up and a trained head may be asked before any step; what they bring differs
from step to step, so their mean rate says little. So g and c are the means of their earlier drafts: `Worth`, apart for
steps in which other drafters propose something. Here g is the tokens that a step gains by the draft less those that
verifying it for longer costs.
"""

from dataclasses import dataclass, field

from edgedec.draft_constants import CLEAR_GAIN, FIRST, KEPT, KEPT_OF_TRIALS, NOTICED, ODD, PRIOR


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
        """Expect `level_s` seconds for each level, as if PRIOR drafts of one level or of four had taken that."""
        self._weight = self._sum = self._squares = self._seconds = self._products = 0.0
        for n in (1.0, 4.0):
            self._add(n, n * level_s, PRIOR / 2)

    def _add(self, n: float, seconds: float, weight: float) -> None:
        self._weight += weight
        self._sum += weight * n
        self._squares += weight * n * n
        self._seconds += weight * seconds
        self._products += weight * n * seconds

    def note(self, n_levels: int, seconds: float) -> None:
        """Take a draft of so many levels; one that took far longer than expected counts as a few times as long."""
        expected = self._seconds / self._weight + self.level_s * (n_levels - self._sum / self._weight)
        seconds = min(seconds, ODD * max(expected, self.level_s * n_levels))
        self._weight, self._sum, self._squares, self._seconds, self._products = (
            KEPT * value for value in (self._weight, self._sum, self._squares, self._seconds, self._products)
        )
        self._add(n_levels, seconds, 1.0)

    @property
    def level_s(self) -> float:
        """Seconds that one level more takes."""
        spread = self._weight * self._squares - self._sum * self._sum
        least = NOTICED * self._seconds / self._sum
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
        paid: Whether the next draft was expected to pay when that was last asked.
    """

    price_s: float
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
        self.price_s += (1 - KEPT_OF_TRIALS) * (self.believed(price_s) - self.price_s)
        self.n_drafts[among_others] += 1
        new = max(1 / self.n_drafts[among_others], 1 - (KEPT_OF_TRIALS if is_trial else KEPT))
        self.gains[among_others] += new * (gain - self.gains[among_others])

    def believed(self, price_s: float) -> float:
        """Return the seconds that a draft counts as: far more than expected is a busy machine, or a prompt to read."""
        return min(price_s, ODD * self.price_s)

"""When to ask a drafter that has read the text already, such as a trained head: while its drafts are worth their time.

Such a drafter may be asked before any step, and what it promises differs from step to step: its mean acceptance says
little about the steps at which it is sure. So the worth of a draft is measured itself: the tokens that the nodes chosen
with it promise beyond those chosen without it, less the seconds that verifying them takes longer.
"""

from dataclasses import dataclass, field

_FIRST = 8  # drafts before their worth is judged
_KEPT = 0.97  # of the mean, with every draft
_KEPT_OF_TRIALS = 0.85  # trials are few and far between
_ODD = 3.0  # times the expected price: more than that is a busy machine or a first call, not a price


@dataclass(slots=True)
class Worth:
    """What a drafter's drafts are worth, in plain steps, where the other drafters propose something and where not.

    Attributes:
        price: What a draft takes.
        gains: The mean worth of a draft, [nothing else to verify, other nodes to verify].
        n_drafts: How many drafts each mean comes from.
    """

    price: float
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])
    n_drafts: list[int] = field(default_factory=lambda: [0, 0])

    def pays(self, among_others: bool) -> bool:
        """Tell whether the next draft is expected to be worth its price; the first drafts are made to find out."""
        return self.n_drafts[among_others] < _FIRST or self.gains[among_others] > self.price

    def note(self, gain: float, price: float, *, among_others: bool, is_trial: bool) -> None:
        """Take a draft that was worth `gain` and took `price`, both in plain steps."""
        self.price += (1 - _KEPT_OF_TRIALS) * (min(price, _ODD * self.price) - self.price)
        self.n_drafts[among_others] += 1
        new = max(1 / self.n_drafts[among_others], 1 - (_KEPT_OF_TRIALS if is_trial else _KEPT))
        self.gains[among_others] += new * (gain - self.gains[among_others])

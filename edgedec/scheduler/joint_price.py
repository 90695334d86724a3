"""What drafts cost that several generations make together: each of them pays the same part of the time."""

from edgedec.cost_curve import CostCurve
from edgedec.drafters.head.head import HeadDrafter

_KEPT = 0.9  # of what is known of the others, with every draft


class JointPrice:
    """The price of one generation's drafts by a head, which reads its weights once for all generations that draft.

    The others are expected to draft along as they did lately, at first all of them. If each generation paid for the
    whole draft, none would begin where all of them together would gain. What passes beside the head's calls is paid
    for by those that drafted: this generation's own work, and waiting until the threads of the others had the
    interpreter. The next forward of all waits for that, and it is most of the price where the model is small.

    Args:
        drafter: The generation's drafter.
        curve: The cost curve of its session. A draft for n texts is taken to last as many times as long as one for a
            single text as a forward of n rows lasts as long as one of a single row.
    """

    def __init__(self, drafter: HeadDrafter, curve: CostCurve) -> None:
        self._drafter = drafter
        self._curve = curve
        self._part = 1.0  # of the others, how many drafted along lately

    def share_s(self, seconds: float) -> float:
        """Return what the latest draft cost this generation; `seconds` passed, waiting for the others included."""
        calls, others = self._drafter.calls, self._curve.others
        if not others or not calls:
            return seconds
        n_along = sum(call.n_items - 1 for call in calls) / len(calls)
        self._part = _KEPT * self._part + (1 - _KEPT) * min(1.0, n_along / others)
        n = 1 + round(others * self._part)
        alone_s = sum(call.seconds / self._curve.growth(call.n_items) for call in calls)
        beside_s = seconds - sum(call.seconds for call in calls)
        return max(self._drafter.own_s, beside_s / (1 + n_along)) + alone_s * self._curve.growth(n) / n

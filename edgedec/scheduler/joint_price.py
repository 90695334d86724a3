"""What drafts cost that several generations make together: each of them pays the same part of the time."""

from edgedec.cost_curve import CostCurve, SharedForward
from edgedec.draft_constants import KEPT_OF_OTHERS
from edgedec.drafter import JointDrafter


class JointPrice:
    """The price of one generation's drafts by a model that reads its weights once for all generations that draft.

    The others are expected to draft along as they did lately, at first all of them. If each generation paid for the
    whole draft, none would begin where all of them together would gain. What passes beside the calls is paid
    for by those that drafted: this generation's own work, and waiting until the threads of the others had the
    interpreter. The next forward of all waits for that, and it is most of the price where the model is small.

    Args:
        drafter: The generation's drafter.
        curve: The cost curve of its session. A call of n rows is taken to last as many times as long as one of a single
            row as a forward of the target does.
    """

    def __init__(self, drafter: JointDrafter, curve: CostCurve) -> None:
        self._drafter = drafter
        self._curve = curve
        self._part = 1.0  # of the others, how many drafted along lately

    def share_s(self, seconds: float) -> float:
        """Return what the latest draft cost this generation; `seconds` passed, waiting for the others included."""
        calls, others = self._drafter.calls, self._curve.others
        if not others or not calls:
            return seconds
        n_along = sum(call.n_items - 1 for call in calls) / len(calls)
        self._part = KEPT_OF_OTHERS * self._part + (1 - KEPT_OF_OTHERS) * min(1.0, n_along / others)
        n = 1 + round(others * self._part)
        beside_s = seconds - sum(call.seconds for call in calls)
        return max(self._drafter.own_s, beside_s / (1 + n_along)) + sum(self._called_s(call, n) for call in calls) / n

    def _called_s(self, call: SharedForward, n: int) -> float:
        """Return what a call would take for `n` texts, each with as many rows as each text had in it."""
        growth = self._curve.growth
        return call.seconds / growth(call.n_rows) * growth(round(n * call.n_rows / call.n_items))

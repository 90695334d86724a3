"""Trials of row counts: now and then the scheduler verifies what the cost curve advises against, to time it.

A curve that was measured at a bad moment, or measured only in part because the machine is slow, would never be put
right otherwise: what looks too expensive is not verified, and so it is not timed. More rows than advised are tried
where they would pay if they cost next to nothing, within 0.5 % of the time. After many drafts in a row a plain step is
tried, within 1 % of the time.
"""

from dataclasses import dataclass

from edgedec.cost_curve import CostCurve
from edgedec.draft_constants import CAUTION, CLEAR_GAIN, EVERY, HOPED, LOSS_SHARE, STALE, TRIAL_SHARE, TRIAL_STEPS
from edgedec.scheduler.draft_tree import Choice, Expected, PolicyOptions


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial in the step that is running.

    Attributes:
        n_nodes: Nodes that it verifies.
        rate: Tokens per second expected without it.
        others: Tokens that other requests gain by the same forward.
        lost_s: Seconds that it is expected to lose.
    """

    n_nodes: int
    rate: float
    others: float
    lost_s: float


class RowTrials:
    """The trials of one generation; what they may lose is counted in the curve, for all generations.

    Attributes:
        trial: The trial of the step that is running; None for a step without one.
    """

    def __init__(self, curve: CostCurve, options: PolicyOptions) -> None:
        self._curve = curve
        self._options = options
        self.trial: Trial | None = None
        self._n_considered = 0
        self._n_drafted = 0

    def more_nodes(self, choice: Choice) -> list[int]:
        """Return the nodes that were chosen or, for a trial, more of them."""
        self._n_considered += 1
        if self._options.always or self._n_considered % EVERY:
            return choice.nodes
        plain_s = choice.cost(0)
        hoped, hoped_rate = choice.best(lambda n: plain_s * (1 + HOPED * n))
        if hoped_rate < CLEAR_GAIN * choice.rate:
            return choice.nodes
        order = sorted(hoped, key=choice.paths.__getitem__, reverse=True)
        while len(order) > len(choice.nodes):
            if self._may_try(choice.expected_of([choice.paths[node] for node in order]), choice):
                return sorted(order)
            order = order[: len(order) // 2]
        return choice.nodes

    def _may_try(self, more: Expected, choice: Choice) -> bool:
        """Begin a trial of more nodes and return True where it can be afforded, else return False."""
        trials, n_rows = self._curve.trials, more.n_nodes + 1
        lost_s = max(0.0, more.seconds - more.tokens / choice.rate)
        beyond_s = CAUTION * choice.cost(0) if self._curve.is_unknown(n_rows) else 0.0
        if lost_s > trials.left_s(LOSS_SHARE, beyond_s) or not trials.may_try(n_rows):
            return False
        trials.lost_s += lost_s
        self.trial = Trial(more.n_nodes, choice.rate, self._curve.others, lost_s)
        return True

    def plain_is_due(self, gain: float) -> bool:
        """Tell whether to time a plain step again, where drafts make the text `gain` times as fast."""
        return not self._options.always and self._n_drafted >= max(STALE - TRIAL_STEPS, (gain - 1) / TRIAL_SHARE)

    def count_step(self, n_nodes: int, seconds: float) -> None:
        """Count a step that was decided: its nodes, and the seconds that its forward is expected to take."""
        self._n_drafted = self._n_drafted + 1 if n_nodes else 0
        self._curve.trials.total_s += seconds / (1 + self._curve.others)

    def learn(self, n_nodes: int, n_tokens: int) -> bool:
        """Tell whether the step was a trial, and note what it cost: it verified `n_nodes` and gained `n_tokens`.

        A trial that was not made, as a grammar changed the draft or a prompt came with it, cost nothing.
        """
        seconds, trials, trial = self._curve.latest_s, self._curve.trials, self.trial
        self.trial = None
        if trial is None:
            return False
        if seconds is None or n_nodes != trial.n_nodes or self._curve.others != trial.others:
            trials.lost_s = max(0.0, trials.lost_s - trial.lost_s)
        else:
            lost_s = seconds - (n_tokens + trial.others) / trial.rate
            trials.count(trial.n_nodes + 1, trial.lost_s, lost_s, (1 + trial.others) / trial.rate)
        return True

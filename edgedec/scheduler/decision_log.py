"""What a generation decided, step by step, and what is said of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgedec.cost_curve import Cost
from edgedec.errors import counted
from edgedec.scheduler.active_drafters import ActiveDrafter

SHOWN = 4
"""Nodes that the reason against drafting speaks of."""


@dataclass(slots=True)
class DecisionLog:
    """The decisions of a generation so far.

    Attributes:
        n_steps: Steps in which a decision was made.
        n_rested: Steps in which no drafter was asked, as asking costs more than it brings.
        n_drafted: Steps in which nodes were verified.
        n_empty: Steps in which no drafter proposed anything.
        n_tokens: Tokens that these steps gave.
        spent_s: Seconds that drafting took in these steps, and that their forwards were expected to take or, where
            they were shared with other requests, have taken.
        promised: Tokens that the best nodes promised, summed over the steps that decided against a proposal.
        price: What verifying these nodes would have cost, in plain steps, summed over the same steps.
        nodes: How many these nodes were, summed over the same steps.
    """

    n_steps: int = 0
    n_rested: int = 0
    n_drafted: int = 0
    n_empty: int = 0
    n_tokens: int = 0
    spent_s: float = 0.0
    promised: float = 0.0
    price: float = 0.0
    nodes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second so far."""
        return self.n_tokens / max(self.spent_s, 1e-9)

    def count_rest(self) -> None:
        """Count a step before which no drafter was due."""
        self.n_steps += 1
        self.n_rested += 1

    def count(self, paths: Sequence[float], n_chosen: int, cost: Cost) -> None:
        """Count a decision for `n_chosen` of the nodes with these path probabilities.

        A decision against all of them also notes what the best nodes promised and would have cost.
        """
        self.n_steps += 1
        if n_chosen:
            self.n_drafted += 1
        elif not paths:
            self.n_empty += 1
        else:
            best = sorted(paths, reverse=True)[:SHOWN]
            self.promised += sum(best)
            self.price += cost(len(best)) / cost(0)
            self.nodes += len(best)

    def text(self) -> str:
        """Return the decisions as one sentence."""
        n_against = self.n_steps - self.n_rested - self.n_drafted - self.n_empty
        parts = [f"drafted in {self.n_drafted} of {counted(self.n_steps, 'step')}"]
        if self.n_rested:
            parts.append(f"no drafter asked in {self.n_rested}, as that takes longer than it saves")
        if self.n_empty:
            parts.append(f"nothing to propose in {self.n_empty}")
        if n_against:
            nodes, price = self.nodes / n_against, self.price / n_against
            parts.append(
                f"not worth it in {n_against}: verifying {counted(round(nodes), 'token')} more costs {price:.2f} steps "
                f"and promised {1 + self.promised / n_against:.2f} tokens"
            )
        return ", ".join(parts)


def summary(active: ActiveDrafter) -> str:
    """Return a sentence on what a draft model did in this generation, and why it was of no use where it was not.

    The sentence is empty for a drafter without a draft model.
    """
    if active.model is None:
        return ""
    what = f"{active.name}: {active.model()}"
    if active.n_asked:
        each = f"asked {active.n_asked} times, {1000 * active.asked_s / active.n_asked:.1f} ms each"
        return f"{what} was {each}, " + (f"{active.n_used} of its answers were of use" if active.n_used else "in vain")
    if active.in_place:
        return f"{what} was not asked: no gain was expected of it"
    if active.hoped is None:
        return f"{what} was not asked: the text was too short to find out whether reading it pays"
    price = active.record.price
    cost = "" if price is None else f", {1000 * price.level:.1f} ms for each token"
    return (
        f"{what} was not asked: the text was expected to come {active.hoped:.2f} times as fast with it{cost}, which "
        "does not repay reading the text"
    )

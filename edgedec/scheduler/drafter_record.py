"""What is known of each drafter, and how the decisions of a generation fell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgedec.cost_curve import Cost
from edgedec.counted import counted
from edgedec.draft import EMPTY_DRAFT, Draft, Drafter
from edgedec.scheduler.acceptance import Calibration

SHOWN = 4  # nodes that the reason against drafting speaks of
_FIRST_RATE = 0.7  # acceptance expected of a costly drafter that was never tried


@dataclass(slots=True)
class DrafterRecord:
    """What is known of a drafter; outlives a request.

    Attributes:
        calibration: What its estimates are worth, [sampling, greedy].
        level_s: Seconds that a costly drafter takes to go one token deeper.
        offered, accepted: How deep its drafts were tried and how deep they were right, forgetting slowly; as above.
        lost_s, total_s: What trying it cost, and the time of all steps in which it could have been tried.
        trial_s: What the last trial cost.
        read_s: Seconds that a token takes to read of the text that came since it was asked last.
        first_s: Seconds that reading the prompt took, the first time it was asked in a generation.
    """

    calibration: tuple[Calibration, Calibration] = field(default_factory=lambda: (Calibration(), Calibration()))
    level_s: float | None = None
    offered: list[float] = field(default_factory=lambda: [6.0, 6.0])
    accepted: list[float] = field(default_factory=lambda: [6.0 * _FIRST_RATE] * 2)
    lost_s: float = 0.0
    total_s: float = 0.0
    trial_s: float = 0.0
    read_s: float = 0.0
    first_s: float | None = None

    def rate(self, greedy: bool) -> float:
        """Return P(a node is accepted | its parent was)."""
        return min(0.98, self.accepted[greedy] / self.offered[greedy])


@dataclass(slots=True)
class ActiveDrafter:
    """A drafter at work in one generation.

    Attributes:
        name: As users call it.
        drafter: The drafter.
        record: What is known of it.
        costly: Whether each of its nodes takes time worth counting.
        draft: What it proposed before this step.
        places: The proposal's nodes in the step's tree.
        idle: Steps since a node of its was last worth verifying.
        missed: Tokens of the text since it was asked last, as far as they will have to be read; None before that.
        tries: Whether its draft is only to find out what it is worth.
        trials: Steps still to come in which it drafts only to find out what it is worth.
        late: How many of its drafts came after their deadline.
        model: Names the draft model that it uses, and the memory that keeping it takes; None for one without.
        n_asked, asked_s: How often a costly one was asked in this generation, and the time that took.
        verified: Whether nodes of its latest draft were verified.
        n_used: How many of its drafts were verified and had a right token.
        hoped: What its drafts were last expected to make of the speed without them; None where nobody looked.
    """

    name: str
    drafter: Drafter
    record: DrafterRecord
    costly: bool = False
    draft: Draft = EMPTY_DRAFT
    places: list[int] = field(default_factory=list)
    idle: int = 0
    missed: int | None = None
    tries: bool = False
    trials: int = 0
    late: int = 0
    model: Callable[[], str] | None = None
    n_asked: int = 0
    asked_s: float = 0.0
    verified: bool = False
    n_used: int = 0
    hoped: float | None = None

    def said(self) -> str:
        """Say what the draft model did in this generation and, where it was of no use, why; empty for a drafter
        without one.
        """
        if self.model is None:
            return ""
        what = f"{self.name}: {self.model()}"
        if self.n_asked:
            each = f"asked {self.n_asked} times, {1000 * self.asked_s / self.n_asked:.1f} ms each"
            return f"{what} was {each}, " + (f"{self.n_used} of its drafts were of use" if self.n_used else "in vain")
        if self.hoped is None:
            return f"{what} was not asked: the text was too short to find out whether reading it pays"
        level_s = self.record.level_s
        cost = "" if level_s is None else f", {1000 * level_s:.1f} ms for each token"
        return (
            f"{what} was not asked: its drafts were expected to be {self.hoped:.2f} times as fast as decoding without "
            f"them{cost}, which does not repay reading the text"
        )


@dataclass(slots=True)
class DecisionLog:
    """How the decisions of a generation fell."""

    n_steps: int = 0
    n_drafted: int = 0
    n_empty: int = 0
    promised: float = 0.0
    price: float = 0.0
    nodes: int = 0

    def take(self, paths: Sequence[float], n_chosen: int, cost: Cost) -> None:
        """Count a decision; of one against drafting, note what the best nodes promised and would have cost."""
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
        """Return it as a sentence."""
        n_against = self.n_steps - self.n_drafted - self.n_empty
        parts = [f"drafted in {self.n_drafted} of {counted(self.n_steps, 'step')}"]
        if self.n_empty:
            parts.append(f"nothing to propose in {self.n_empty}")
        if n_against:
            nodes, price = self.nodes / n_against, self.price / n_against
            parts.append(
                f"not worth it in {n_against}: verifying {counted(round(nodes), 'token')} more costs {price:.2f} steps "
                f"and promised {1 + self.promised / n_against:.2f} tokens"
            )
        return ", ".join(parts)


def depth_of(parents: Sequence[int]) -> int:
    """Return how many tokens deep a draft goes."""
    depths = [0] * (len(parents) + 1)  # the last for -1
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    return max(depths)

"""What is known of each drafter, and a summary of what a generation decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgedec.cost_curve import Cost
from edgedec.counted import counted
from edgedec.draft import EMPTY_DRAFT, Draft, Drafter, Verification
from edgedec.scheduler.acceptance import Calibration
from edgedec.scheduler.worth import DraftSeconds, Worth

SHOWN = 4
"""Nodes that the reason against drafting speaks of."""
_FIRST_RATE = 0.7  # acceptance expected of a costly drafter that was never tried
_FORGET = 0.97
_FORGET_TRIALS = 0.85  # trials are few and far between
_REST_AFTER = 24  # steps in which no node of a cheap drafter was worth verifying, before it rests
_REST_STEPS = 8  # a resting drafter is asked in one step of so many
_FIRST_GAIN = 0.25  # tokens a step that a cheap drafter is expected to bring at first
_NEWEST = 1 / 32  # weight of the latest step in what a cheap drafter brings and takes


@dataclass(slots=True)
class DrafterRecord:
    """What is known of a drafter; outlives a request.

    Attributes:
        calibration: What the drafter's estimates are worth, [sampling, greedy].
        level_s: Seconds that a costly drafter takes to draft one token deeper; None before it was timed.
        offered: Depth down to which its drafts were compared with the text, summed and slowly forgotten,
            [sampling, greedy].
        accepted: Depth down to which they were right, in the same way.
        lost_s: Seconds that its trials have cost.
        total_s: Seconds of all steps in which it could have been tried.
        trial_s: Seconds that the latest trial has cost.
        read_s: Seconds that the drafter takes for each token of the text that it has not read yet.
        first_s: Seconds that reading the prompt took in the latest generation that asked it; None before the first.
        worth: What the drafts are worth of a drafter that has read the text already, [sampling, greedy].
        known: What such a drafter's drafts take, by their levels; None before the first.
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
    worth: list[Worth | None] = field(default_factory=lambda: [None, None])
    known: DraftSeconds | None = None

    def rate(self, greedy: bool) -> float:
        """Return P(a node is accepted | its parent was accepted), at most 0.98."""
        return min(0.98, self.accepted[greedy] / self.offered[greedy])

    def worth_of(self, greedy: bool, price: float) -> Worth:
        """Return what its drafts are worth; `price`, in plain steps, is what one is expected to take at first."""
        found = self.worth[greedy]
        if found is None:
            found = self.worth[greedy] = Worth(price)
        return found

    def observe(self, n_right: int, depth: int, *, greedy: bool, is_trial: bool) -> None:
        """Take a draft that was right `n_right` tokens deep, where `depth` tokens were compared with the text."""
        kept = _FORGET_TRIALS if is_trial else _FORGET
        self.offered[greedy] = self.offered[greedy] * kept + depth
        self.accepted[greedy] = self.accepted[greedy] * kept + n_right


@dataclass(slots=True)
class ActiveDrafter:
    """A drafter at work in one generation.

    Attributes:
        name: The drafter's name, as users write it.
        drafter: The drafter.
        record: What is known of it.
        costly: Whether each of its nodes takes time worth counting.
        draft: What it proposed before this step.
        places: By node of `draft`, the node's index in the tree of all proposals.
        n_before: How many nodes that tree had before.
        idle: Steps since one of its nodes was last worth verifying.
        missed: Tokens of the text that it has to read before its next draft; None before its first draft.
        tries: Whether its latest draft was a trial, made to find out what the drafter is worth.
        trials: Trials still to come in a row.
        late: How many of its drafts came after their deadline.
        model: Returns the name and the memory of the draft model that it uses; None for a drafter without one.
        n_asked: How often a costly drafter was asked in this generation.
        asked_s: Seconds that these drafts took.
        verified: Whether nodes of its latest draft were verified.
        n_used: How many of its drafts were verified and began with a right token.
        in_place: Whether it knows the text already as far as the target's session holds it.
        price: Turns the seconds of a draft into those that count where generations draft together, or None.
        gain: Mean tokens that a cheap drafter brought, and no other before it, in a step in which it was asked.
        step_s: Mean seconds that such a step took for asking it, scoring its nodes and teaching it.
        ask_s: Seconds that asking it took before this step.
        n_left_out: Steps since it was asked, where it rests.
        unlearned: Tokens of these steps, which it learns when it is asked again.
        hoped: Expected speed with its drafts, in speeds without them; None where that was not estimated.
    """

    name: str
    drafter: Drafter
    record: DrafterRecord
    costly: bool = False
    draft: Draft = EMPTY_DRAFT
    places: list[int] = field(default_factory=list)
    n_before: int = 0
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
    in_place: bool = False
    price: Callable[[float], float] | None = None
    gain: float = _FIRST_GAIN
    step_s: float = 0.0
    ask_s: float = 0.0
    taught_s: float = 0.0
    n_left_out: int = 0
    unlearned: list[int] = field(default_factory=list)

    def rests(self, plain_s: float) -> bool:
        """Tell whether a cheap drafter is left out of this step; `plain_s` is what a plain step takes.

        It rests while nothing of it is worth verifying, and while it takes more time than its tokens save.
        """
        is_idle = self.idle > _REST_AFTER or self.gain * plain_s < self.step_s
        return is_idle and self.n_left_out < _REST_STEPS - 1

    def catch_up(self) -> None:
        """Have the drafter learn the tokens of the steps in which it rested (raises what the drafter raises)."""
        if self.unlearned:
            token_ids, self.unlearned = tuple(self.unlearned), []
            self.drafter.accept(Verification((), token_ids), {})

    def note_step(self, n_gained: int, seconds: float) -> None:
        """Take what a step brought and took in which a cheap drafter was asked."""
        self.gain += _NEWEST * (n_gained - self.gain)
        self.step_s += (_NEWEST if self.step_s else 1.0) * (seconds - self.step_s)

    def corrected_p(self, greedy: bool) -> list[float]:
        """Return P(node accepted | parent accepted) of its draft's nodes, by what was observed of its estimates."""
        calibration = self.record.calibration[greedy]
        return [calibration.corrected(p) for p in self.draft.p_accept]

    def share_s(self, seconds: float) -> float:
        """Return what its latest draft cost its generation, where `seconds` passed."""
        return seconds if self.price is None else self.price(seconds)

    def summary(self) -> str:
        """Return a sentence on what the draft model did in this generation, and why it was of no use where it was not.

        The sentence is empty for a drafter without a draft model.
        """
        if self.model is None:
            return ""
        what = f"{self.name}: {self.model()}"
        if self.n_asked:
            each = f"asked {self.n_asked} times, {1000 * self.asked_s / self.n_asked:.1f} ms each"
            return f"{what} was {each}, " + (f"{self.n_used} of its drafts were of use" if self.n_used else "in vain")
        if self.hoped is None and not self.in_place:
            return f"{what} was not asked: the text was too short to find out whether reading it pays"
        if self.in_place:
            return f"{what} was not asked: no gain was expected of it"
        level_s = self.record.level_s
        cost = "" if level_s is None else f", {1000 * level_s:.1f} ms for each token"
        return (
            f"{what} was not asked: its drafts were expected to be {self.hoped:.2f} times as fast as decoding without "
            f"them{cost}, which does not repay reading the text"
        )


@dataclass(slots=True)
class DecisionLog:
    """What a generation decided, step by step.

    Attributes:
        n_steps: Steps in which a decision was made.
        n_drafted: Steps in which nodes were verified.
        n_empty: Steps in which no drafter proposed anything.
        n_tokens: Tokens that these steps gave.
        spent_s: Seconds that drafting took in these steps, and that their forwards were expected to take or, where
            they were shared with other requests, have taken.
        promised: Tokens that the best nodes promised, summed over the steps that decided against a proposal.
        price: What verifying these nodes would have cost, in plain steps, summed over the same steps.
        nodes: How many these nodes were, summed over the same steps.
        others: Tokens that other requests gain by the forward of the present step.
    """

    n_steps: int = 0
    n_drafted: int = 0
    n_empty: int = 0
    n_tokens: int = 0
    spent_s: float = 0.0
    promised: float = 0.0
    price: float = 0.0
    nodes: int = 0
    others: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second so far."""
        return self.n_tokens / max(self.spent_s, 1e-9)

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

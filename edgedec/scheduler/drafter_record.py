"""What is known of each drafter, and a summary of what a generation decided."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from edgedec.cost_curve import Budget, Cost
from edgedec.draft import EMPTY_DRAFT, Draft, Drafter, Verification
from edgedec.draft_constants import (
    FIRST_PRICE_S,
    KEPT,
    KEPT_OF_TRIALS,
    LOOKED_UP_SHARE,
    MOST_P,
    ODD,
    PRIOR,
    TRIAL_SHARE,
    TRIAL_STEPS,
)
from edgedec.drafter_traits import DraftCost, DrafterTraits, Following
from edgedec.errors import counted
from edgedec.scheduler.acceptance import Calibration
from edgedec.scheduler.estimator import DraftSeconds, Worth

SHOWN = 4
"""Nodes that the reason against drafting speaks of."""


@dataclass(slots=True)
class DrafterRecord:
    """What is known of a drafter; outlives a request.

    Attributes:
        calibration: What the drafter's estimates are worth, [sampling, greedy].
        level_s: Seconds that a costly drafter takes to draft one token deeper; None before it was timed.
        offered: Depth down to which its drafts were compared with the text, summed and slowly forgotten,
            [sampling, greedy].
        accepted: Depth down to which they were right, in the same way.
        trials: What its trials have cost, of the steps in which it could have been tried.
        n_granted: How many of the texts that share a forward may still try it, of those that were allowed to together.
        trial_s: Seconds that the latest trial has cost.
        read_s: Seconds that the drafter takes for each token of the text that it has not read yet.
        first_s: Seconds that reading the prompt took in the latest generation that asked it; None before the first.
        worth: What the drafts are worth of a drafter that may be asked before any step, [sampling, greedy].
        known: What such a drafter's drafts take, by their levels; None before the first.
    """

    calibration: tuple[Calibration, Calibration] = field(default_factory=lambda: (Calibration(), Calibration()))
    level_s: float | None = None
    offered: list[float] = field(default_factory=lambda: [PRIOR] * 2)
    accepted: list[float] = field(default_factory=lambda: [PRIOR * DrafterTraits().rate] * 2)
    trials: Budget = field(default_factory=Budget)
    n_granted: int = 0
    trial_s: float = 0.0
    read_s: float = 0.0
    first_s: float | None = None
    worth: list[Worth | None] = field(default_factory=lambda: [None, None])
    known: DraftSeconds | None = None
    is_new: bool = True

    def expect(self, traits: DrafterTraits) -> None:
        """Take what a drafter declares, as far as nothing better is known."""
        if self.is_new:
            self.accepted = [traits.rate * offered for offered in self.offered]
        if self.level_s is None:
            self.level_s = traits.level_s
        self.is_new = False

    def rate(self, greedy: bool) -> float:
        """Return P(a node is accepted | its parent was accepted), at most MOST_P."""
        return min(MOST_P, self.accepted[greedy] / self.offered[greedy])

    def worth_of(self, greedy: bool, price_s: float = FIRST_PRICE_S) -> Worth:
        """Return what its drafts are worth; `price_s` is the seconds that one is expected to take at first."""
        found = self.worth[greedy]
        if found is None:
            found = self.worth[greedy] = Worth(price_s)
        return found

    def may_lose(self, seconds: float, share: float, n_texts: int) -> bool:
        """Tell whether a trial that may lose so many seconds is within this share, for each of `n_texts` texts alike.

        All texts that share a forward try a drafter in the same step, as calls of models cost less together.
        """
        if self.wait_s(seconds, share, n_texts) > 0:
            return False
        self.n_granted = (self.n_granted or n_texts) - 1
        return True

    def wait_s(self, seconds: float, share: float, n_texts: int) -> float:
        """Return how many seconds have to pass before may_lose() returns True.

        Time in which nothing was tried is saved up for a few trials.
        """
        trials, wanted_s = self.trials, n_texts * seconds
        trials.lost_s = max(trials.lost_s, share * trials.total_s - TRIAL_STEPS * wanted_s)
        return 0.0 if self.n_granted else max(0.0, -trials.left_s(share, -wanted_s) / share)

    def goes_without(self, greedy: bool) -> bool:
        """Tell whether a drafter that follows texts leaves the next one alone.

        It does where its drafts did not pay lately, and its trials, to which following belongs, have lost their share.
        """
        worth = self.worth[greedy]
        return worth is not None and not worth.paid and self.trials.left_s(TRIAL_SHARE) < 0

    def observe(self, n_right: int, depth: int, *, greedy: bool, is_trial: bool) -> None:
        """Take a draft that was right `n_right` tokens deep, where `depth` tokens were compared with the text."""
        kept = KEPT_OF_TRIALS if is_trial else KEPT
        self.offered[greedy] = self.offered[greedy] * kept + depth
        self.accepted[greedy] = self.accepted[greedy] * kept + n_right


@dataclass(slots=True)
class ActiveDrafter:
    """A drafter at work in one generation.

    Attributes:
        name: The drafter's name, as users write it.
        drafter: The drafter.
        record: What is known of it.
        cost: What each of its nodes takes.
        draft: What it proposed before this step.
        places: By node of `draft`, the node's index in the tree of all proposals.
        n_before: How many nodes that tree had before.
        missed: Tokens of the text that it has to read before its next draft; None before its first draft.
        tries: Whether its latest draft was a trial, made to find out what the drafter is worth.
        trials: Trials still to come in a row.
        model: Returns the name and the memory of the draft model that it uses; None for a drafter without one.
        n_asked: How often a costly drafter was asked in this generation.
        asked_s: Seconds that these drafts took.
        verified: Whether nodes of its latest draft were verified.
        n_used: How many of its drafts were verified and began with a right token.
        price: Turns the seconds of a draft into those that count where generations draft together, or None.
        ask_s: Seconds that asking it took before this step.
        taught_s: Mean seconds that teaching it takes.
        rests: Whether it was not asked before this step.
        called: Whether a costly drafter was asked before this step.
        idles: Whether it leaves this text alone, as following the text would cost more than its drafts bring.
        n_own: Nodes of the step's draft that it proposed, and no other drafter before it.
        unlearned: Tokens of the steps in which it rested, which it learns when it is asked again.
        hoped: Expected speed with its drafts, in speeds without them; None where that was not estimated.
    """

    name: str
    drafter: Drafter
    record: DrafterRecord
    cost: DraftCost = DraftCost.NOTHING
    draft: Draft = EMPTY_DRAFT
    places: list[int] = field(default_factory=list)
    n_before: int = 0
    missed: int | None = None
    tries: bool = False
    trials: int = 0
    model: Callable[[], str] | None = None
    n_asked: int = 0
    asked_s: float = 0.0
    verified: bool = False
    n_used: int = 0
    hoped: float | None = None
    price: Callable[[float], float] | None = None
    ask_s: float = 0.0
    taught_s: float = 0.0
    rests: bool = True
    called: bool = False
    idles: bool = False
    n_own: int = 0
    unlearned: list[int] = field(default_factory=list)

    @property
    def costly(self) -> bool:
        """Whether each of its nodes takes time worth counting."""
        return self.cost is not DraftCost.NOTHING

    @property
    def in_place(self) -> bool:
        """Whether it knows the text already as far as the target's session holds it."""
        return self.cost is DraftCost.CALLS

    def is_due(self, worth: Worth, token_s: float, n_texts: int, *, among_others: bool = False) -> bool:
        """Tell whether it is asked before this step, as that pays or to find out; `tries` says which.

        Args:
            worth: What its drafts are worth.
            token_s: Seconds that a token is worth.
            n_texts: Texts that share the forward.
            among_others: Whether other drafters proposed nodes that are worth verifying.
        """
        if self.idles:
            return False
        worth.paid = worth.pays(token_s, among_others=among_others)
        self.tries = not worth.paid
        return not self.tries or self.record.may_lose(worth.price_s, self.share(n_texts), n_texts)

    def share(self, n_texts: int) -> float:
        """Return the share of the time that its trials may lose, which so many texts try in the same step.

        A trial of n texts tells as much as n trials of one text, so less time is spent on trials.
        """
        return (TRIAL_SHARE if self.costly else LOOKED_UP_SHARE) / sqrt(n_texts)

    def wait_s(self, greedy: bool, token_s: float, n_texts: int) -> float:
        """Return the seconds before the drafter may be asked, where no other one proposes anything; 0 for now."""
        worth = self.record.worth[greedy]
        if self.idles:
            return inf
        if worth is None or (self.costly and not self.in_place) or self.drafter.needs.of_each_step:
            return 0.0  # what it needs comes with each step
        return 0.0 if worth.pays(token_s) else self.record.wait_s(worth.price_s, self.share(n_texts), n_texts)

    def idle_if_dear(self, greedy: bool) -> None:
        """Leave the text alone where the record says so."""
        if isinstance(self.drafter, Following) and self.record.goes_without(greedy):
            self.drafter.idle()
            self.idles = True

    def count_following(self, greedy: bool) -> None:
        """Count at a text's end what following it took as lost, where drafts did not pay."""
        worth = self.record.worth[greedy]
        if isinstance(self.drafter, Following) and not self.idles and worth is not None and not worth.paid:
            self.record.trials.lost_s += self.drafter.followed_s

    def catch_up(self) -> None:
        """Have the drafter learn the tokens of the steps in which it rested (raises what the drafter raises)."""
        if self.unlearned:
            token_ids, self.unlearned = tuple(self.unlearned), []
            self.drafter.learn(Verification((), token_ids), {})

    def judge(self, worth: Worth, gain: float, seconds: float, token_s: float, *, among_others: bool = False) -> None:
        """Take a draft that was worth `gain` tokens and took `seconds`; the rest is as for is_due()."""
        if self.tries:  # a prompt that was read first is no price, but lost time it is
            spent_s = max(worth.believed(seconds), min(seconds, ODD * token_s))
            self.record.trials.lost_s += max(0.0, spent_s - gain * token_s)
        worth.note(gain, seconds, among_others=among_others, is_trial=self.tries)

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
        n_rested: Steps in which no drafter was asked, as asking costs more than it brings.
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
    n_rested: int = 0
    n_drafted: int = 0
    n_empty: int = 0
    n_tokens: int = 0
    spent_s: float = 0.0
    promised: float = 0.0
    price: float = 0.0
    nodes: int = 0
    others: float = 0.0

    @property
    def n_texts(self) -> int:
        """Texts that share the forward of the present step."""
        return 1 + round(self.others)

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

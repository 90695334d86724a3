"""The drafters at work in one generation: each with its state, asked for drafts, and dropped when they fail."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, sqrt
from time import monotonic, perf_counter

from edgedec.cost_curve import CostCurve
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.draft_constants import LOOKED_UP_SHARE, NEWEST, ODD, TRIAL_SHARE
from edgedec.drafter import Closing, Drafter, DrafterNeeds, DrafterRestsError, DraftLateError, JointDrafter, ProposalLog
from edgedec.drafter_traits import DraftCost, Following
from edgedec.errors import PluginError
from edgedec.scheduler.draft_tree import DraftTree, Gain, PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord, Worth
from edgedec.stats import DecodeStats


@dataclass(slots=True)
class ActiveDrafter:
    """A drafter at work in one generation.

    Attributes:
        name: The drafter's name, as users write it.
        record: What is known of it.
        cost: What each of its nodes takes.
        greedy: Whether the text's tokens are drawn at temperature 0; what is known of sampled texts is kept apart.
        draft: What it proposed before this step.
        chances: P(node accepted | parent accepted) of its nodes, by what was observed of the drafter's estimates.
        places: By node of `draft`, the node's index in the tree of all proposals.
        n_before: How many nodes that tree had before.
        missed: Tokens of the text that it has to read before its next draft; None before its first draft.
        tries: Whether its latest draft was a trial, made to find out what the drafter is worth.
        trials: Steps of the present trial that are still to come.
        model: Returns the name and the memory of the draft model that it uses; None for a drafter without one.
        following: The drafter, where it reads each text along with the target; else None.
        n_asked: How often a costly drafter was asked in this generation.
        asked_s: Seconds that these drafts took.
        verified: Whether nodes of its latest draft were verified.
        n_used: How many of its drafts were verified and began with a right token.
        part: Of the other texts that share the forward, how many drafted along lately.
        asked: Whether it was asked before this step.
        ask_s: Seconds that this took.
        taught_s: Mean seconds that teaching it takes.
        idles: Whether it leaves this text alone, as following the text would cost more than its drafts bring.
        n_unread: Tokens of the text that the target had to read when the text was begun.
        gained_s: Seconds that its drafts gained.
        gain: What its latest draft is expected to gain, where the step tells what it gained; else None.
        among_others: Whether other drafters had nodes to verify when it was asked.
        n_own: Nodes of the step's draft that it proposed, and no other drafter before it.
        unlearned: Tokens of the steps in which it rested, which it learns when it is asked again.
        hoped: Expected speed with its drafts, in speeds without them; None where that was not estimated.
        costly: Whether a node that the drafter drafts takes enough time to be counted.
        in_place: Whether it knows the text already as far as the target's session holds it.
        worth: What its drafts are worth in texts like this one.
    """

    name: str
    drafter: Drafter
    record: DrafterRecord
    cost: DraftCost = DraftCost.NOTHING
    greedy: bool = True
    draft: Draft = EMPTY_DRAFT
    chances: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    n_before: int = 0
    missed: int | None = None
    tries: bool = False
    trials: int = 0
    model: Callable[[], str] | None = None
    following: Following | None = None
    n_asked: int = 0
    asked_s: float = 0.0
    verified: bool = False
    n_used: int = 0
    hoped: float | None = None
    part: float = 1.0
    asked: bool = False
    ask_s: float = 0.0
    taught_s: float = 0.0
    idles: bool = False
    n_unread: int = 0
    gained_s: float = 0.0
    gain: Gain | None = None
    among_others: bool = False
    n_own: int = 0
    unlearned: list[int] = field(default_factory=list)
    costly: bool = field(init=False)
    in_place: bool = field(init=False)
    worth: Worth = field(init=False)

    def __post_init__(self) -> None:
        self.costly, self.in_place = self.cost is not DraftCost.NOTHING, self.cost is DraftCost.CALLS
        self.worth = self.record.worth[self.greedy]

    def is_due(self, token_s: float, n_texts: int, *, among_others: bool = False) -> bool:
        """Tell whether it is asked before this step, as that pays or to find out; `tries` says which.

        Args:
            token_s: Seconds that a token is worth.
            n_texts: Texts that share the forward.
            among_others: Whether other drafters proposed nodes that are worth verifying.
        """
        if self.idles:
            return False
        self.worth.paid = self.worth.pays(token_s, among_others=among_others)
        return self.may_ask(self.worth.paid, self.worth.price_s, n_texts)

    def may_ask(self, pays: bool, loss_s: float, n_texts: int, n_steps: int = 1) -> bool:
        """Tell whether to ask the drafter: where that pays, or to find out, where the loss fits its budget.

        Args:
            pays: Whether its draft is expected to pay.
            loss_s: Seconds that a trial may lose.
            n_texts: Texts that share the forward.
            n_steps: Steps in a row that a trial takes: one, unless the drafter first has to read what it missed.
        """
        self.tries, record = not pays, self.record
        if pays:
            return True
        if self.trials == 0:
            if record.wait_s(max(loss_s, record.trial_s), self.share(n_texts), n_texts) > 0:
                return False
            record.n_granted = (record.n_granted or n_texts) - 1
            self.trials, record.trial_s = n_steps, 0.0
        self.trials -= 1
        return True

    def share(self, n_texts: int) -> float:
        """Return the share of the time that its trials may lose, which so many texts try in the same step.

        A trial of n texts tells as much as n trials of one text, so less time is spent on trials.
        """
        return (TRIAL_SHARE if self.costly else LOOKED_UP_SHARE) / sqrt(n_texts)

    def wait_s(self, token_s: float, n_texts: int) -> float:
        """Return the seconds before the drafter may be asked, where no other one proposes anything; 0 for now."""
        if self.idles:
            return inf
        if (self.costly and not self.in_place) or self.drafter.needs.of_each_step or self.worth.pays(token_s):
            return 0.0  # what it needs may come with each step
        return self.record.wait_s(self.worth.price_s, self.share(n_texts), n_texts)

    def idle_if_dear(self, n_unread: int, most: int | None) -> None:
        """Leave a text of so many unread tokens alone where the record says so; it may grow by `most` tokens."""
        self.n_unread = n_unread
        followed = self.record.followed[self.greedy]
        if self.following is not None and self.record.goes_without(self.greedy, followed.loss_s(n_unread, most)):
            self.following.idle()
            self.idles = True

    def count_following(self, n_tokens: int) -> None:
        """Note at the end of a text that grew by `n_tokens` what following took; what drafts did not repay is lost."""
        if self.following is not None and not self.idles:
            read_s = self.following.followed_s
            self.record.followed[self.greedy].note(self.n_unread + n_tokens, n_tokens, read_s, self.gained_s)
            self.record.trials.lost_s += max(0.0, read_s - max(0.0, self.gained_s))

    def catch_up(self) -> None:
        """Have the drafter learn the tokens of the steps in which it rested (raises what the drafter raises)."""
        token_ids, self.unlearned = tuple(self.unlearned), []
        self.drafter.learn(Verification((), token_ids), {})

    def judge(self, gain: float, seconds: float, token_s: float, *, among_others: bool = False) -> None:
        """Take a draft that was worth `gain` tokens and took `seconds`; the rest is as for is_due()."""
        if self.tries:  # a prompt that was read first is no price, but lost time it is
            spent_s = min(seconds, ODD * max(self.worth.price_s, token_s))  # far more is a busy machine
            self.record.trials.lost_s += max(0.0, spent_s - gain * token_s)
        self.worth.note(gain, seconds, among_others=among_others, is_trial=self.tries)

    def settle(self, n_tokens: float | None, forward_s: float, token_s: float) -> None:
        """Judge the latest draft by what its step gave, where it is to be judged so.

        Args:
            n_tokens: Tokens of the step, those of other requests included; None where the step was not made as it was
                decided, so that what was expected of it counts.
            forward_s: Seconds of its forward.
            token_s: As for is_due().
        """
        gain, self.gain = self.gain, None
        if gain is None:
            return
        gain_s = gain.expected_s if n_tokens is None else gain.seconds(n_tokens, forward_s)
        self.gained_s += gain_s - self.ask_s
        self.judge(gain_s / token_s, self.ask_s, token_s, among_others=self.among_others)

    def share_s(self, seconds: float, curve: CostCurve) -> float:
        """Return what its latest draft cost its generation, where `seconds` passed, waiting for others included.

        Where the drafts of several generations call a model together, the others are expected to draft along as they
        did lately, at first all of them. If each generation paid for the whole draft, none would begin where all of
        them together would gain. What passes beside the calls is paid for by those that drafted: this generation's own
        work, and waiting until the threads of the others had the interpreter. The next forward of all waits for that,
        and it is most of the price where the model is small. `curve` is the cost curve of the target's session: a call
        of n rows is taken to last as many times as long as one of a single row as a forward of the target does.
        """
        drafter, others = self.drafter, curve.others
        if not others or not isinstance(drafter, JointDrafter) or not drafter.calls:
            return seconds
        n_along = sum(call.n_items - 1 for call in drafter.calls) / len(drafter.calls)
        self.part += NEWEST * (min(1.0, n_along / others) - self.part)
        n = 1 + round(others * self.part)
        beside_s = seconds - sum(call.seconds for call in drafter.calls)
        called_s = [
            call.seconds / curve.growth(call.n_rows) * curve.growth(round(n * call.n_rows / call.n_items))
            for call in drafter.calls
        ]
        return max(drafter.own_s, beside_s / (1 + n_along)) + sum(called_s) / n


class ActiveDrafters:
    """The drafters of one generation, made of what edgedec.scheduler.policy.Policy is made of.

    Attributes:
        all: The drafters that have not failed and were not switched off.
        needs: What all of them together need of the target.
        patience_s: Seconds that each of them has for its next draft.
        drawn: The first draft of the step that was drawn from q, for a rule that looks at q; None where there is none.
    """

    def __init__(
        self, drafters: Sequence[ActiveDrafter], n_vocab: int, options: PolicyOptions, recorder: ProposalLog | None
    ) -> None:
        self._n_vocab = n_vocab
        self._options = options
        self._recorder = recorder
        self.patience_s = 0.0
        self.drawn: Draft | None = None
        self._use(drafters)

    def _use(self, drafters: Sequence[ActiveDrafter]) -> None:
        self.all = tuple(drafters)
        needs = [active.drafter.needs for active in drafters]
        self.needs = DrafterNeeds(
            tuple(sorted({tap for need in needs for tap in need.taps})),
            any(need.layers for need in needs),
            max((need.candidates for need in needs), default=0),
            any(need.varies for need in needs),
        )

    def ask(
        self, stats: DecodeStats, active: ActiveDrafter, tree: DraftTree, n_max: int, extra_s: float = 0.0
    ) -> float:
        """Add a drafter's nodes, with corrected p, to the tree; return the seconds that this took.

        `extra_s` is what the drafter may take beyond the usual deadline.
        """
        started = perf_counter()
        try:
            if active.unlearned:
                active.catch_up()
            draft = active.drafter.propose(n_max, monotonic() + self.patience_s + extra_s)
            if not isinstance(draft, Draft):
                raise PluginError(f"propose() returned a {type(draft).__name__}; it must return an edgedec Draft")
            if len(draft.tokens) > n_max:
                draft = draft.truncated(n_max)
            draft.check(self._n_vocab)
        except Exception as error:  # a drafter never ends the text
            if isinstance(error, DraftLateError):
                stats.count_failure(active.name, "late")
                stats.add_reason(f"{active.name}: drafts came after their deadline and were left out")
            if not isinstance(error, DraftLateError) or error.is_last:
                self.drop(stats, active, error)
                return perf_counter() - started
            draft = EMPTY_DRAFT
        active.draft = draft
        n = len(draft.tokens)
        if n:
            active.chances = active.record.calibration[active.greedy].all_corrected(draft.p_accept)
        has_q = draft.q is not None and any(law is not None for law in draft.q)
        if n and not self._options.coupled and has_q and (self._options.trees or draft.is_chain):
            self.drawn = draft if self.drawn is None else self.drawn
            active.n_before, active.places = 0, list(range(n))
        elif n:
            active.n_before = len(tree.tokens)
            p = draft.p_accept if self._options.always else active.chances
            active.places = tree.add(draft.tokens, draft.parents, p)
            if self._recorder is not None:
                self._recorder.drafted(active.places, draft.depths())
        seconds = perf_counter() - started
        stats.count_proposal(active.name, n, seconds)
        return seconds

    def renew_needs(self) -> None:
        """Ask the drafters anew what they need of the target."""
        self._use(self.all)

    def get(self, name: str) -> Drafter | None:
        """Return the drafter of that name that is at work, None where there is none."""
        return next((active.drafter for active in self.all if active.name == name), None)

    def leave(self, name: str) -> None:
        """Go on without the drafter of that name, between two steps; without such a drafter nothing changes."""
        for active in self.all:
            if active.name == name:
                self._remove(active)

    def drop(self, stats: DecodeStats, active: ActiveDrafter, error: Exception) -> None:
        """Go on without a drafter that failed."""
        self._remove(active)
        note_failure(stats, active.name, error)

    def _remove(self, removed: ActiveDrafter) -> None:
        close_drafter(removed.drafter)
        self._use([active for active in self.all if active is not removed])

    def close(self, n_tokens: int) -> None:
        """Let the drafters learn the rest of the text, which grew by `n_tokens`, and end the threads that some have."""
        for active in self.all:
            with suppress(Exception):  # a drafter never ends the text
                if active.unlearned:
                    active.catch_up()
                active.count_following(n_tokens)
            close_drafter(active.drafter)


def note_failure(stats: DecodeStats, name: str, error: Exception) -> None:
    """Note that a generation goes on without a drafter that failed: a drafter never ends the text."""
    if isinstance(error, DrafterRestsError):
        stats.add_reason(f"{name} off: {error}")
        return
    try:
        message = str(error)
    except Exception:  # its own __str__ fails
        message = "its message can't be shown"
    stats.add_reason(f"{name} off: the drafter failed ({type(error).__name__}: {message})")
    stats.count_failure(name, "failed")


def close_drafter(drafter: Drafter | None) -> None:
    """Let go of what a drafter holds until the generation ends: a thread, or a session of another model."""
    if isinstance(drafter, Closing):
        drafter.close()

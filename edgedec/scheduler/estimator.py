"""Is it worth it? The mathematics by which the scheduler decides, and what it knows of the worth of drafts.

**The score.** A step that verifies n nodes gives E = 1 + sum of P(path to a node is accepted) tokens, and others gain m
tokens by the same forward. It takes s seconds of drafting and T(n) seconds of forward. The scheduler maximises

    rate(n) = (m + E) / (s + T(n))        n = 0 is the plain step, with E = 1

over the sets of nodes (`draft_tree.best_part`) or, where nothing is drafted yet, over the lengths of a chain whose
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
(`drafter_record.Calibration`). For a draft model g is the gain of the best length at the mean rate, as it has to read
the text before it can be asked. A drafter that looks tokens up and a trained head may be asked before any step; what
they bring differs from step to step, so their mean rate says little. So g and c are the means of their earlier drafts:
`drafter_record.Worth`, apart for steps in which other drafters propose something. Here g is the tokens that a step
gains by the draft less those that verifying it for longer costs.
"""

from dataclasses import dataclass

from edgedec.cost_curve import Cost, best_length
from edgedec.draft_constants import AT_ONCE, BUCKET, CAUTION, FIRST, GAIN, TRIAL_STEPS
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.decision_log import DecisionLog
from edgedec.scheduler.draft_tree import PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord, DraftSeconds


@dataclass(frozen=True, slots=True)
class Best:
    """What is expected of a step with the nodes that were chosen so far.

    Attributes:
        n_nodes: The nodes.
        tokens: Tokens that the step gives, those of other requests included.
        seconds: What its forward takes.
    """

    n_nodes: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def gain_s(self, before: "Best", rate: float) -> float:
        """Return the seconds that these nodes are worth beyond those before, where `rate` tokens take a second."""
        return (self.tokens - before.tokens) / rate - (self.seconds - before.seconds)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a costly drafter is asked before one step.

    Attributes:
        n_max: Most nodes.
        level_s: Seconds that one token deeper is expected to take.
        token_s: Seconds that a token is worth: those of a plain step, divided by the texts that share the step.
        least_path: Path probability below which a node does not pay.
        extra_s: Seconds that the drafter may take beyond the usual deadline.
        among_others: Whether other drafters proposed nodes that are worth verifying.
    """

    n_max: int
    level_s: float
    token_s: float
    least_path: float
    extra_s: float = 0.0
    among_others: bool = False


def plan_draft(
    active: ActiveDrafter, log: DecisionLog, options: PolicyOptions, cost: Cost, n_max: int, best: Best, room: int
) -> DraftPlan | None:
    """Return how to ask a costly drafter now, None where its draft would not pay.

    Args:
        active: The drafter.
        log: What the generation has decided so far.
        options: How to draft.
        cost: Seconds of a forward by the nodes of the draft in it.
        n_max: Most nodes of a draft.
        best: What is expected of the step without the drafter.
        room: Tokens that the text may still grow by.
    """
    if active.in_place:
        return _plan_known(active, log, options, cost, n_max, best)
    record = active.record
    if active.cost is DraftCost.TARGET:
        active.missed = 0
    p = record.rate(options.greedy)
    level_s = record.level_s if record.level_s is not None else cost(0) / 4
    if active.missed is None and not options.always and not _pays_to_read(active, log, p, level_s, cost, n_max, room):
        return None
    length, gain = best_length(p, level_s, cost, n_max, best.rate, log.others)
    active.tries = gain < GAIN and not options.always
    if active.tries:
        length = min(2, n_max)
        if not _may_try(active, length * level_s + cost(length) - cost(0), log.n_texts):
            return None
    extra_s = 2 * length * level_s if active.cost is DraftCost.TARGET else 0.0
    token_s = cost(0) / log.n_texts
    if options.always:
        return DraftPlan(n_max, level_s, token_s, 0.0, extra_s)
    marginal = _least_gain(level_s, cost, length, best.rate * max(gain, 1.0))
    least_path = min(max(marginal, p ** (length - 0.1)), p ** (length - 1))
    return DraftPlan(min(n_max, 2 * length), level_s, token_s, least_path, extra_s)


def _plan_known(
    active: ActiveDrafter, log: DecisionLog, options: PolicyOptions, cost: Cost, n_max: int, best: Best
) -> DraftPlan | None:
    """Return how to ask a drafter that has read the text already; the arguments are those of plan_draft.

    Its chain ends by its own probabilities, the next of which is about its mean acceptance.
    """
    record, p = active.record, active.record.rate(options.greedy)
    if record.known is None:
        record.known = DraftSeconds(record.level_s if record.level_s is not None else cost(0) / 4)
    level_s, token_s = record.known.level_s, cost(0) / log.n_texts
    if options.always:
        return DraftPlan(n_max, level_s, token_s, 0.0)
    worth, among_others = record.worth_of(options.greedy, level_s), best.n_nodes > 0
    if not active.is_due(worth, token_s, log.n_texts, among_others=among_others):
        return None
    length, gain = best_length(p, level_s, cost, n_max, best.rate, log.others)
    rate = best.rate * max(gain, 1.0)
    least = max(_least_gain(level_s, cost, length, rate), (level_s + _row_behind(cost, length, n_max)) * rate)
    least_path = min(1.0, least / max(p, 0.01))
    return DraftPlan(n_max, level_s, token_s, least_path, among_others=among_others)


def _least_gain(level_s: float, cost: Cost, length: int, rate: float) -> float:
    """Return the tokens that one level more must add to pay, where chains of `length` levels give `rate` tokens/s."""
    return (level_s + (cost(length) - cost(0)) / length) * rate


def _row_behind(cost: Cost, length: int, n_max: int) -> float:
    """Return the seconds of a row more than `length`, at best: rows behind a whole group of the kernels' cost more."""
    whole_s, end = cost(length), min(n_max, length + FIRST)
    return min([(cost(n) - whole_s) / (n - length) for n in range(length + 1, end + 1)], default=0.0)


def _pays_to_read(
    active: ActiveDrafter, log: DecisionLog, p: float, level_s: float, cost: Cost, n_max: int, room: int
) -> bool:
    """Tell whether the rest of the text is likely to repay the time that reading its beginning takes.

    The first steps show how fast the cheap drafters make the text. The text is expected to double its length. Other
    requests wait for the reading and for each draft, so what counts is how much faster all of them become. `p` is
    P(a node is accepted | its parent was accepted), `level_s` the seconds of one token; the rest as for plan_draft.
    """
    if log.n_steps < FIRST:
        return False
    mean = max(1 / cost(0), log.tokens_per_s)
    _, gain = best_length(p, level_s, cost, n_max, (1 + log.others) * mean, log.others)
    active.hoped = gain
    first_s = active.record.first_s if active.record.first_s is not None else AT_ONCE * level_s
    rest = min(room, BUCKET // 2, log.n_tokens)  # half of what a draft model reads
    return gain >= GAIN and rest / mean * (1 - 1 / gain) > CAUTION * first_s


def note_draft(
    active: ActiveDrafter, plan: DraftPlan, seconds: float, gain_s: float, cost: Cost, *, greedy: bool
) -> None:
    """Note what the draft that was made by a plan took, and the seconds that the nodes chosen with it are worth."""
    record, n = active.record, len(active.draft)
    active.n_asked += 1
    active.asked_s += seconds
    if n and record.known is not None:
        record.known.note(max(active.draft.depths()), seconds)
    elif n:
        _note_time(record, seconds, plan.level_s, max(active.draft.depths()), active.missed)
    active.missed = 0
    if active.in_place:
        gain, others = gain_s / plan.token_s, plan.among_others
        active.judge(record.worth_of(greedy, plan.level_s), gain, seconds, plan.token_s, among_others=others)
    elif active.tries:
        lost_s = seconds + cost(n) - cost(0)
        record.trials.lost_s += lost_s
        record.trial_s += lost_s


def _may_try(active: ActiveDrafter, step_s: float, n_texts: int) -> bool:
    """Tell whether a trial goes on, or a new one of a few steps in a row is affordable; `step_s` is one step's cost.

    A trial takes several steps because the drafter first has to read the text that it missed.
    """
    record = active.record
    if active.trials == 0:
        price = max(TRIAL_STEPS * step_s + record.read_s * (active.missed or 0), record.trial_s)
        if not record.may_lose(price, active.share(n_texts), n_texts):
            return False
        active.trials, record.trial_s = TRIAL_STEPS, 0.0
    active.trials -= 1
    return True


def _note_time(record: DrafterRecord, seconds: float, level_s: float, n_levels: int, n_missed: int | None) -> None:
    """Note the seconds of a draft of `n_levels` tokens, before which `n_missed` tokens had to be read (None: a prompt).

    Where much had to be read, a level took less than its share of the time.
    """
    mine = seconds / n_levels
    if n_missed is not None and n_missed <= AT_ONCE:
        record.level_s = 0.8 * level_s + 0.2 * mine
        return
    record.level_s = min(level_s, mine)
    reading_s = max(0.0, seconds - n_levels * record.level_s)
    if n_missed is None:
        record.first_s = reading_s
    else:
        record.read_s = reading_s / n_missed

"""Is it worth it? The mathematics by which the scheduler decides, and what it knows of the worth of drafts.

**The score.** A step that verifies n nodes gives E = 1 + sum of P(path to a node is accepted) tokens, and others gain m
tokens by the same forward. It takes s seconds of drafting and T(n) seconds of forward. The scheduler maximises

    rate(n) = (m + E) / (s + T(n))        n = 0 is the plain step, with E = 1

over the sets of nodes (`draft_tree.best_part`) or, where nothing is drafted yet, over the lengths of a chain whose
tokens are accepted with the mean rate a, at o seconds a draft and l a token (`cost_curve.best_length`):

    rate(n) = (m + 1 + a + ... + a^n) / (o + n l + T(n))

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
What a drafter takes beside its drafts, as a head that reads the text along with the target, is lost as well where its
drafts do not repay it. Before a text is read, that loss is expected by what earlier texts took for each token read and
gained for each that came (`drafter_record.Followed`); once the share is spent, the head leaves the text alone.

A drafter rests for as long as its budget needs to grow: (lost + c - b t) / b seconds. If all of them rest, no step is
looked at in the meantime. To measure which rows are exact waits until drafts have promised as much as it takes, which
is at most twice the best possible (renting skis until they would have been paid for).

**What is known.** T(n) comes from the cost curve, P from the drafter's estimates, as corrected by what came
(`drafter.Calibration`). What g and c of a drafter are depends on the cost that it declares (`DraftCost`):

| cost | g | c |
|---|---|---|
| NOTHING | mean of earlier drafts: own right tokens, less what verifying them took | mean: asking, teaching |
| CALLS | mean of earlier drafts: what the step gained by them | mean: drafting |
| TARGET | the best length of a chain at the mean rate a | o, l for each token, and T(n) |
| MODEL | the same; before its first draft: over the rest of the text | the same, and reading what it missed |

The means are `drafter_record.Worth`, apart for steps in which other drafters propose something: a drafter that may be
asked before any step brings now more, now less, so its rate a says little. A model that has to read the text first is
asked in several steps or not at all, and a trial of it takes TRIAL_STEPS steps.
"""

from dataclasses import dataclass

from edgedec.cost_curve import Cost, DraftPrice, best_length
from edgedec.draft_constants import AT_ONCE, BUCKET, CAUTION, FIRST, GAIN, TRIAL_STEPS
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.decision_log import DecisionLog
from edgedec.scheduler.draft_tree import Choice, Gain
from edgedec.scheduler.drafter_record import DrafterRecord, DraftSeconds


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How a costly drafter is asked before one step.

    Attributes:
        n_max: Most nodes.
        price: Seconds that the draft is expected to take.
        least_path: Path probability below which a node does not pay.
        extra_s: Seconds that the drafter may take beyond the usual deadline.
    """

    n_max: int
    price: DraftPrice
    least_path: float = 0.0
    extra_s: float = 0.0


def plan_draft(active: ActiveDrafter, log: DecisionLog, choice: Choice) -> DraftPlan | None:
    """Return how to ask a costly drafter now, None where its draft would not pay.

    `log` is what the generation has decided so far, `choice` what is chosen of the other drafters' proposals.
    """
    record, cost, n_max = active.record, choice.cost, choice.n_max
    price = record.price or DraftPrice(cost(0) / 4)  # a quarter of a step for each level where nothing says
    if active.in_place:
        record.draft_seconds = record.draft_seconds or DraftSeconds(price)
        return _plan_known(active, record.draft_seconds.price, choice)
    p, rate = record.rate(active.greedy), choice.expected.rate
    always, others = choice.options.always, choice.curve.others
    if active.cost is DraftCost.TARGET:
        active.missed = 0
    if active.missed is None and not always and not _pays_to_read(active, log, p, price, choice):
        return None
    length, gain = best_length(p, price, cost, n_max, rate, others)
    pays = always or gain >= GAIN
    if not pays:
        length = min(2, n_max)
    step_s = price.of(length) + cost(length) - cost(0)
    loss_s = TRIAL_STEPS * step_s + record.read_s * (active.missed or 0)
    if not active.may_ask(pays, loss_s, choice.curve.n_texts, TRIAL_STEPS):
        return None
    extra_s = 2 * price.of(length) if active.cost is DraftCost.TARGET else 0.0
    if always:
        return DraftPlan(n_max, price, extra_s=extra_s)
    marginal = _least_gain(price, cost, length, rate * max(gain, 1.0))
    least_path = min(max(marginal, p ** (length - 0.1)), p ** (length - 1))
    return DraftPlan(min(n_max, 2 * length), price, least_path, extra_s)


def _plan_known(active: ActiveDrafter, price: DraftPrice, choice: Choice) -> DraftPlan | None:
    """Return how to ask a drafter that has read the text already, None where its draft would not pay.

    Its chain ends by its own probabilities, the next of which is about its mean acceptance.
    """
    cost, n_max, n_texts = choice.cost, choice.n_max, choice.curve.n_texts
    active.worth.price_s = active.worth.price_s or price.of(1)
    if choice.options.always:
        return DraftPlan(n_max, price)
    if not active.is_due(cost(0) / n_texts, n_texts, among_others=bool(choice.nodes)):
        return None
    p, rate = active.record.rate(active.greedy), choice.expected.rate
    length, gain = best_length(p, price, cost, n_max, rate, choice.curve.others)
    rate *= max(gain, 1.0)
    least = max(_least_gain(price, cost, length, rate), (price.level + _row_behind(cost, length, n_max)) * rate)
    return DraftPlan(n_max, price, min(1.0, least / max(p, 0.01)))


def _least_gain(price: DraftPrice, cost: Cost, length: int, rate: float) -> float:
    """Return the tokens that one level more must add to pay, where chains of `length` levels give `rate` tokens/s."""
    return (price.level + (cost(length) - cost(0)) / length) * rate


def _row_behind(cost: Cost, length: int, n_max: int) -> float:
    """Return the seconds of a row more than `length`, at best: rows behind a whole group of the kernels' cost more."""
    whole_s, end = cost(length), min(n_max, length + FIRST)
    return min([(cost(n) - whole_s) / (n - length) for n in range(length + 1, end + 1)], default=0.0)


def _pays_to_read(active: ActiveDrafter, log: DecisionLog, p: float, price: DraftPrice, choice: Choice) -> bool:
    """Tell whether the rest of the text is likely to repay the time that reading its beginning takes.

    The first steps show how fast the cheap drafters make the text. The text is expected to double its length. Other
    requests wait for the reading and for each draft, so what counts is how much faster all of them become. `p` is
    P(a node is accepted | its parent was accepted).
    """
    if log.n_steps < FIRST:
        return False
    cost, others = choice.cost, choice.curve.others
    mean = max(1 / cost(0), log.tokens_per_s)
    _, gain = best_length(p, price, cost, choice.n_max, (1 + others) * mean, others)
    active.hoped = gain
    first_s = active.record.first_s if active.record.first_s is not None else AT_ONCE * price.level
    rest = min(choice.room, BUCKET // 2, log.n_tokens)  # half of what a draft model reads
    return gain >= GAIN and rest / mean * (1 - 1 / gain) > CAUTION * first_s


def note_draft(
    active: ActiveDrafter, plan: DraftPlan, seconds: float, gain: Gain, choice: Choice, *, among_others: bool
) -> None:
    """Note what a draft took, and what it is expected to be worth.

    Args:
        active: The drafter.
        plan: How it was asked.
        seconds: What the draft took.
        gain: What the nodes chosen with the draft are expected to gain, beyond those chosen before.
        choice: What was chosen with it.
        among_others: Whether nodes of other drafters were chosen before.
    """
    record, n, cost = active.record, len(active.draft.tokens), choice.cost
    active.n_asked += 1
    active.asked_s += seconds
    if n and record.draft_seconds is not None:
        record.draft_seconds.note(max(active.draft.depths()), seconds)
    elif n:
        _note_time(record, seconds, plan.price, max(active.draft.depths()), active.missed)
    active.missed = 0
    if active.in_place:
        active.gain, active.ask_s, active.among_others = gain, seconds, among_others
    elif active.tries:
        lost_s = seconds + cost(n) - cost(0)
        record.trials.lost_s += lost_s
        record.trial_s += lost_s


def _note_time(record: DrafterRecord, seconds: float, price: DraftPrice, n_levels: int, n_missed: int | None) -> None:
    """Note the seconds of a draft of `n_levels` tokens, before which `n_missed` tokens had to be read (None: a prompt).

    Where much had to be read, a level took less than its share of the time.
    """
    mine = (seconds - price.once) / n_levels
    if n_missed is not None and n_missed <= AT_ONCE:
        record.price = DraftPrice(0.8 * price.level + 0.2 * mine, price.once)
        return
    record.price = DraftPrice(min(price.level, mine), price.once)
    reading_s = max(0.0, seconds - record.price.of(n_levels))
    if n_missed is None:
        record.first_s = reading_s
    else:
        record.read_s = reading_s / n_missed

"""The scheduler, in simulated generations: near the best fixed choice, never far below plain, always the same text."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.simulation import Clock, Oracle, Run, a_text, best_fixed, decode, member, policy_of
from support.decoding.stub_drafter import StubDrafter

from edgedec.cost_curve import CostCurve
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.sessions.cost_probe import measuring_s
from edgedec.stats import DecodeStats

JAGGED = [1, 1.6, 1.7, 1.2, 1.9, 2, 2.1, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5]


def jagged(n: int) -> float:
    """Return the seconds of n rows where four are cheaper than three, and eight than seven."""
    return 0.01 * JAGGED[n - 1]


def flat(n: int) -> float:
    """Return them where a row adds next to nothing."""
    return 0.01 * (1 + 0.02 * (n - 1))


def in_proportion(n: int) -> float:
    """Return them where rows cost what they cost alone."""
    return 0.01 * n


CURVES = {"jagged": jagged, "flat": flat, "in proportion": in_proportion}


def curve_of(name: str) -> CostCurve:
    """Return the curve as measured at load."""
    return CostCurve({n: CURVES[name](n) for n in (1, 2, 4, 8, 16)})


def simulated(
    name: str, oracle: Oracle, clock: Clock, *, costly: bool = False, record: DrafterRecord | None = None
) -> Run:
    """Decode the oracle's text."""
    curve = curve_of(name)
    policy = policy_of([member(oracle, costly=costly, record=record)], curve)
    run = decode(policy, oracle.text, curve, CURVES[name], clock)
    assert run.token_ids == list(oracle.text)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "says"), [*((p, None) for p in (0.02, 0.2, 0.5, 0.8, 0.95)), (0.2, 0.9), (0.8, 0.1), (0.5, 0.9), (0.5, 0.1)]
)
@pytest.mark.parametrize("name", CURVES)
def test_a_cheap_drafter_comes_near_the_best_fixed_choice(
    name: str, p: float, says: float | None, clock: Clock
) -> None:
    """Within 7 % (a draft of 15 is a matter of luck), and never 1 % below plain, whatever the drafter claims."""
    run = simulated(name, Oracle(a_text(3000), p, says, rng=np.random.default_rng(3)), clock)
    assert run.rate >= 0.93 * best_fixed(p, CURVES[name])
    assert run.rate >= 0.99 / CURVES[name](1)


def test_where_rows_cost_their_full_price_next_to_nothing_is_verified(clock: Clock) -> None:
    """Not even what is right nineteen times of twenty, but for trials of what rows cost; the reason says so."""
    curve = curve_of("in proportion")
    policy = policy_of([member(Oracle(a_text(200), 0.95))], curve)
    run = decode(policy, a_text(200), curve, in_proportion, clock)
    tried = sum(map(bool, run.drafted))
    assert tried <= 10
    assert run.seconds <= 200 * in_proportion(1) * 1.02
    assert policy.explain()[0].startswith(f"drafted in {tried} of ")


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.6, 0.9])
@pytest.mark.parametrize("seen", [(1,), (1, 2), (1, 2, 4, 8, 16)])
def test_a_curve_measured_at_a_bad_moment_is_put_right(seen: Sequence[int], p: float, clock: Clock) -> None:
    """Cut short, as the machine is slow, or wrong: what seems too dear is verified now and then, and timed."""
    curve, text = CostCurve({n: in_proportion(n) for n in seen}), a_text(3000)
    run = decode(policy_of([member(Oracle(text, p))], curve), text, curve, flat, clock)
    assert run.rate >= 0.65 * best_fixed(p, flat) >= 1.4 / flat(1)
    if len(seen) < 3:
        assert any(run.drafted[:3])


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seen", [(1,), (1, 2), (1, 2, 4, 8, 16)])
def test_putting_a_curve_right_costs_little_where_it_is_right(seen: Sequence[int], p: float, clock: Clock) -> None:
    """Half a per cent of the time, and two steps where more rows were never timed."""
    curve, text = CostCurve({n: in_proportion(n) for n in seen}), a_text(1500)
    run = decode(policy_of([member(Oracle(text, p))], curve), text, curve, in_proportion, clock)
    assert run.seconds <= 1.006 * 1500 * in_proportion(1) + 5 * in_proportion(1)


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.5, 30.0])
def test_a_disturbed_trial_is_not_the_last(late_s: float, clock: Clock) -> None:
    """The first draft takes long, as a kernel is compiled for it, or the process was stopped."""
    left = [late_s]

    def now(n: int) -> float:
        return flat(n) + (left.pop() if n > 1 and left else 0.0)

    curve, text = CostCurve({n: in_proportion(n) for n in (1, 2, 4, 8, 16)}), a_text(3000)
    run = decode(policy_of([member(Oracle(text, 0.9))], curve), text, curve, now, clock)
    assert sum(map(bool, run.drafted[-100:])) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_drafts_end_where_they_stop_to_pay_whatever_the_machine_does(factor: float, clock: Clock) -> None:
    """The machine throttles while drafts of all lengths are made, then none is right any more."""

    @dataclass(slots=True)
    class Failing(Oracle):
        def propose(self, n_max: int, deadline_s: float) -> Draft:
            self.p = 0.9 if self.position < 3000 else 0.05
            self.depth = int(self.rng.integers(3, 12))
            return Oracle.propose(self, n_max, deadline_s)

    done = [0]

    def now(n: int) -> float:
        done[0] += 1
        return (
            (0.003 + flat(n)) * (factor if done[0] > 300 else 1) if n > 1 else 0.01 * (factor if done[0] > 300 else 1)
        )

    curve, text = CostCurve({n: 0.003 * (n > 1) + flat(n) for n in (1, 2, 4, 8, 16)}), a_text(9000)
    run = decode(policy_of([member(Failing(text, 0.9))], curve), text, curve, now, clock)
    assert sum(map(bool, run.drafted[:300])) > 250
    assert sum(map(bool, run.drafted[-4000:])) < 40


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.2, 0.3, 0.5])
def test_long_contexts_where_rows_cost_more_than_at_load_do_not_mislead(p: float, clock: Clock) -> None:
    """Plain steps are timed again now and then: a curve that is wrong for them would never be put right."""

    def now(n: int) -> float:
        return jagged(n) + 0.003 * n

    curve, text = curve_of("jagged"), a_text(4000)
    run = decode(policy_of([member(Oracle(text, p))], curve), text, curve, now, clock)
    assert run.rate >= 0.98 / now(1)


@pytest.mark.parametrize("n_before", [16_000, 32_000])
@pytest.mark.parametrize("p", [0.05, 0.2, 0.4, 0.9])
def test_a_short_text_behind_a_long_prompt_is_never_slow(p: float, n_before: int, clock: Clock) -> None:
    """The curve was measured behind few tokens; there, attention takes as long as the weights, and grows by rows."""

    def now(n: int) -> float:
        return flat(n) + flat(1) * n_before / 16_000 * (0.6 + 0.4 * n)

    text = a_text(64)
    for seed in range(4):
        oracle, curve = Oracle(text, p, min(0.98, p + 0.3), rng=np.random.default_rng(seed)), curve_of("flat")
        run = decode(policy_of([member(oracle)], curve), text, curve, now, clock, n_before=n_before)
        assert run.rate >= (0.97 if p < 0.9 else 1.3) / now(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "level_s"), [(0.05, 0.001), (0.05, 0.006), (0.3, 0.003), (0.6, 0.001), (0.6, 0.006), (0.9, 0.003)]
)
@pytest.mark.parametrize("name", ["jagged", "flat"])
def test_a_costly_drafter_never_costs_more_than_it_may(name: str, p: float, level_s: float, clock: Clock) -> None:
    """Finding out costs 1 % of the time; where it pays, most of what it can bring is had."""
    record = DrafterRecord()
    oracle = Oracle(a_text(6000), p, clock=clock, level_s=level_s)
    run = simulated(name, oracle, clock, costly=True, record=record)
    assert record.trials.lost_s <= 0.011 * clock.now
    assert run.rate >= 0.98 / CURVES[name](1)
    assert run.rate >= 0.85 * best_fixed(p, CURVES[name], level_s)


@pytest.mark.slow
@pytest.mark.parametrize("level_s", [0.001, 0.003])
def test_a_costly_drafter_is_taken_up_when_it_begins_to_pay(level_s: float, clock: Clock) -> None:
    """Within 1,500 tokens, in the middle of a text."""

    @dataclass(slots=True)
    class Improving(Oracle):
        def propose(self, n_max: int, deadline_s: float) -> Draft:
            self.p = 0.9 if self.position >= 3000 else 0.05
            return Oracle.propose(self, n_max, deadline_s)

    text = a_text(6000)
    run = simulated("flat", Improving(text, 0.05, clock=clock, level_s=level_s), clock, costly=True)
    assert sum(run.drafted[:2900]) < 200
    assert sum(map(bool, run.drafted[-200:])) >= 195


@pytest.mark.slow
def test_the_share_of_time_for_trials_outlives_a_request(clock: Clock) -> None:
    """A hundred short texts with a useless draft model together lose 1 % and its first trial."""
    record, seconds = DrafterRecord(), 0.0
    text = a_text(60)
    for seed in range(100):
        oracle = Oracle(text, 0.02, clock=clock, level_s=0.005, rng=np.random.default_rng(seed))
        oracle.read = -300  # the prompt
        seconds += simulated("flat", oracle, clock, costly=True, record=record).seconds
    assert record.trials.lost_s <= 0.01 * seconds + 0.5


def test_shadow_scoring_judges_what_was_never_verified(clock: Clock) -> None:
    """Estimates are put right by the text alone: a drafter that says 0.01 and is right is used in the end."""
    run = simulated("flat", Oracle(a_text(400), 0.95, says=0.01), clock)
    assert run.drafted[0] == 0
    assert all(run.drafted[-20:-2])


@pytest.mark.parametrize("greedy", [True, False])
def test_greedy_and_sampled_texts_are_judged_apart(greedy: bool, clock: Clock) -> None:
    """What is seen of one changes nothing for the other."""
    record, fresh, text = DrafterRecord(), DrafterRecord(), a_text(300)
    oracle = Oracle(text, 0.02, says=0.85, clock=clock, level_s=0.001)
    curve = curve_of("flat")
    written = member(oracle, costly=True, record=record, greedy=greedy)
    decode(policy_of([written], curve), text, curve, flat, clock)
    assert record.rate(greedy) < 0.6
    assert record.rate(not greedy) == fresh.rate(not greedy)
    assert record.calibration[greedy].corrected(0.85) < 0.6
    assert record.calibration[not greedy].corrected(0.85) == 0.85


@dataclass(slots=True)
class Told(StubDrafter):
    """A drafter that proposes what it is given and notes what it is told.

    Attributes:
        drafts: What it proposes, one after the other, and then nothing.
        told: What came of them.
    """

    drafts: list[Draft]
    told: list[Verification] = field(default_factory=list)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose the next one."""
        return self.drafts.pop(0) if self.drafts else EMPTY_DRAFT

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Note the outcome."""
        self.told.append(verification)


def one(draft: Draft, name: str = "one") -> ActiveDrafter:
    """Return a member that proposes one draft."""
    return ActiveDrafter(name, Told([draft]), DrafterRecord())


def told(member: ActiveDrafter) -> list[Verification]:
    """Return what its drafter was told."""
    assert isinstance(member.drafter, Told)
    return member.drafter.told


def test_a_step_without_proposals_scores_none() -> None:
    """The last token of a text is not asked for: the draft before it is not judged twice."""
    stats, member = DecodeStats(), one(Draft.chain([5, 6], 0.5))
    policy = policy_of([member], CostCurve(), always=True)
    policy.learn(stats, policy.propose(stats, 0, 9), Verification((0, 1), (5, 6, 7)), {})
    before = dict(stats.drafters["one"])
    policy.learn(stats, EMPTY_DRAFT, Verification((), (9,)), {})
    assert stats.drafters["one"] == before
    assert before["tried"] == before["right"] == 2
    assert [outcome.path for outcome in told(member)] == [(0, 1), ()]


def test_each_drafter_is_told_of_its_own_nodes() -> None:
    """Those that are the text, at most all but the step's last token; of two siblings alike the first."""
    stats = DecodeStats()
    a = one(Draft.tree([5, 5, 6, 7], [-1, -1, 1, 0], [0.5] * 4), "a")
    b = one(Draft.tree([4, 5, 6, 7], [-1, -1, 1, 2], [0.5] * 4), "b")
    policy = policy_of([a, b], CostCurve(), always=True)
    policy.propose(stats, 0, 9)
    policy.learn(stats, EMPTY_DRAFT, Verification((), (5, 6)), {})
    assert told(a)[0].path == (0,)
    assert told(b)[0].path == (1,)
    assert told(b)[0].token_ids == (5, 6)


def test_a_runtime_without_trees_gets_the_best_chain_of_one() -> None:
    """The drafter is not at fault: it stays."""
    stats = DecodeStats()
    for always in (False, True):
        member = one(Draft.tree([1, 2, 3], [-1, -1, 1], [0.2, 0.8, 0.9]))
        policy = policy_of([member], curve_of("flat"), trees=False, always=always)
        draft = policy.propose(stats, 0, 9)
        assert draft.is_chain
        assert list(draft.tokens) == [2, 3]
    assert stats.reasons == []


def test_pinned_drafters_share_the_rows_by_what_they_promise() -> None:
    """The first one's many improbable nodes do not crowd out the second one's."""
    many = one(Draft.tree(list(range(9)), [-1] * 9, [0.01] * 9), "many")
    sure = one(Draft.chain([50, 51], 0.8), "sure")
    draft = policy_of([many, sure], CostCurve(), always=True).propose(DecodeStats(), 0, 3)
    assert draft.tokens == (50, 51, 0)


def test_a_pinned_draft_reaches_verification_as_it_was_made() -> None:
    """With the distributions that its tokens were drawn from."""
    draft = replace(Draft.chain([1, 2], 0.1), q=(None, None))
    assert policy_of([one(draft)], CostCurve(), always=True).propose(DecodeStats(), 0, 9) is draft


@pytest.mark.usefixtures("clock")
def test_a_curve_that_knows_nothing_decodes_plainly() -> None:
    """Rows of unknown cost are taken to cost what single ones do."""
    assert len(policy_of([one(Draft.chain([1], 0.99))], CostCurve()).propose(DecodeStats(), 0, 9)) == 0


@pytest.mark.parametrize("n_max", [0, 1, 2, 3, 15])
def test_never_more_nodes_than_there_is_room_for(n_max: int) -> None:
    """Whatever is proposed, the session's room decides, and what explains it does not stumble over it."""
    stats = DecodeStats()
    for always in (False, True):
        members = [one(Draft.tree([i] * 6, [-1, *range(5)], [0.9] * 6), str(i)) for i in range(3)]
        policy = policy_of(members, curve_of("flat"), always=always)
        assert len(policy.propose(stats, 0, n_max)) <= n_max
        policy.explain()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("always", [False, True])
def test_the_text_is_the_same_with_any_drafters(seed: int, always: bool) -> None:
    """Three at once, right at random, of random depth, costly or not, on a random curve."""
    rng, clock, text = np.random.default_rng(seed), Clock(), a_text(150)
    curve = CostCurve({n: float(rng.uniform(1, 2)) for n in (1, 3, 9, 16)})
    members = []
    for i in range(3):
        oracle = Oracle(text, rng.uniform(), says=rng.uniform(), clock=clock, depth=int(rng.integers(1, 15)), rng=rng)
        cost = DraftCost.MODEL if rng.integers(2) else DraftCost.NOTHING
        members.append(ActiveDrafter(str(i), oracle, DrafterRecord(), cost))
    run = decode(policy_of(members, curve, always=always), text, curve, lambda n: float(rng.uniform(1, 2)), clock)
    assert run.token_ids == text
    assert run.stats.reasons == []


@pytest.mark.parametrize("p", [0.0, 0.95])
def test_what_a_draft_model_was_asked_and_used_for_is_counted(clock: Clock, p: float) -> None:
    """What is said of a draft model, and whether it is said to be of no use, is what happened."""
    text = a_text(400)
    oracle = Oracle(text, p, 0.9, clock=clock, level_s=0.01)
    costly = member(oracle, costly=True)
    costly.model = lambda: "the draft model X (700.0 MB)"
    curve = CostCurve(dict.fromkeys((1, 2, 4, 8, 16), 0.1))
    policy = policy_of([costly], curve)
    run = decode(policy, text, curve, lambda n: 0.1, clock)
    assert costly.n_asked == oracle.n_asked > 0
    assert sum(n > 0 for n in run.drafted) > 0
    assert (costly.n_used > 0) == (len(run.drafted) < len(text)) == (p > 0)
    said = f"oracle: the draft model X (700.0 MB) was asked {oracle.n_asked} times, "
    assert policy.explain()[1].startswith(said)
    assert policy.unused() == ([] if costly.n_used else [policy.explain()[1]])


class Costly(Oracle):
    """An oracle that is never right and takes a tenth of a step; it keeps what it learned, and when it was asked."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose a wrong token."""
        self.n_asked += 1
        self.clock.now += 0.001
        return Draft.chain([0], 0.02)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Compare with the text."""
        assert verification.token_ids == tuple(self.text[self.position : self.position + len(verification.token_ids)])
        self.position += len(verification.token_ids)


def test_a_cheap_drafter_that_takes_more_than_it_brings_rests_and_learns_later(clock: Clock) -> None:
    """Its trials keep to their share of the time then; in the end it has learned every token, in order."""
    text = [1] * 400
    drafter = Costly(text, 0.0, clock=clock)
    policy, stats = policy_of([member(drafter)], CostCurve({1: 0.010, 2: 0.010})), DecodeStats()
    for _ in text:
        draft = policy.propose(stats, 0, 8)
        policy.learn(stats, draft, Verification((), (1,)), {})
    assert drafter.n_asked < 400 / 8 + 60
    assert drafter.position < 400
    policy.close()
    assert drafter.position == 400


def steps_before_measuring(p: float, n_steps: int, curve: CostCurve) -> int | None:
    """Return how many drafts were turned down before it pays to measure their rows; None if it never does."""
    text = a_text(n_steps + 40)
    policy, stats, n_turned_down = policy_of([member(Oracle(text, p))], curve), DecodeStats(), 0
    for n_past, token in enumerate(text[:n_steps]):
        draft = policy.propose(stats, n_past, 30)
        if draft.tokens:
            if policy.pays_to_measure(measuring_s(1 + len(draft), curve.cost(n_past))):
                return n_turned_down
            n_turned_down += 1
        policy.learn(stats, EMPTY_DRAFT, Verification((), (token,)), {})
    return None


@pytest.mark.usefixtures("clock")
def test_exact_rows_are_measured_once_drafts_promised_what_it_takes() -> None:
    """Soon where they are good, never in a text where they are not; what one text promised counts in the next."""
    assert steps_before_measuring(0.05, 300, curve_of("in proportion")) is None
    good = steps_before_measuring(0.95, 300, curve_of("flat"))
    assert good is not None
    assert 1 <= good <= 12
    curve = curve_of("flat")
    assert steps_before_measuring(0.95, good, curve) is None
    assert curve.trials.promised_s > 0
    later = steps_before_measuring(0.95, 300, curve)
    assert later is not None
    assert later < good
    assert curve.trials.promised_s == 0


def test_a_pinned_drafter_does_not_wait() -> None:
    """What it proposes is verified, whatever that costs."""
    policy = policy_of([member(Oracle(a_text(40), 0.1))], curve_of("in proportion"), always=True)
    assert len(policy.propose(DecodeStats(), 0, 30)) > 0
    assert policy.pays_to_measure(1e9)


def test_a_costly_drafter_learns_every_token_in_order_asked_or_not(clock: Clock) -> None:
    """Those of the first step, before which nobody is asked, too."""

    @dataclass(slots=True)
    class Ordered(Oracle):
        learned: list[int] = field(default_factory=list)

        def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
            self.learned += verification.token_ids
            Oracle.learn(self, verification, hidden)

    text, stats = a_text(60), DecodeStats()
    drafter = Ordered(text, 0.5, clock=clock, level_s=0.001)
    policy = policy_of([member(drafter, costly=True)], curve_of("flat"))
    for i, token in enumerate(text):
        draft = policy.propose(stats, i, 60) if i else EMPTY_DRAFT
        policy.learn(stats, draft, Verification((), (token,)), {})
    policy.close()
    assert drafter.n_asked > 0
    assert drafter.learned == text


def test_without_room_nobody_is_asked_and_nobody_is_judged(clock: Clock) -> None:
    """The last step of a text, or a context in which no two rows have the bits of single steps."""
    text, stats = a_text(60), DecodeStats()
    active = member(Oracle(text, 0.9, clock=clock))
    policy = policy_of([active], curve_of("flat"))
    policy.learn(stats, policy.propose(stats, 0, 15), Verification((), (text[0],)), {})
    assert active.asked
    known, n_asked = deepcopy(active.worth), active.n_asked
    for i in range(1, 20):
        draft = policy.propose(stats, i, 0)
        assert not draft.tokens
        assert not active.asked
        policy.learn(stats, draft, Verification((), (text[i],)), {})
    assert active.worth == known
    assert active.n_asked == n_asked
    assert active.record.trials.lost_s == 0.0


def test_a_draft_that_a_step_leaves_out_counts_at_the_price_that_was_expected(clock: Clock) -> None:
    """Its rows are not known to be exact, say: right or wrong, it is no free draft."""
    text, stats, curve = a_text(60), DecodeStats(), curve_of("flat")
    active = member(Oracle(text, 0.9, clock=clock))
    policy = policy_of([active], curve)
    draft = policy.propose(stats, 0, 15)
    n_nodes = len(draft.tokens)
    assert n_nodes > 1
    policy.learn(stats, EMPTY_DRAFT, Verification((), (text[0],)), {})
    assert active.worth.gains[0] == pytest.approx(1 - (flat(1 + n_nodes) / flat(1)))

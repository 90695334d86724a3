"""How a trained head is asked: as long as its next token pays, and with what other requests gain."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from support.decoding.simulation import N_VOCAB, Clock, Oracle, a_text, decode, policy_of

from edgedec.cost_curve import CostCurve, DraftPrice, SharedForward
from edgedec.draft import Draft
from edgedec.drafter import Calibration, Drafter
from edgedec.drafter_traits import DraftCost
from edgedec.drafters.head import HeadDrafter
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.decision_log import DecisionLog
from edgedec.scheduler.draft_tree import Choice, Expected, Gain, PolicyOptions
from edgedec.scheduler.drafter_record import DrafterRecord, DraftSeconds, Worth
from edgedec.scheduler.estimator import plan_draft


def cost(n_nodes: int) -> float:
    """Return the seconds of a forward: 1, and 0.25 for each node."""
    return 1 + 0.25 * n_nodes


def seconds(n_rows: int) -> float:
    """Return the seconds of a forward by its rows."""
    return cost(n_rows - 1)


def a_curve() -> CostCurve:
    """Return the curve of these costs."""
    return CostCurve({n: seconds(n) for n in range(1, 17)})


def active(drafter: Drafter, record: DrafterRecord) -> ActiveDrafter:
    """Return a drafter that has read the text already."""
    return ActiveDrafter("head", drafter, record, DraftCost.CALLS)


@dataclass(slots=True)
class Sure(Oracle):
    """Is sure of every third token, right in it, and nearly always wrong in the others."""

    first_s: float = 0.0

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return a chain that ends where the path is too improbable."""
        self.n_asked += 1
        tokens, says, path = list[int](), list[float](), 1.0
        while len(tokens) < min(n_max, len(self.text) - self.position):
            at = self.position + len(tokens)
            p = 0.98 if at % 3 == 0 else 0.05
            tokens.append((self.text[at] + int(self.rng.random() > p)) % N_VOCAB)
            says.append(p)
            path *= p
            if path < self.floor.path_probability:
                break
        self.clock.now += len(tokens) * self.level_s + (self.first_s if self.n_asked == 1 else 0.0)
        return Draft.tree(tokens, range(-1, len(tokens) - 1), says)


def least_path(price: DraftPrice, p: float) -> float:
    """Return the chance below which a chain ends, of a drafter that is right with that chance."""
    record = DrafterRecord(price=price, offered=[100.0, 100.0], accepted=[100 * p, 100 * p])
    choice = Choice(CostCurve(), PolicyOptions(8), cost, 8, 100)
    plan = plan_draft(active(Oracle([], p), record), DecisionLog(), choice)
    assert plan is not None
    return plan.least_path


@pytest.mark.parametrize(("level", "once", "p"), [(0.05, 0.0, 0.5), (0.01, 0.3, 0.8)])
def test_the_chain_ends_where_the_next_token_is_not_expected_to_pay(level: float, once: float, p: float) -> None:
    """A token more must gain, with the chance of its path and its own, what drafting and verifying it takes.

    What was paid for a block makes its chain longer, not shorter.
    """
    chain_s = [cost(n) + once + level * n for n in range(1, 9)]
    gain = max(sum(p**i for i in range(n + 1)) / chain_s[n - 1] for n in range(1, 9))
    found = least_path(DraftPrice(level, once=once), p)
    assert found == pytest.approx((level + 0.25) * gain / p)
    if once:
        assert found < least_path(DraftPrice(level), p) < least_path(DraftPrice(level + once / 5), p)


def test_what_drafts_take_is_learned_in_two_parts() -> None:
    """Drafts that all have as many levels scale what was expected; a line through others tells the two parts apart."""
    seconds = DraftSeconds(DraftPrice(0.002, once=0.016))
    for _ in range(200):
        seconds.note(7, 0.060)
    assert seconds.price.of(7) == pytest.approx(0.060, rel=1e-3)
    assert seconds.price.once / seconds.price.level == pytest.approx(8.0)
    for n in range(400):
        seconds.note(1 + n % 7, 0.020 + 0.001 * (1 + n % 7))
    assert (seconds.price.once, seconds.price.level) == pytest.approx((0.020, 0.001), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("first_s", [0.0, 2.0])
def test_a_head_that_is_sure_now_and_then_is_asked_at_every_step(first_s: float, clock: Clock) -> None:
    """Its mean acceptance would not pay for a node; a first call that takes forty times as long changes nothing."""
    text, curve = a_text(3000), a_curve()
    sure = Sure(text, 0.36, clock=clock, level_s=0.05, first_s=first_s)
    run = decode(policy_of([active(sure, DrafterRecord(price=DraftPrice(0.05)))], curve), text, curve, seconds, clock)
    assert sure.n_asked >= 0.97 * len(run.drafted)
    assert run.rate > 1.15
    assert set(run.drafted) <= {0, 1, 2}


def test_a_head_that_accepts_next_to_nothing_is_tried_only(clock: Clock) -> None:
    """Where nothing is gained, a head is asked in trials, whose share of the time is bounded."""
    text, curve, record = a_text(4000), a_curve(), DrafterRecord(price=DraftPrice(0.1))
    poor = Oracle(text, 0.02, says=0.3, clock=clock, level_s=0.1)
    run = decode(policy_of([active(poor, record)], curve), text, curve, seconds, clock)
    assert 10 < poor.n_asked < 0.12 * len(run.drafted)
    assert record.trials.lost_s <= 0.011 * clock.now
    assert run.rate >= 0.97


@pytest.mark.slow
def test_a_head_is_taken_up_again_when_it_begins_to_pay(clock: Clock) -> None:
    """Within some hundred tokens, by what the trials are worth."""

    @dataclass(slots=True)
    class Improving(Oracle):
        def propose(self, n_max: int, deadline_s: float) -> Draft:
            self.p, self.read = 0.8 if self.position >= 2000 else 0.02, self.position
            return Oracle.propose(self, n_max, deadline_s)

    text, curve = a_text(4000), a_curve()
    head = active(Improving(text, 0.02, clock=clock, level_s=0.1), DrafterRecord(price=DraftPrice(0.1)))
    run = decode(policy_of([head], curve), text, curve, seconds, clock)
    assert sum(map(bool, run.drafted[:1900])) < 200
    assert sum(map(bool, run.drafted[-200:])) >= 190


def test_a_head_is_judged_apart_where_others_propose() -> None:
    """Drafts that are worth nothing beside copied text stay worth their time where nothing is copied."""
    worth = Worth(0.1)
    for _ in range(20):
        worth.note(0.5, 0.1, among_others=False, is_trial=False)
        worth.note(0.0, 0.1, among_others=True, is_trial=False)
    assert worth.pays(1.0, among_others=False)
    assert not worth.pays(1.0, among_others=True)


def test_a_draft_is_worth_what_its_step_gave() -> None:
    """Two tokens more in a forward that took 0.4 longer; one that took ten times as long counts as 1.5 times.

    With two more requests in the forward, a node that costs a quarter of it gains less than it loses them.
    """
    gain = Gain(Expected(0, 1.0, 1.0), Expected(2, 2.2, 1.4), 1.0, 0.1)
    assert gain.seconds(3, 1.4) == pytest.approx(2 - 0.4 - 0.1)
    assert gain.seconds(1, 1.4) == pytest.approx(-0.5)
    assert gain.seconds(1, 14.0) == gain.seconds(1, 2.1) == pytest.approx(-1.2)
    assert Gain(Expected(0, 1.0, 1.0), Expected(1, 1.6, 1.25), 1.0, 0.0).expected_s == pytest.approx(0.35)
    assert Gain(Expected(0, 3.0, 1.0), Expected(1, 3.6, 1.25), 3.0, 0.0).expected_s == pytest.approx(-0.05)


class Believing(Calibration):
    """Takes all estimates as they are."""

    def observe(self, p: float, accepted: bool) -> None:
        """Learn nothing."""


@pytest.mark.slow
def test_a_head_that_promises_more_than_comes_is_tried_only(clock: Clock) -> None:
    """Where each draft is expected to gain by the head's own estimates, and loses, it is judged by what came."""
    text, curve = a_text(3000), a_curve()
    record = DrafterRecord(price=DraftPrice(0.1), calibration=(Believing(), Believing()))
    boaster = Oracle(text, 0.3, says=0.9, clock=clock, level_s=0.1)
    run = decode(policy_of([active(boaster, record)], curve), text, curve, seconds, clock)
    assert boaster.n_asked < 0.15 * len(run.drafted)
    assert run.rate >= 0.97


def test_what_passes_beside_the_calls_is_shared_like_the_calls() -> None:
    """All of the seconds count where nobody drafts along; with three others a quarter of what was waited for."""
    curve = CostCurve({1: 0.010, 4: 0.010})
    calls = [SharedForward(0.002, 4, 4)]
    drafter = cast(HeadDrafter, SimpleNamespace(calls=calls, own_s=0.0001))
    price = active(drafter, DrafterRecord())
    assert price.share_s(0.010, curve) == 0.010
    curve.others = 3.0
    assert price.share_s(0.010, curve) == pytest.approx(0.008 / 4 + 0.002 / 4)
    drafter.own_s = 0.005
    assert price.share_s(0.010, curve) == pytest.approx(0.005 + 0.002 / 4)
    calls[0] = SharedForward(0.002, 1, 1)
    assert price.share_s(0.010, curve) == pytest.approx(0.008 + 0.002 / 4)

"""T(n): bounds for what was not measured, refinement by real steps, and what must not spoil it."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.decoding.simulation import Clock, Oracle, a_text, member, policy_of

from edgedec.cost_curve import CostCurve
from edgedec.decoding.step import Decoder, step
from edgedec.draft import Draft
from edgedec.model import ExactRows, Forward, ForwardItem, Session
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams
from edgedec.sequence import Request, TextState
from edgedec.stats import DecodeStats

MEASURED = {1: 0.010, 2: 0.012, 4: 0.013, 8: 0.020}


def test_what_was_measured_at_load_bounds_what_was_not() -> None:
    """Rows may be padded to the next n; above all, they grow in proportion; more for less were measured undisturbed."""
    empty = CostCurve()
    assert (empty.seconds(1), empty.seconds(7, n_past=3000), empty.table()) == (None, None, {})
    assert empty.up_to(3) == [1.0, 2.0, 3.0]  # a row counts a second
    assert CostCurve({1: 0.5}).up_to(3) == [0.5, 1.0, 1.5]
    assert CostCurve(MEASURED).up_to(9) == [0.010, 0.012, 0.013, 0.013, *[0.020] * 4, pytest.approx(0.0225)]
    assert CostCurve({1: 0.5, 2: 0.012, 4: 0.011}).table() == {1: 0.011, 2: 0.011, 4: 0.011}


EIGHT = [(8, 0.030), (8, 0.032), (8, 0.031)]
BUSY = [(8, 0.060)] * 20
TWO = [(1, 0.010), (2, 0.011), (1, 0.010)] * 3


@pytest.mark.parametrize(
    ("measured", "steps", "expected"),
    [
        # Dearer steps count from the third on; the latest fifteen are remembered.
        (MEASURED, EIGHT[:1], {8: 0.020}),
        (MEASURED, EIGHT[:2], {8: 0.020}),
        (MEASURED, EIGHT, {8: 0.031}),
        (MEASURED, [*EIGHT, *[(8, 0.025)] * 15], {8: 0.025}),
        # An n that is dearer than the next one stays so, whatever was measured at load.
        (MEASURED, [(3, 0.019)] * 3, {1: 0.010, 2: 0.012, 3: 0.019, 4: 0.013}),
        # Where nothing was measured at load, three steps are enough to get over a first one that was suspended.
        ({}, [(1, 10.0), (1, 0.010), (1, 0.010)], {1: 0.010}),
        # However much slower the machine becomes for good, fifty steps later the curve says so.
        *((MEASURED, [(1, 0.010)] * 20 + [(1, n * 0.010)] * 50, {1: pytest.approx(n * 0.010)}) for n in (2, 5, 30)),
        # An n seen only while the machine was busy goes back to what was measured at load, and is then believed.
        (MEASURED, BUSY, {8: 0.060}),
        (MEASURED, [*BUSY, *[(1, 0.010)] * 1024], {8: pytest.approx(0.020, rel=0.1)}),
        (MEASURED, [*BUSY, *[(1, 0.010)] * 1024, *[(8, 0.021)] * 3], {8: pytest.approx(0.021, rel=0.05)}),
        # A bad measurement of four rows is bounded by two of two, once those are known; a recent step is believed.
        (
            {1: 0.010, 2: 0.020, 4: 0.040},
            TWO,
            {2: pytest.approx(0.011, rel=0.1), 3: pytest.approx(0.021, rel=0.1), 4: pytest.approx(0.022, rel=0.1)},
        ),
        ({1: 0.010, 2: 0.020, 4: 0.040}, [*TWO, *[(4, 0.030)] * 3], {4: pytest.approx(0.030)}),
        # Where single steps have become twice as long, so have those of eight rows.
        (MEASURED, [(1, 0.020)] * 1024, {8: pytest.approx(0.040, rel=0.1)}),
    ],
)
def test_real_steps_refine_what_was_measured(
    measured: dict[int, float], steps: list[tuple[int, float]], expected: dict[int, float]
) -> None:
    """As the table says."""
    curve = CostCurve(measured)
    for n_rows, seconds in steps:
        curve.observe(n_rows, seconds)
    assert {n: curve.seconds(n) for n in expected} == expected


@pytest.mark.parametrize("n_rows", [1, 3, 8, 12])
@pytest.mark.parametrize("n_before", [0, 1, 2, 3, 15])
def test_a_suspended_process_leaves_no_trace(n_rows: int, n_before: int) -> None:
    """A step a thousand times too long changes no n, whether measured at load, bounded or never seen."""
    curve = CostCurve(MEASURED)
    normal = curve.seconds(n_rows)
    assert normal is not None
    for _ in range(n_before):
        curve.observe(n_rows, normal)
    curve.observe(n_rows, 1000 * normal)
    curve.observe(n_rows, normal)
    curve.observe(n_rows, normal)
    assert curve.seconds(n_rows) == normal


def test_which_rows_were_ever_timed() -> None:
    """At load, or in a step of any context."""
    curve = CostCurve({1: 0.010, 4: 0.020})
    assert [curve.is_unknown(n) for n in (1, 4, 5)] == [False, False, True]
    curve.observe(5, 0.020, n_past=600)
    assert not curve.is_unknown(5)


def test_long_contexts_have_a_curve_of_their_own() -> None:
    """Buckets end at 512, 1024, 2048, ...; a new one begins with what the nearest says, unseen n follow those seen.

    What one row takes more is attention, behind 1,024 tokens at most a quarter; each further row takes two fifths of
    that more. The rest is the machine's doing.
    """
    curve = CostCurve(MEASURED)
    assert (curve.is_new(511), curve.is_new(1500)) == (False, True)
    for _ in range(3):
        curve.observe(1, 0.016, n_past=1500)
    assert curve.seconds(1, 0) == curve.seconds(1, 511) == 0.010
    assert curve.seconds(1, 1024) == curve.seconds(1, 2047) == 0.016
    assert curve.seconds(1, 2048) == 0.016
    assert (
        curve.seconds(8, 1500) == curve.seconds(8, 2048) == pytest.approx((0.020 + 0.0025 * (1 + 7 * 0.4)) * 1.6 / 1.25)
    )
    for _ in range(3):
        curve.observe(8, 0.050, n_past=1500)  # dearer than that, and no reason to think that one row is
        curve.observe(4, 0.030, n_past=1500)
    assert (curve.seconds(1, 1500), curve.seconds(8, 1500)) == (0.016, 0.050)
    assert (curve.is_new(1500), curve.is_new(2048), curve.is_new(9000)) == (False, False, True)
    assert curve.table() == MEASURED


def test_what_keeping_a_branch_takes_is_a_mean() -> None:
    """A keep of 8 ms in one tree of two is seen as 4, which a median would call 0; forwards stay what they were."""
    curve = CostCurve(MEASURED)
    assert curve.keep_s == 0
    for i in range(100):
        curve.observe(4, 0.013, keep_s=0.008 * (i % 2))
    assert curve.keep_s == pytest.approx(0.004, abs=0.0004)
    assert curve.table() == MEASURED


def test_one_dear_keep_does_not_rule_trees_out_for_good() -> None:
    """It counts as a forward at most, and is forgotten in steps without trees."""
    curve = CostCurve(MEASURED)
    curve.observe(4, 0.013, keep_s=1000.0)
    assert curve.keep_s == 0.013 / 8
    for _ in range(500):
        curve.observe(1, 0.010)
    assert curve.keep_s < 0.013 / 80


class Slow:
    """A session whose forwards take 10 ms, and 4 ms to keep a branch; token 7 is always the next."""

    n_ctx = n_cached = 4096

    def __init__(self, clock: Clock) -> None:
        tokenizer = SimpleNamespace(is_end=lambda token_id: False)
        card = SimpleNamespace(n_vocab=9, runtime="fake")
        self.model = SimpleNamespace(card=card, capabilities=Capabilities(trees=True), tokenizer=tokenizer)
        self.kept: list[list[int]] = []
        self._clock = clock

    def evaluate(self, item: ForwardItem, _: object) -> Forward:
        """Let the time pass."""
        self._clock.now += 0.010
        return Forward(np.tile(np.eye(9, dtype=np.float32)[7], (item.n_rows, 1)))

    def room(self, n_tokens: int) -> int:
        """Say how many rows fit."""
        return self.n_ctx - n_tokens

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Call rows of any number exact."""
        return ExactRows(16, 16)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Evaluate something again."""
        self._clock.now += 0.004
        self.kept.append(rows.tolist())


@pytest.mark.parametrize("parents", [[-1, 0], [-1, -1]])
def test_a_step_tells_the_curve_what_keeping_took(parents: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the forward, and nothing for a chain, which is never kept."""
    clock = Clock()
    monkeypatch.setattr("edgedec.decoding.step.perf_counter", clock)
    session, curve = Slow(clock), CostCurve()
    drafter = Oracle([], 1.0)
    monkeypatch.setattr(Oracle, "propose", lambda *_: Draft.tree([3, 7], parents, [0.5, 0.5]))
    params = SamplingParams(temperature=0)
    sequence = TextState(Request((1,), params, 0), [1])
    fake = cast(Session, session)
    decoder = Decoder(fake, Noise(0), curve, policy_of([member(drafter)], CostCurve(), always=True, n_max=2))
    step(sequence, decoder)  # with a prompt of one token the prefill is a draft, too, and no cost
    assert curve.keep_s == 0
    step(sequence, decoder)
    assert sequence.stats.reasons == []
    assert curve.table() == {3: pytest.approx(0.010)}
    is_tree = parents == [-1, -1]
    assert curve.keep_s == pytest.approx(0.004 / 8 if is_tree else 0)
    assert session.kept == ([[0, 2]] * 2 if is_tree else [])


@pytest.mark.usefixtures("clock")
def test_where_keeping_is_dear_the_policy_takes_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two likely siblings and a child promise 2.0 tokens, the chain among them 1.8, in the time of one step each."""
    monkeypatch.setattr(Oracle, "propose", lambda *_: Draft.tree([3, 4, 5], [-1, -1, 0], [0.5, 0.2, 0.6]))
    for keep_s, parents in [(0.0, [-1, 0, -1]), (0.0005, [-1, 0, -1]), (0.005, [-1, 0])]:
        curve = CostCurve({1: 0.010, 8: 0.010})
        curve.keep_s = keep_s
        policy = policy_of([member(Oracle(a_text(9), 1.0))], curve)
        assert list(policy.propose(DecodeStats(), 5, 8).parents) == parents


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.5, 2.0), st.integers(1, 24)), max_size=80))
def test_a_curve_that_was_looked_at_is_the_same_as_one_that_was_not(steps: list[tuple[int, float, int]]) -> None:
    """What is kept between two steps is never older than the latest step."""
    measured = {1: 1.0, 2: 1.3, 8: 1.9, 16: 2.5}
    looked_at, fresh = CostCurve(measured), CostCurve(measured)
    for n_rows, seconds, n_looked_up in steps:
        looked_at.up_to(n_looked_up)
        looked_at.observe(n_rows, seconds)
        fresh.observe(n_rows, seconds)
    assert looked_at.up_to(24) == fresh.up_to(24)
    assert looked_at.table() == fresh.table()


def test_what_a_step_takes_beside_its_forward_is_in_its_price() -> None:
    """Apart for plain steps and for drafts; one that was suspended counts as a few, and nothing drives it off."""
    curve = CostCurve({1: 0.010, 4: 0.012})
    for _ in range(100):
        curve.observe_beside(1, 0.001)
        curve.observe_beside(4, 0.002)
        curve.observe_beside(3, 0.0)
    assert curve.cost()(0) == pytest.approx(0.011)
    assert curve.cost()(3) == pytest.approx(0.013, abs=0.0002)
    before = curve.cost()(0)
    curve.observe_beside(1, 100.0)
    assert before < curve.cost()(0) < before + 0.001
    curve.observe(1, 0.010)
    assert curve.latest_s == curve.cost()(0)
    assert curve.seconds(1) == 0.010


def test_what_it_costs_to_go_back_to_plain_steps_is_learned() -> None:
    """The first plain step after a draft is kept apart where it is unlike others; the first draft pays it."""
    curve = CostCurve({1: 0.002, 4: 0.004})
    for _ in range(5):
        for n_rows, seconds in [(1, 0.002), (4, 0.004), (4, 0.004), (1, 0.003)]:
            curve.observe(n_rows, seconds)
    assert curve.seconds(1) == pytest.approx(0.002)
    assert curve.resuming.share == pytest.approx(0.5)
    curve.observe(1, 0.002)
    assert curve.cost()(3) == pytest.approx(0.005)
    assert curve.cost()(0) == pytest.approx(0.002)
    curve.observe(4, 0.004)
    assert curve.latest_s == pytest.approx(0.005)
    assert curve.cost()(3) == pytest.approx(0.004)
    noisy = CostCurve({1: 0.002, 4: 0.004})  # within a tenth, the plain steps after drafts count like all others
    for n_rows, seconds in [(4, 0.004), (1, 0.00215), (4, 0.004), (1, 0.00205), (4, 0.004), (1, 0.0021)] * 9:
        noisy.observe(n_rows, seconds)
    assert noisy.resuming.share == 0
    assert noisy.seconds(1) == pytest.approx(0.0021)

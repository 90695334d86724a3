"""T(n): bounds for what was not measured, refinement by real steps, and what must not spoil it."""

import pytest

from edgedec.curve import CostCurve

MEASURED = {1: 0.010, 2: 0.012, 4: 0.013, 8: 0.020}


def test_an_empty_curve_knows_nothing() -> None:
    """Nothing measured, nothing claimed; a row then counts a second."""
    curve = CostCurve()
    assert curve.seconds(1) is None
    assert curve.seconds(7, n_past=3000) is None
    assert curve.table() == {}
    assert curve.up_to(3) == [1.0, 2.0, 3.0]


def test_of_one_row_alone_more_grow_in_proportion() -> None:
    """Above all that was measured no draft looks cheaper than it could be."""
    assert CostCurve({1: 0.5}).up_to(3) == [0.5, 1.0, 1.5]


def test_an_unmeasured_n_costs_what_the_next_measured_one_does() -> None:
    """Rows could be padded up to the next n that was measured."""
    assert CostCurve(MEASURED).up_to(9) == [
        0.010,
        0.012,
        0.013,
        0.013,
        0.020,
        0.020,
        0.020,
        0.020,
        pytest.approx(0.0225),
    ]


def test_more_rows_for_less_show_that_fewer_were_disturbed() -> None:
    """Of what was measured at load, a larger n bounds the smaller ones."""
    assert CostCurve({1: 0.5, 2: 0.012, 4: 0.011}).table() == {1: 0.011, 2: 0.011, 4: 0.011}


def test_three_real_steps_replace_what_was_measured_at_load() -> None:
    """Dearer steps count from the third on; the latest fifteen are remembered."""
    curve = CostCurve(MEASURED)
    for seconds, expected in [(0.030, 0.020), (0.032, 0.020), (0.031, 0.031)]:
        curve.observe(8, seconds)
        assert curve.seconds(8) == expected
    for _ in range(15):
        curve.observe(8, 0.025)
    assert curve.seconds(8) == 0.025


def test_real_steps_make_the_curve_jagged() -> None:
    """An n that is dearer than the next one stays so, whatever was measured at load."""
    curve = CostCurve(MEASURED)
    for _ in range(3):
        curve.observe(3, 0.019)
    assert curve.up_to(4) == [0.010, 0.012, 0.019, 0.013]


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


def test_even_a_first_sample_that_was_suspended_is_forgotten() -> None:
    """Where nothing was measured at load, three steps are enough to get over the first."""
    curve = CostCurve()
    for seconds in (10.0, 0.010, 0.010):
        curve.observe(1, seconds)
    assert curve.seconds(1) == 0.010


@pytest.mark.parametrize("factor", [2, 5, 30])
def test_a_machine_that_becomes_slower_for_good_is_believed(factor: int) -> None:
    """However much slower, fifty steps later the curve says so."""
    curve = CostCurve(MEASURED)
    for _ in range(20):
        curve.observe(1, 0.010)
    for _ in range(50):
        curve.observe(1, factor * 0.010)
    assert curve.seconds(1) == pytest.approx(factor * 0.010)


def test_an_n_seen_only_while_the_machine_was_busy_comes_back() -> None:
    """What looks too costly to be tried again goes back, step by step, to what was measured at load."""
    curve = CostCurve(MEASURED)
    for _ in range(20):
        curve.observe(8, 0.060)
    assert curve.seconds(8) == 0.060
    for _ in range(1024):
        curve.observe(1, 0.010)
    assert curve.seconds(8) == pytest.approx(0.020, rel=0.1)
    for _ in range(3):
        curve.observe(8, 0.021)
    assert curve.seconds(8) == pytest.approx(0.021, rel=0.05)


def test_what_is_not_seen_follows_the_machine() -> None:
    """Where single steps have become twice as long, so have those of eight rows."""
    curve = CostCurve(MEASURED)
    for _ in range(1024):
        curve.observe(1, 0.020)
    assert curve.seconds(8) == pytest.approx(0.040, rel=0.1)


def test_long_contexts_have_a_curve_of_their_own() -> None:
    """Buckets end at 512, 1024, 2048, ...; a new one begins with what the nearest says, unseen n follow those seen."""
    curve = CostCurve(MEASURED)
    for _ in range(3):
        curve.observe(1, 0.016, n_past=1500)
    assert curve.seconds(1, 0) == curve.seconds(1, 511) == 0.010
    assert curve.seconds(1, 1024) == curve.seconds(1, 2047) == 0.016
    assert curve.seconds(1, 2048) == 0.016
    assert curve.seconds(8, 1500) == curve.seconds(8, 2048) == pytest.approx(0.032)
    assert curve.table() == MEASURED

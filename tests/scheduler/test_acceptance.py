"""What a drafter's estimates are worth."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.draft import Draft
from edgedec.drafter import Calibration
from edgedec.sampling import Distribution
from edgedec.scheduler.drafter_record import score


def test_unseen_estimates_stand_as_they_are() -> None:
    """Without observations nothing is corrected, but for certainty, which nobody has."""
    assert [Calibration().corrected(p) for p in (0.0, 0.3, 0.9)] == [0.0, 0.3, 0.9]
    assert Calibration().corrected(1.0) == 0.995


@pytest.mark.parametrize("said", [0.01, 0.05, 0.3, 0.55, 0.97, 1.0])
@pytest.mark.parametrize("true", [0.05, 0.5, 0.9])
def test_estimates_come_to_mean_what_is_observed(said: float, true: float) -> None:
    """After 600 observations the corrected estimate is the frequency, whatever the drafter says."""
    calibration = Calibration()
    for hit in np.random.default_rng(0).random(600) < true:
        calibration.observe(said, bool(hit))
    assert calibration.corrected(said) == pytest.approx(true, abs=0.08)


def test_what_was_learned_is_forgotten() -> None:
    """A drafter that was right and is wrong from now on is found out within 300 nodes."""
    calibration = Calibration()
    for _ in range(5000):
        calibration.observe(0.8, True)
    for _ in range(300):
        calibration.observe(0.8, False)
    assert calibration.corrected(0.8) < 0.5


def test_what_is_wrong_with_all_estimates_is_half_expected_of_others() -> None:
    """A bin that has seen nothing is scaled by the root of the ratio of all; its own nodes then count more."""
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(0.95, False)
    assert calibration.corrected(0.25) == pytest.approx(0.25 * (1 / 96) ** 0.5)
    for _ in range(40):
        calibration.observe(0.25, True)
    assert calibration.corrected(0.25) > 0.8


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300), st.floats(0, 1))
def test_a_corrected_estimate_is_a_probability(seen: list[tuple[float, bool]], p: float) -> None:
    """Whatever is observed, in whatever order, the result lies in 0 to 0.995."""
    calibration = Calibration()
    for said, accepted in seen:
        calibration.observe(said, accepted)
    assert 0 <= calibration.corrected(p) <= 0.995


def test_of_drawn_paths_side_by_side_the_deepest_right_one_counts() -> None:
    """Two paths begin alike and the second goes on rightly: both its tokens are right, and each is one chance."""
    law = Distribution(np.arange(10), np.full(10, 0.1))
    draft = replace(Draft.tree([5, 6, 5, 7], [-1, 0, -1, 2], [0.5] * 4), q=(law,) * 4)
    assert score(draft, (5, 7, 9), Calibration()) == ([2, 3], 3, 2)
    assert score(draft, (5, 6, 9), Calibration()) == ([0, 1], 3, 2)
    assert score(draft, (4,), Calibration()) == ([], 1, 1)

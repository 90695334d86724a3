"""The time that the rest of a prompt takes, foretold from the times so far."""

import random

import pytest

from edgedec_apps.reading_pace import ReadingPace


def seconds(n: int, fixed: float, growth: float) -> float:
    """Return when the first `n` tokens are read, where the token at x takes `fixed` + `growth` x seconds."""
    return fixed * n + growth * n * n / 2


@pytest.mark.parametrize(("fixed", "growth"), [(0.01, 0.0), (0.004, 1e-6), (0.0, 1e-6), (0.01, 1e-7)])
@pytest.mark.parametrize("n_before", [0, 5000])
def test_growth_with_the_position_is_foretold(fixed: float, growth: float, n_before: int) -> None:
    """Exactly, from an eighth of the prompt on, whether or not its beginning was read before."""
    pace, n_all = ReadingPace(), n_before + 8192
    for n in range(n_before, n_all + 1, 256):
        pace.add(n, 100 + seconds(n, fixed, growth))
        if n - n_before >= 1024:
            expected = seconds(n_all, fixed, growth) - seconds(n, fixed, growth)
            assert pace.left_s(n_all) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_noise_does_no_harm() -> None:
    """Half of the prompt, in stretches of very different speeds: within a fifth; a faster end is no negative time."""
    rng, pace, now = random.Random(1), ReadingPace(), 0.0
    for n in range(0, 4097, 64):
        pace.add(n, now)
        now += (seconds(n + 64, 0.005, 1e-6) - seconds(n, 0.005, 1e-6)) * rng.uniform(0.6, 1.4)
    assert pace.left_s(8192) == pytest.approx(seconds(8192, 0.005, 1e-6) - seconds(4096, 0.005, 1e-6), rel=0.2)
    falling = ReadingPace()
    for n, at in ((0, 0.0), (1000, 10.0), (2000, 11.0), (3000, 11.5)):
        falling.add(n, at)
    assert falling.left_s(4000) == pytest.approx(11.5 / 3)


def test_nothing_is_foretold_from_nothing() -> None:
    """Before the second report there is no pace; reports that bring nothing change none."""
    pace = ReadingPace()
    assert (pace.left_s(100), pace.per_s) == (None, None)
    pace.add(10, 1.0)
    pace.add(10, 2.0)
    assert (pace.left_s(100), pace.per_s) == (None, None)
    pace.add(60, 3.0)
    assert pace.left_s(110) == pytest.approx(2.0)
    assert pace.per_s == pytest.approx(25.0)
    assert pace.left_s(60) == 0.0

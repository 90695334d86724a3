"""n="auto": how many texts are enough, against the accuracies of the model."""

import pytest

from edgedec.choosing.sample_count import another_is_wanted, enough, n_agreeing


@pytest.mark.parametrize("p", [0.0, 0.02, 0.3, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("eps", [0.001, 0.0513, 0.2017])
def test_enough_is_the_first_n_whose_next_adds_too_little(p: float, eps: float) -> None:
    """Against the accuracies F(n) themselves, one after another."""
    n = 1
    while (1 - (1 - p) ** (n + 1)) - (1 - (1 - p) ** n) >= eps:
        n += 1
    assert enough(p, eps) == n


def test_auto_stops() -> None:
    """Where texts agree it stops early, where they don't it goes on, but never past the most allowed."""
    assert not another_is_wanted(3, 3, 0.05, 64)
    assert another_is_wanted(1, 4, 0.03, 64)
    assert another_is_wanted(1, 1, 0.05, 64)  # one text that agrees with itself says little
    assert n_agreeing([None, None, "a"]) == 1
    assert not another_is_wanted(1, 4, 0.01, 4)
    assert n_agreeing(["a", "b", "b", None]) == 2

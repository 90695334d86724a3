"""n="auto": how many texts are enough, against the accuracies of the model."""

import pytest

from edgedec.choosing.sample_count import another_is_wanted, enough, n_agreeing
from edgedec.errors import OptionError


@pytest.mark.parametrize("p", [0.0, 0.02, 0.3, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("eps", [0.001, 0.0513, 0.2017])
@pytest.mark.parametrize("f_max", [0.4, 1.0])
def test_enough_is_the_first_n_whose_next_adds_too_little(p: float, eps: float, f_max: float) -> None:
    """Against the accuracies F(n) themselves, one after another."""
    n = 1
    while f_max * (1 - (1 - p) ** (n + 1)) - f_max * (1 - (1 - p) ** n) >= eps:
        n += 1
    assert enough(p, eps, f_max) == n


def test_auto_stops() -> None:
    """Where texts agree it stops early, where they don't it goes on, but never past the most allowed."""
    assert not another_is_wanted(3, 3, 0.05, 64)
    assert another_is_wanted(1, 4, 0.03, 64)
    assert another_is_wanted(1, 1, 0.05, 64)  # one text that agrees with itself says little
    assert n_agreeing([None, None, "a"]) == 1
    assert not another_is_wanted(1, 4, 0.01, 4)
    assert n_agreeing(["a", "b", "b", None]) == 2
    for wrong in ({"p": 2.0, "eps": 0.1}, {"p": 0.5, "eps": 0.0}, {"p": 0.5, "eps": 0.1, "f_max": 0.0}):
        with pytest.raises(OptionError):
            enough(**wrong)

"""The table of the compute-optimal choice: its rows, and how it is made of measured outcomes."""

import pytest

from edgedec.errors import OptionError
from edgedec_methods.compute_optimal import fitted, method_for


def test_the_table_of_methods() -> None:
    """The row of the mean score; tables that leave scores out are refused."""
    table = [(0.8, "one"), (0.0, "vote")]
    assert method_for([1.0, 0.6], table) == "one"
    assert method_for([0.79], table) == "vote"
    for wrong in ([], [(0.5, "one")], [(0.0, "one"), (0.5, "vote")]):
        with pytest.raises(OptionError):
            method_for([0.5], wrong)
    with pytest.raises(OptionError):
        method_for([], table)
    outcomes = [(0.9, "a", 1.0), (0.6, "b", 0.4), (0.55, "a", 0.5), (0.1, "b", 0.2), (0.2, "a", 0.1)]
    assert fitted(outcomes, [0.8, 0.5, 0.0]) == [(0.8, "a"), (0.5, "a"), (0.0, "b")]
    with pytest.raises(OptionError):
        fitted([], [0.0])

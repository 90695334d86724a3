"""The combination of votes, likelihood and judged chances."""

from edgedec_methods.bag_of_tricks import combined


def test_the_combination() -> None:
    """Chances weigh the votes, likelihood decides within the winning answer; without answers chances decide."""
    assert combined(["1", "2", "1"], [-3.0, -1.0, -2.0], [0.4, 0.7, 0.4]) == 2
    assert combined(["1", "2", "1"], [-3.0, -1.0, -2.0], [0.2, 0.7, 0.2]) == 1
    assert combined([None, None], [-1.0, -2.0], [0.3, 0.9]) == 1

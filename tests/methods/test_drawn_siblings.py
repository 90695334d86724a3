"""Siblings drawn without replacement are verified exactly by recursive rejection."""

import pytest
from support.decoding.tree_draws import check_chances, check_drawn_tree


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shape", "n_vocab", "n_max", "least_path"),
    [
        ("recursive", "siblings:2", 3, 4, 0.0),
        ("recursive", "siblings:2-2", 2, 6, 0.0),
        ("recursive", "siblings:3-2", 3, 5, 0.2),
        ("recursive", "siblings:2-2", 2, 6, 0.4),
    ],
)
def test_a_drawn_tree_is_verified_exactly(rule: str, shape: str, n_vocab: int, n_max: int, least_path: float) -> None:
    """Over all draws of tiny models the text is the target's."""
    check_drawn_tree(rule, shape, n_vocab, n_max, least_path)


@pytest.mark.parametrize(
    ("shape", "n_max", "n_nodes"),
    [("siblings:2", 6, [2, 2, 2]), ("siblings:3-2", 8, [3, 5]), ("siblings:1-2", 7, [1, 2, 2, 2])],
)
def test_nodes_have_the_chances_of_their_places(shape: str, n_max: int, n_nodes: list[int]) -> None:
    """And each level has as many as the shape says, as far as there is room."""
    check_chances(shape, n_max, n_nodes)

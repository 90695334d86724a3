"""dKV-Cache: a token's keys and values are kept once a pass has evaluated it."""

from pathlib import Path

import pytest
from support.decoding.laid_out import N, check

from edgedec_methods.diffusion.delayed import delayed
from edgedec_methods.diffusion.rules import Canvas


@pytest.mark.parametrize(("n_passes", "kept"), [(0, []), (1, [1, 0, 2]), (2, [1, 0, 2]), (3, [])])
def test_masks_are_evaluated_in_each_pass_and_settled_tokens_in_every_third(n_passes: int, kept: list[int]) -> None:
    """Positions behind the block are masks, too, though the pass before has left their keys and values."""
    canvas = Canvas(range(7), 2, 5, (4,), frozenset({4}), n_passes, held=(1, 0, 2, 4, 5, 6))
    found, fresh = delayed(3)(canvas)
    assert (found, fresh) == (kept, [place for place in range(7) if place not in kept])


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
def test_texts_are_those_of_a_plain_table(tmp_path: Path, shift: bool) -> None:
    """Every third pass evaluates everything."""
    check(tmp_path, "delayed:3", lambda place, i, age: i % 3 > 0 and age > 1, N, shift=shift)

"""dKV-Cache: a token's keys and values are kept once a pass has evaluated it."""

from pathlib import Path

import pytest
from support.decoding.laid_out import N, check

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shift", [False, True])
def test_texts_are_those_of_a_plain_table(tmp_path: Path, shift: bool) -> None:
    """Every third pass evaluates everything."""
    check(tmp_path, "delayed:3", lambda place, i, age: i % 3 > 0 and age > 1, N, shift=shift)

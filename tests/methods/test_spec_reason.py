"""SpecReason against a plain form, and its two ends."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.decoding.plain_texts import PARAMS, grown
from support.decoding.table_branches import END, Ids, Table, random_table, table_texts

from edgedec.errors import OptionError, RequestError
from edgedec_methods.sampled_steps import Steps
from edgedec_methods.spec_reason import Grading, spec_reason

pytestmark = pytest.mark.slow

LENGTH = 6
GRADING = Grading((2,), (1, 2, 3, 0))  # four digits are enough for a test: grades 0 to 3


def plain(small: Table, large: Table, seed: int, threshold: int, n: int) -> tuple[Ids, list[bool]]:
    """Write and grade step by step, without forks."""
    ids: Ids = ()
    kept = list[bool]()
    while len(ids) < LENGTH and END not in ids:
        tried = grown(small, seed, ids, n, LENGTH)
        row = large[(*[t for t in tried if t != END], 2)]
        kept.append(int(np.argmax(row[list(GRADING.digit_ids)])) >= threshold)
        ids = tried if kept[-1] else grown(large, seed, ids, n, LENGTH)
    return ids, kept


def run(seed: int, threshold: int, n: int = 2) -> tuple[Ids, Sequence[bool]]:
    """Return what SpecReason writes with two tables; check that nothing is left."""
    small, one = table_texts(random_table(seed, n_vocab=4, length=LENGTH + 1), max_tokens=LENGTH)
    large, other = table_texts(random_table(seed + 100, n_vocab=4, length=LENGTH + 1), max_tokens=LENGTH)
    with small, large:
        found = spec_reason(small, large, Steps(PARAMS, seed, None, n), GRADING, threshold=threshold)
    assert not one.held
    assert not other.held
    return (*found.text.token_ids, END) if found.text.ended == "stop" else found.text.token_ids, found.steps_kept


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_steps_are_kept_by_their_grades(seed: int, threshold: int) -> None:
    """Both models hold the same text at every step, whoever wrote it."""
    small = random_table(seed, n_vocab=4, length=LENGTH + 1)
    large = random_table(seed + 100, n_vocab=4, length=LENGTH + 1)
    ids, kept = plain(small, large, seed, threshold, 2)
    assert run(seed, threshold) == (ids, tuple(kept))


@pytest.mark.parametrize("seed", range(15))
def test_the_ends_are_one_model_alone(seed: int) -> None:
    """Threshold 0 is the small model, threshold 10 the large one."""
    small = random_table(seed, n_vocab=4, length=LENGTH + 1)
    large = random_table(seed + 100, n_vocab=4, length=LENGTH + 1)
    assert run(seed, 0)[0] == grown(small, seed, (), LENGTH, LENGTH)
    assert run(seed, 10)[0] == grown(large, seed, (), LENGTH, LENGTH)


def test_what_is_refused() -> None:
    """Thresholds out of range, and models that read the prompt as other tokens."""
    for threshold in (-1, 11):
        with pytest.raises(OptionError, match="0 to 10"):
            run(0, threshold)
    small, _ = table_texts(random_table(0, n_vocab=3, length=2), max_tokens=2)
    large, _ = table_texts(random_table(0, n_vocab=3, length=2), max_tokens=2)
    small.prompt_ids = (2,)
    with pytest.raises(RequestError, match="vocabulary"):
        spec_reason(small, large, Steps(PARAMS), GRADING)

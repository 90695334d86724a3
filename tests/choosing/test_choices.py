"""Choosing among whole texts: votes and likelihood."""

import numpy as np
import pytest

from edgedec.choosing.choosers import most_likely
from edgedec.choosing.vote import answer_of, is_decided, shares, voted
from edgedec.errors import OptionError


def test_answers_of_texts() -> None:
    """The last statement counts; a caller's pattern may have a group or none."""
    assert answer_of("Answer: 3\nNo:\n**Answer:** 4.") == "4"
    assert answer_of("answer = a dog ") == "a dog"
    assert answer_of("x=1, x=2", r"x=\d") == "x=2"
    assert answer_of("x=1, x=2", r"x=(\d)") == "2"
    assert answer_of("nothing") is None
    for wrong in ("(", "a{99999999999}", 7):
        with pytest.raises(OptionError, match="regular expression"):
            answer_of("text", wrong)  # type: ignore[arg-type]


def test_votes() -> None:
    """The most votes win; of equals the answer that came first; weights count; texts without an answer don't vote."""
    assert voted(["1", "2", "2", None]) == 1
    assert voted(["1", "2", "1", "2"]) == 0
    assert voted(["1", "2", "2"], [0.9, 0.3, 0.3]) == 0
    assert voted([None, None]) == 0
    assert voted([None, "7"]) == 1
    assert shares(["a", None], [0.0, 1.0]) == {"a": 0.0}


@pytest.mark.parametrize("seed", range(30))
def test_a_decided_vote_stays_decided(seed: int) -> None:
    """Where is_decided says so, no further texts change the winner; where it does not, some do."""
    rng = np.random.default_rng(seed)
    answers = [str(rng.integers(3)) for _ in range(int(rng.integers(1, 8)))]
    n_more = int(rng.integers(0, 5))
    winner = answers[voted(answers)]
    worst = [[*answers, *[other] * n_more] for other in ("0", "1", "2", "3")]
    same = all(after[voted(after)] == winner for after in worst)
    counts = sorted((answers.count(a) for a in set(answers)), reverse=True)
    if is_decided(answers, n_more):
        assert same
    elif len(counts) > 1 and counts[0] - counts[1] < n_more:
        assert not same


def test_likelihood() -> None:
    """The greatest mean."""
    assert most_likely([-2.0, -0.5, -1.0]) == 1

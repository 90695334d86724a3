"""The choice among the texts of a search: the caller's scores, else the vote, else what scored them."""

from typing import Any

import pytest

from edgedec.choosing.search_by import SearchRun
from edgedec.choosing.vote import ANSWER
from edgedec.sampling import SamplingParams
from edgedec_methods.election import elected

ANSWERED, SILENT = ["Answer: 5", "Answer: 4", "Answer: 4"], ["five", "four", "four"]


class Texts:
    """Holds texts that are what they say."""

    def text(self, text: str) -> str:
        """Return it."""
        return text


@pytest.mark.parametrize(
    ("said", "scores", "is_scored", "place"),
    [
        (ANSWERED, [0.9, 0.2, 0.1], True, 0),
        (ANSWERED, [0.9, 0.2, 0.1], False, 1),
        (SILENT, [0.1, 0.2, 0.9], False, 2),
        (SILENT, [], False, 0),
    ],
)
def test_scores_of_the_caller_go_before_the_vote(
    said: list[Any], scores: list[float], is_scored: bool, place: int
) -> None:
    """Scores that the caller did not ask for count only where no text states an answer."""
    texts: Any = Texts()
    scorer = (lambda texts, live: scores) if is_scored else None
    found = elected(texts, said, scores, SearchRun(3, SamplingParams(), 0, scorer, ANSWER, "", texts))
    assert (found.place, found.scores) == (place, tuple(scores))

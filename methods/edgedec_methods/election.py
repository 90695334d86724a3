"""The vote, or the caller's scores, among the texts that a search ends with."""

from collections.abc import Sequence

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.search_by import SearchResult, SearchRun
from edgedec.choosing.vote import answer_of, voted, votes_said


def elected(
    texts: PartialTexts, candidates: Sequence[PartialText], scores: Sequence[float], run: SearchRun
) -> SearchResult:
    """Return the text with the caller's highest score; without the caller's scores, the one that the vote chooses.

    Args:
        texts: Who holds the texts.
        candidates: The texts that the search ends with.
        scores: By text, its score; empty where nothing scored them. They count where the caller gave the scorer, and
            where no text states an answer.
        run: What the search runs with.
    """
    answers = [answer_of(texts.text(text), run.answer) for text in candidates]
    if run.scorer is not None or (scores and not any(answers)):
        place = max(range(len(candidates)), key=scores.__getitem__)
        why = f"its score, {scores[place]:.3f}, is the highest of {len(candidates)}"
    else:
        place = voted(answers)
        why = votes_said(answers, place)
    return SearchResult(tuple(candidates), place, why, tuple(scores))

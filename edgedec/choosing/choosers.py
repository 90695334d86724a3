"""edgedec's own choosers.

| name | chooses | source |
|---|---|---|
| "vote" | a text with the answer that most texts state | self-consistency, arXiv:2203.11171 |
| "likely" | the text with the highest mean log-probability | arXiv:2502.07191 compares it |
| "score" | the text with the highest score of the caller's scorer | best of n |
"""

from collections.abc import Sequence

from edgedec.choosing.choice import Candidates, Chooser
from edgedec.choosing.vote import answer_of, is_decided, voted, votes_said
from edgedec.errors import OptionError
from edgedec.sequence import Generation


def _by_vote(candidates: Candidates) -> tuple[int, str]:
    place = candidates.whole[voted([candidates.answers[i] for i in candidates.whole])]
    return place, votes_said(candidates.answers, place)


def _vote_is_decided(ended: Sequence[Generation], n_more: int, answer: str) -> bool:
    return is_decided([answer_of(text.text, answer) for text in ended], n_more)


def _by_likelihood(candidates: Candidates) -> tuple[int, str]:
    means = [mean_logprob(candidates.texts[i]) for i in candidates.whole]
    best = most_likely(means)
    return candidates.whole[
        best
    ], f"its mean log-probability of a token, {means[best]:.3f}, is the highest of {len(means)}"


def _by_score(candidates: Candidates) -> tuple[int, str]:
    place = max(candidates.whole, key=candidates.scores.__getitem__)
    return place, f"its score, {candidates.scores[place]:.3f}, is the highest of {len(candidates.whole)}"


VOTE = Chooser(_by_vote, votes=True, may_stop=_vote_is_decided)
LIKELY = Chooser(_by_likelihood, needs_logprobs=True)
SCORE = Chooser(_by_score, takes_scorer=True)


def most_likely(mean_logprobs: Sequence[float]) -> int:
    """Return the place of the greatest mean log-probability of a token; of equals the first.

    >>> most_likely([-0.5, -0.25, -0.25])
    1
    """
    return max(range(len(mean_logprobs)), key=mean_logprobs.__getitem__)


def mean_logprob(text: Generation) -> float:
    """Return the mean log-probability of a text's tokens, 0 for an empty text.

    Raises:
        OptionError: The text was written without log-probabilities.
    """
    return require_logprobs(text.logprob_sum) / max(1, len(text.token_ids))


def require_logprobs(logprob_sum: float | None) -> float:
    """Return the sum of a text's log-probabilities (OptionError where it was written without)."""
    if logprob_sum is None:
        raise OptionError("logprobs", None, "this way of choosing needs the texts' log-probabilities: 0 is enough")
    return logprob_sum

"""edgedec's own choosers.

| name | chooses | source |
|---|---|---|
| "vote" | a text with the answer that most texts state | self-consistency, arXiv:2203.11171 |
| "likely" | the text with the highest mean log-probability | arXiv:2502.07191 compares it |
| "score" | the text with the highest score of the caller's scorer | best of n |
"""

from collections.abc import Sequence

from edgedec.choosing.choice import Candidates, Chooser
from edgedec.choosing.likelihood import mean_logprob, most_likely
from edgedec.choosing.vote import answer_of, is_decided, voted, votes_said
from edgedec.sequence import Generation


def _by_vote(given: Candidates) -> tuple[int, str]:
    place = given.whole[voted([given.answers[i] for i in given.whole])]
    return place, votes_said(given.answers, place)


def _vote_is_decided(ended: Sequence[Generation], n_more: int, answer: str) -> bool:
    return is_decided([answer_of(text.text, answer) for text in ended], n_more)


def _by_likelihood(given: Candidates) -> tuple[int, str]:
    means = [mean_logprob(given.texts[i]) for i in given.whole]
    best = most_likely(means)
    return given.whole[best], f"its mean log-probability of a token, {means[best]:.3f}, is the highest of {len(means)}"


def _by_score(given: Candidates) -> tuple[int, str]:
    place = max(given.whole, key=given.scores.__getitem__)
    return place, f"its score, {given.scores[place]:.3f}, is the highest of {len(given.whole)}"


VOTE = Chooser(_by_vote, votes=True, may_stop=_vote_is_decided)
LIKELY = Chooser(_by_likelihood, needs_logprobs=True)
SCORE = Chooser(_by_score, takes_scorer=True)

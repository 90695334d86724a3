"""Bag of tricks: votes, likelihood and self-judgement choose a text together.

The paper finds that no trick wins alone. Here a vote, in which each text counts by its judged chance to be right, names
the answer, and the most probable text with that answer is chosen.

Paper: after Bag of Tricks for Inference-time Computation of LLM Reasoning, arXiv:2502.07191
Option: `-k 8 --method bag`
For: several texts without a checker
Measured: with 8 texts 86 % of 50 word problems right for 131 plain steps; the likeliest of 4 has 86 % for 60 (`python
    benchmarks/answers/better_answers.py sample qwen2.5-coder-1.5b --kind arithmetic --tasks 50`)
Status: study
"""

from collections.abc import Sequence

from edgedec.choosing.choice import Candidates, Chooser
from edgedec.choosing.choosers import mean_logprob
from edgedec.choosing.vote import shares, votes_said
from edgedec_methods.judgement import open_judge


def combined(answers: Sequence[str | None], mean_logprobs: Sequence[float], chances: Sequence[float]) -> int:
    """Return the place of the text that the combination chooses; of equals the first.

    Where no text has an answer, all texts stand, each with its chance.

    Args:
        answers: By text, the answer that it states, or None.
        mean_logprobs: By text, the mean log-probability of its tokens.
        chances: By text, the judged chance that it is right, 0 to 1.

    >>> combined(["4", "5", "4"], [-0.3, -0.1, -0.2], [0.3, 0.5, 0.3])
    2
    """
    by_answer = shares(answers, chances)
    if not by_answer:
        return max(range(len(chances)), key=lambda i: (chances[i], mean_logprobs[i]))
    winner = max(by_answer, key=by_answer.__getitem__)
    return max((i for i, answer in enumerate(answers) if answer == winner), key=mean_logprobs.__getitem__)


def _choose(candidates: Candidates) -> tuple[int, str]:
    whole, answers = candidates.whole, candidates.answers
    means = [mean_logprob(candidates.texts[i]) for i in whole]
    place = whole[combined([answers[i] for i in whole], means, [candidates.scores[i] for i in whole])]
    said = votes_said(answers, place)
    if answers[place] is None:
        return place, f"{said}, and its judged chance is the highest"
    return place, f"{said}, weighted by their judged chances, and it is the likeliest of these"


BAG = Chooser(_choose, open_scorer=open_judge, needs_logprobs=True, votes=True)

"""Votes, likelihood and self-judgement together.

After "Bag of Tricks for Inference-time Computation of LLM Reasoning" (arXiv:2502.07191), which finds that no trick wins
alone: a vote in which each text counts by its judged chance to be right, and between texts with the winning answer the
most probable one.
"""

from collections.abc import Sequence

from edgedec.choosing.vote import shares


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

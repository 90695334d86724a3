"""Choosing the text that the model itself finds most probable per token.

"Bag of Tricks for Inference-time Computation of LLM Reasoning" (arXiv:2502.07191) compares it with votes and judges.
"""

from collections.abc import Sequence


def most_likely(mean_logprobs: Sequence[float]) -> int:
    """Return the place of the greatest mean log-probability of a token; of equals the first.

    >>> most_likely([-0.5, -0.25, -0.25])
    1
    """
    return max(range(len(mean_logprobs)), key=mean_logprobs.__getitem__)

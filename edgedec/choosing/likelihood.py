"""Choosing the text that the model itself finds most probable per token.

"Bag of Tricks for Inference-time Computation of LLM Reasoning" (arXiv:2502.07191) compares it with votes and judges.
"""

from collections.abc import Sequence

from edgedec.errors import OptionError
from edgedec.sequence import Generation


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

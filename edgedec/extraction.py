"""Quotations of a passage that answer a question: what `Engine.extract` returns, and the limits of what is asked."""

import math
from dataclasses import dataclass

MOST_SPANS = 100
"""Most quotations that are asked for at a time."""
MOST_SPAN_TOKENS = 512
"""Most tokens of a quotation."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the passage.

    Attributes:
        text: Its text.
        start, end: Its first character, and the one behind its last; of equal stretches the first one's.
        logprob: The log-probability that the model answers with this and ends.
        token_ids: Its tokens.
    """

    text: str
    start: int
    end: int
    logprob: float
    token_ids: tuple[int, ...]

    @property
    def probability(self) -> float:
        """exp(logprob)."""
        return math.exp(self.logprob)


@dataclass(frozen=True, slots=True)
class Extraction:
    """The most probable quotations of a passage, and what finding them took.

    Attributes:
        spans: The quotations, the most probable first. There are fewer than wanted where the passage has fewer.
        n_prompt_tokens: Tokens of the prompt: the passage, the question and the instruction.
        n_reused_tokens: Tokens of the prompt that the KV cache held already.
        n_starts: Places of the passage where a span may begin.
        n_span_tokens: Tokens of the longest spans from all these places: the rows that scoring every span would take.
        n_forwards: Forwards after the prompt's.
        n_rows: Their rows.
        prompt_s: Seconds until the prompt was read.
        total_s: Seconds of everything.
    """

    spans: tuple[Span, ...]
    n_prompt_tokens: int
    n_reused_tokens: int
    n_starts: int
    n_span_tokens: int
    n_forwards: int
    n_rows: int
    prompt_s: float
    total_s: float

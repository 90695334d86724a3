"""A request, the state of its generation, and what is returned of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgedec.callers import one_line
from edgedec.drafter import ProposalLog
from edgedec.pictures import Pictures
from edgedec.sampling import SEED_LIMIT, SamplingParams
from edgedec.stats import DecodeStats

FinishReason = Literal["stop", "length", "unsure", "cancelled"]
COUPLED = "coupled"
"""The default verification rule, edgedec.verification.coupled; edgedec.verification.rules finds the others."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be generated.

    Attributes:
        prompt_ids: Token ids of the prompt.
        sampling: How tokens are drawn; its seed is set.
        seed: The seed used.
        reuse: How much of the KV cache may be reused: "exact" only what a cold start would compute to the same
            bits, "longest" the longest common prefix (the same where the runtime is batch-invariant).
        draft: Whether drafts may be verified; the text is the same either way, unless `rule` says otherwise.
        rule: How drafts are verified: "coupled", which gives the same text, or an opt-in rule
            (edgedec.verification.rules), which gives the same distribution.
        record: Is told what the drafters propose at every position, and no draft is verified; None for a text that is
            not recorded.
        predicted_ids: Tokens that the text is expected to have. Drafters look them up; the text is the same without.
        begun_ids: Tokens that the text was begun with in an earlier request, which was interrupted; the text goes on
            behind them as it would have then.
        methods: The values of the options that methods bring (edgedec.text_method.TextMethod), by the methods' names.
        scales: What the part of each of the model's adapters is multiplied by (ModelCard.adapters).
        pictures: The rows that the prompt's negative ids stand for.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    reuse: Literal["exact", "longest"] = "exact"
    draft: bool = True
    rule: str = COUPLED
    record: ProposalLog | None = None
    predicted_ids: tuple[int, ...] = ()
    begun_ids: tuple[int, ...] = ()
    methods: Mapping[str, object] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    pictures: Pictures = field(default_factory=dict)

    def text(self, k: int) -> "Request":
        """Return the request of text `k` of several: the seed is `k` more."""
        return replace(self, seed=(self.seed + k) % SEED_LIMIT)


@dataclass(slots=True)
class TextState:
    """The state of one generation.

    Attributes:
        request: What is generated.
        token_ids: Tokens of the prompt, then the accepted tokens.
        n_cached: How many of these are in the KV cache; the next step evaluates the others.
        finish_reason: "stop" (end token, stop string or complete grammar), "length" (max_tokens, or the context is
            full), "unsure" (the next token is too likely to be wrong, see SamplingParams.stop_unsure), "cancelled", or
            None while the generation runs.
        stats: Counts and times.
        is_whole: Whether the text so far matches its grammar as a whole; None without a grammar.
        stop_string: The stop string that ended the text; None where none did.
        logprob_sum: Sum of the model's own log-probabilities of the tokens so far, where the request wants them.
        ended_before: Whether the text ends before the token that was drawn last, which is no part of it.
    """

    request: Request
    token_ids: list[int]
    n_cached: int = 0
    finish_reason: FinishReason | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    is_whole: bool | None = None
    stop_string: str | None = None
    logprob_sum: float | None = None
    ended_before: bool = False

    @property
    def n_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def n_drawn(self) -> int:
        """Number of tokens that were drawn: those after the prompt, and the one before which the text ends."""
        return self.n_generated + self.ended_before


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token.

    Attributes:
        token_id: The token.
        text: Text that has become certain with the token; empty for half a character or a possible stop string. The
            last output also has the text that was held back before.
        logprob: The model's own log-probability of the token, where the request wants it.
        top_logprobs: Log-probabilities of the most probable tokens by token id, where the request wants them.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: Mapping[int, float] = field(default_factory=dict)

    __repr__ = one_line


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One generated token of one of several texts.

    Attributes:
        text: The number of the text.
        output: The token.
    """

    text: int
    output: TokenOutput

    __repr__ = one_line


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: The text, without the stop string that ended it.
        token_ids: The generated tokens without end tokens; where a stop string ended the text, up to the token that
            completed the stop string.
        finish_reason: As in TextState.
        stats: Counts and times.
        outputs: The output of every token, with its log-probabilities.
        is_whole: Whether the text matches its grammar as a whole: False where the text was cut before the grammar let
            it end (by max_tokens, a full context, a stop string, or by cancelling). None without a grammar.
        stop_string: The stop string that ended the text; None where none did.
        logprob_sum: Sum of the model's own log-probabilities of token_ids, where the request wants log-probabilities;
            they are those at temperature 1, before any transform.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    outputs: tuple[TokenOutput, ...] = field(default=(), repr=False)
    is_whole: bool | None = None
    stop_string: str | None = None
    logprob_sum: float | None = None

    __repr__ = one_line

    def __str__(self) -> str:
        """Return the text."""
        return self.text

    def _repr_html_(self) -> str:
        """Return the text as a notebook shows it: as text, whatever marks it has."""
        from html import escape  # few need it, and it takes milliseconds

        return f'<div style="white-space: pre-wrap">{escape(self.text)}</div>'

    @property
    def constraint_logprob(self) -> float | None:
        """The sum of log Z of what was allowed, as in DecodeStats; None without a constraint."""
        return self.stats.constraint_logprob


Until = Callable[[Sequence[Generation]], bool]
"""Is called when texts have ended, with all that ended so far, the shortest first; True ends the others.

Of equally long ones the lower number is first. A token before which a text ends counts, as plain decoding draws it.
"""


def n_common(held: Sequence[int], prompt: Sequence[int], limit: int) -> int:
    """Return how many tokens two texts have in common from their start on, at most `limit`."""
    n = max(0, min(len(held), len(prompt), limit))
    if list(held[:n]) == list(prompt[:n]):
        return n
    return next(i for i in range(n) if held[i] != prompt[i])

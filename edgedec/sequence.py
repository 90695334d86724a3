"""A request, and the one mutable object of its generation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgedec.errors import RequestError
from edgedec.model import LayerSet
from edgedec.sampling import SamplingParams
from edgedec.stats import DecodeStats

FinishReason = Literal["stop", "length", "cancelled"]
COUPLED = "coupled"
"""The default verification rule, edgedec.verification.coupled; edgedec.verification.RULES names the others."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A forward that drafting made.

    Attributes:
        n_rows: Its rows.
        share: Of the bytes of weights that a token of the target reads, those that it read; None for a draft model's.
    """

    n_rows: int
    share: float | None


@dataclass(frozen=True, slots=True)
class Proposals:
    """The merged proposals at one position.

    Attributes:
        tokens: Token of each node.
        parents: Index of its parent, -1 for the text before.
        paths: P(path to the node accepted) as it was known then.
        draft_s: Seconds that drafting took.
        evaluated: The forwards that drafting made, in their order; none where drafters look tokens up.
        after: How many of these had been made when each node was known; empty where they are not noted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    paths: tuple[float, ...]
    draft_s: float
    evaluated: tuple[Evaluated, ...] = ()
    after: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return plain types for JSON."""
        return {
            "tokens": list(self.tokens),
            "parents": list(self.parents),
            "paths": [round(path, 4) for path in self.paths],
            "draft_s": round(self.draft_s, 6),
            "evaluated": [[made.n_rows, made.share and round(made.share, 4)] for made in self.evaluated],
            "after": list(self.after),
        }


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        prompt_ids: Token ids of the prompt.
        sampling: How tokens are drawn; its seed is set.
        seed: The seed used.
        reuse: How much of the KV cache may be reused: "exact" only what a cold start would compute to the same
            bits, "longest" the longest common prefix (the same where the runtime is batch-invariant).
        draft: Whether drafts may be verified; the text is the same either way, unless `rule` says otherwise.
        rule: How drafts are verified: "coupled", which gives the same text, or one of edgedec.verification.RULES, which
            give the same distribution.
        record: Gives the share of a token's bytes that half-layers of the target read. Where it is there, what drafters
            propose at every position is noted, and none of it verified.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    reuse: Literal["exact", "longest"] = "exact"
    draft: bool = True
    rule: str = COUPLED
    record: Callable[[LayerSet], float] | None = None

    def __post_init__(self) -> None:
        if self.reuse not in ("exact", "longest"):
            raise RequestError(f"reuse is {self.reuse!r:.40}; it must be 'exact' or 'longest'")
        if not isinstance(self.draft, bool):
            raise RequestError(f"draft is {self.draft!r:.40}; of a request it must be True or False")


@dataclass(slots=True)
class Sequence:
    """The state of one generation.

    Attributes:
        request: What was asked for.
        token_ids: Prompt and accepted tokens.
        n_cached: How many of them are in the KV cache; the rest is evaluated by the next step.
        finish_reason: "stop" (end token or stop string), "length" (max_tokens, or the context is full),
            "cancelled", or None while it runs.
        stats: Counts and times.
        proposals: What drafters proposed, one entry a step after the first token, where that is recorded.
        is_whole: Whether the text is one of its grammar's, by now; None without a grammar.
    """

    request: Request
    token_ids: list[int]
    n_cached: int = 0
    finish_reason: FinishReason | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    proposals: list[Proposals] = field(default_factory=list)
    is_whole: bool | None = None

    @property
    def n_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token.

    Attributes:
        token_id: The token.
        text: Text that has become certain with it; may be empty (half a character, a possible stop string), and
            the last output may carry what was held back.
        logprob: The model's own log-probability of the token, where asked for.
        top_logprobs: Those of the most probable tokens, where asked for.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: The text, without the stop string that ended it.
        token_ids: The generated tokens, end tokens not included; where a stop string ended the text, up to the
            token that completed it.
        finish_reason: As in Sequence.
        stats: Counts and times.
        outputs: Every token's output (log-probabilities are there).
        proposals: What drafters proposed after each token, where that was recorded.
        is_whole: Whether the text is one of its grammar's: False where it was cut before the grammar let it end (by
            max_tokens, a full context, a stop string, or by cancelling). None without a grammar.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: DecodeStats
    outputs: tuple[TokenOutput, ...] = ()
    proposals: tuple[Proposals, ...] = ()
    is_whole: bool | None = None

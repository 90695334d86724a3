"""The statistics of a generation: what it did, what that cost, and what drafts saved."""

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from edgedec.callers import one_line
from edgedec.draft_constants import BUCKET, NOTICED, SURE


@dataclass(slots=True)
class DecodeStats:
    """Counts and times of one generation, which grow while it runs; every time is in seconds.

    Attributes:
        runtime: Name of the runtime.
        runtime_reason: Why the runtime was chosen, where two were compared; else empty.
        seed: The seed used, given or drawn.
        lossy: Why the text differs from the whole model's: the layers left out; empty where none are.
        n_prompt_tokens: Tokens of the prompt.
        n_reused_tokens: Tokens of the prompt that the KV cache held already.
        n_generated_tokens: Tokens generated, end tokens not counted.
        n_steps: Forwards after the prefill.
        n_drafts: Drafts verified.
        n_draft_tokens: Nodes of these drafts.
        n_accepted_tokens: Nodes of these drafts that were accepted.
        accepted_by_position: How often the node at each depth of a draft was accepted.
        draft_s: Time of drafting, and of what drafters learn.
        forward_s: Time of the forwards after the prefill.
        verify_s: Time of verification, sampling included.
        prefill_s: Time of the forward that gives the first token.
        first_token_s: Time from the request to the first token.
        total_s: Time from the request to the end.
        saved_s: Time that drafting saved after the first token, below 0 where it cost time: what as many plain steps as
            there are tokens would have taken, by the plain steps of this text. None where these were too few to know.
        drafters: Counts by drafter: nodes proposed ("nodes"), nodes whose parent was right ("tried"), nodes of these
            that were right themselves, verified or not ("right"), time of drafting ("draft_s"), drafts after their
            deadline ("late"), failures ("failed"). For a drafter that drafts while the target verifies also the tokens
            drafted during that time ("ahead"), and how many of these were of use ("used").
        chance_right: Where the text ended because the model was unsure: the estimated chance that the next token would
            have been right, 0 to 1. Else None.
        constraint_logprob: Under a grammar or another constraint: the sum over the tokens of the log-probability that
            the model gave to what was allowed (edgedec.constraint.Constraint.logprob). exp of it is the weight that
            makes texts of one constraint a sample of the model's own texts that keep to it. Else None, or where it is
            not known.
        switching: Where two models wrote in turn: tokens by each ("large_tokens", "small_tokens"), writer changes
            ("switches"), mean entropy of the rows that tokens were drawn from ("entropy_bits"). Else empty.
        curve: Seconds of a forward by its number of rows, as known at the end, where drafts were possible.
        explanation: The account of drafting that `--explain` prints: the drafters' results, and the decisions.
        reasons: What a person should be told without asking: drafting was off and why, the text ended early and why.
    """

    runtime: str = ""
    runtime_reason: str = ""
    seed: int = 0
    lossy: str = ""
    n_prompt_tokens: int = 0
    n_reused_tokens: int = 0
    n_generated_tokens: int = 0
    n_steps: int = 0
    n_drafts: int = 0
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    saved_s: float | None = None
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    chance_right: float | None = None
    constraint_logprob: float | None = None
    switching: dict[str, float] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    explanation: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    __repr__ = one_line

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 for fewer than two tokens."""
        seconds = self.total_s - self.first_token_s
        return (self.n_generated_tokens - 1) / seconds if self.n_generated_tokens > 1 and seconds > 0 else 0.0

    @property
    def speedup(self) -> float | None:
        """How many times as fast as without drafts the text came after its first token; None where it is not known."""
        seconds = self.total_s - self.first_token_s
        return None if self.saved_s is None or seconds <= 0 else max(0.0, 1 + self.saved_s / seconds)

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per draft, bonus tokens not counted; 0 without a draft."""
        return self.n_accepted_tokens / self.n_drafts if self.n_drafts else 0.0

    def add_reason(self, reason: str) -> None:
        """Add a sentence to `reasons`, unless it is there already."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def count_draft(self, n_nodes: int, n_accepted: int) -> None:
        """Count a verified draft of `n_nodes` nodes."""
        self.n_drafts += 1
        self.n_draft_tokens += n_nodes
        self.n_accepted_tokens += n_accepted
        missing = n_accepted - len(self.accepted_by_position)
        self.accepted_by_position.extend([0] * max(0, missing))
        for depth in range(n_accepted):
            self.accepted_by_position[depth] += 1

    def count_proposal(self, name: str, n_nodes: int, seconds: float) -> None:
        """Count the nodes that a drafter proposed before a step, and the seconds that this took."""
        counts = self.drafters.get(name) or self._of(name)
        counts["nodes"] += n_nodes
        counts["draft_s"] += seconds

    def count_failure(self, name: str, kind: Literal["late", "failed"]) -> None:
        """Count a draft that came too late, or the failure of a drafter."""
        self._of(name)[kind] += 1

    def note_ahead(self, name: str, n_ahead: int, n_used: int) -> None:
        """Set how many tokens a drafter has drafted while the target verified, and how many of these were of use."""
        counts = self._of(name)
        counts["ahead"], counts["used"] = n_ahead, n_used

    def _of(self, name: str) -> dict[str, float]:
        """Return the counts of a drafter."""
        zeros = {"nodes": 0, "tried": 0, "right": 0, "draft_s": 0.0, "late": 0, "failed": 0}
        return self.drafters.setdefault(name, zeros)

    def count_outcome(self, name: str, n_tried: int, n_right: int) -> None:
        """Count the nodes of a proposal whose parent was right, and those that were right themselves."""
        counts = self.drafters.get(name) or self._of(name)
        counts["tried"] += n_tried
        counts["right"] += n_right

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes and the derived values as plain types for JSON."""
        derived = {"tokens_per_s": self.tokens_per_s, "mean_accepted": self.mean_accepted, "speedup": self.speedup}
        return asdict(self) | derived


@dataclass(slots=True)
class _Steps:
    """The steps of a text in contexts of about one length.

    Attributes:
        n_tokens: Tokens that all of these steps gave.
        plain_s: Seconds of each forward of one row without a draft.
    """

    n_tokens: int = 0
    plain_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TimeSaved:
    """Compares the steps of a text after its first token with as many plain steps as it has tokens.

    A plain step is taken to cost what the plain steps of the same text in contexts of about the same length cost. So
    nothing is known of a text that had no such steps.
    """

    _by_context: dict[int, _Steps] = field(default_factory=dict)
    _spent_s: float = 0.0

    def count(self, n_past: int, n_tokens: int, spent_s: float, plain_s: float | None) -> None:
        """Count a step after `n_past` tokens that gave `n_tokens`.

        Args:
            n_past: Tokens in the KV cache before the step.
            n_tokens: Tokens that the step gave.
            spent_s: Seconds of the step's forward, of proposing and of what drafters learned.
            plain_s: Seconds of a plain step's forward, as this step shows them; None where it had a draft, or shared
                its forward with other texts.
        """
        steps = self._by_context.setdefault((n_past // BUCKET).bit_length(), _Steps())
        steps.n_tokens += n_tokens
        self._spent_s += spent_s
        if plain_s is not None:
            steps.plain_s.append(plain_s)

    def seconds(self) -> float | None:
        """Return the seconds saved, below 0 where drafting cost time; None where plain steps were too few to know."""
        known = [steps for steps in self._by_context.values() if len(steps.plain_s) >= SURE]
        n_known, n_all = (sum(steps.n_tokens for steps in which) for which in (known, self._by_context.values()))
        if not n_known or n_all - n_known > NOTICED * n_all:
            return None
        plain_s = sum(steps.n_tokens * fmean(steps.plain_s) for steps in known)
        return plain_s * n_all / n_known - self._spent_s

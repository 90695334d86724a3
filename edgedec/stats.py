"""What a generation did and what it cost."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(slots=True)
class DecodeStats:
    """Counts and times of one generation; grows while it runs.

    Attributes:
        runtime: Name of the runtime.
        runtime_reason: Why it was chosen, where two were compared; else empty.
        seed: The seed used, given or drawn.
        lossy: What makes the text another than the whole model's: layers left out; empty where nothing does.
        n_prompt_tokens: Tokens of the prompt.
        n_reused_tokens: Of these, found in the KV cache.
        n_generated_tokens: Tokens generated, end tokens not counted.
        n_steps: Forwards after the prefill.
        n_drafts: Drafts verified; n_draft_tokens and n_accepted_tokens: their nodes, and those accepted.
        accepted_by_position: How often the node at each depth of a draft was accepted.
        draft_s, forward_s, verify_s, prefill_s: Time by phase. Prefill is the forward that ends with the first
            token; forward the others; verify includes sampling.
        first_token_s: From the request to the first token.
        total_s: From the request to the end.
        drafters: By drafter: its proposals ("nodes"), of those whose parents turned out right ("tried") how many were
            right ("right", verified or not), the seconds it took ("draft_s"), how many drafts came after their deadline
            ("late") and how often it failed ("failed"); of one that drafts while the target verifies also how many
            tokens it drafted then ("ahead") and how many of these were of use ("used").
        switching: Where two models wrote in turn: tokens by each ("large_tokens", "small_tokens"), how often the writer
            changed ("switches"), the mean entropy of the rows that they were drawn from ("entropy_bits"). Else empty.
        curve: Seconds of a forward by its rows, as known at the end, where drafts were possible.
        explanation: Why drafts were made or not, a sentence each.
        reasons: What a person may want to know: why drafting was off, why the text ended early.
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
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    switching: dict[str, float] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    explanation: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one; 0 where there is no second."""
        seconds = self.total_s - self.first_token_s
        return (self.n_generated_tokens - 1) / seconds if self.n_generated_tokens > 1 and seconds > 0 else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per draft, the bonus token not counted."""
        return self.n_accepted_tokens / self.n_drafts if self.n_drafts else 0.0

    def add_reason(self, reason: str) -> None:
        """Note something worth telling, once."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def count_draft(self, n_nodes: int, n_accepted: int) -> None:
        """Count one verified draft."""
        self.n_drafts += 1
        self.n_draft_tokens += n_nodes
        self.n_accepted_tokens += n_accepted
        missing = n_accepted - len(self.accepted_by_position)
        self.accepted_by_position.extend([0] * max(0, missing))
        for depth in range(n_accepted):
            self.accepted_by_position[depth] += 1

    def count_proposal(self, name: str, n_nodes: int, seconds: float) -> None:
        """Count what a drafter proposed before a step."""
        counts = self._of(name)
        counts["nodes"] += n_nodes
        counts["draft_s"] += seconds

    def count_failure(self, name: str, kind: Literal["late", "failed"]) -> None:
        """Count a draft that was left out, or the failure of a drafter."""
        self._of(name)[kind] += 1

    def note_ahead(self, name: str, n_ahead: int, n_used: int) -> None:
        """Note how many tokens a drafter has drafted while the target verified so far, and how many were of use."""
        counts = self._of(name)
        counts["ahead"], counts["used"] = n_ahead, n_used

    def _of(self, name: str) -> dict[str, float]:
        zeros = {"nodes": 0, "tried": 0, "right": 0, "draft_s": 0.0, "late": 0, "failed": 0}
        return self.drafters.setdefault(name, zeros)

    def count_outcome(self, name: str, n_tried: int, n_right: int) -> None:
        """Count what became of a drafter's proposal."""
        counts = self._of(name)
        counts["tried"] += n_tried
        counts["right"] += n_right

    def as_dict(self) -> dict[str, Any]:
        """Return everything, derived values included, as plain types for JSON."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s, "mean_accepted": self.mean_accepted}

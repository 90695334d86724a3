"""The statistics of a generation: what it did, what that cost, and what drafts saved."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from edgedec.callers import one_line


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
        plain_s: Time that as many plain steps would take as there are tokens after the first one, by the cost curve.
        saved_s: `plain_s`, less what the steps took by the cost curve; below 0 where drafting cost time. None where no
            step could have had a draft, or no forward was ever timed.
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
        miss: Why a prompt much like the kept one was read again, else empty. It shows up to 40 characters of each, so
            it is for the one who runs the model: no server sends it.
        reasons: Why drafting was off, and what became of drafters.
        notes: What a person should be told without asking, such as why the text ended early. None of it is on drafts.
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
    plain_s: float = 0.0
    saved_s: float | None = None
    drafters: dict[str, dict[str, float]] = field(default_factory=dict)
    chance_right: float | None = None
    constraint_logprob: float | None = None
    switching: dict[str, float] = field(default_factory=dict)
    curve: dict[int, float] = field(default_factory=dict)
    explanation: list[str] = field(default_factory=list)
    miss: str = field(default="", repr=False)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    __repr__ = one_line

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 for fewer than two tokens."""
        seconds = self.total_s - self.first_token_s
        return (self.n_generated_tokens - 1) / seconds if self.n_generated_tokens > 1 and seconds > 0 else 0.0

    @property
    def speedup(self) -> float | None:
        """How many times as fast as without drafts the text came after its first token; None where it is not known.

        Both times are the cost curve's, so that a busy moment counts for both. Never more than tokens over steps: no
        step is faster than a plain one.
        """
        if self.saved_s is None or self.plain_s <= 0:
            return None
        n_tokens, n_steps = min(self.n_generated_tokens, self.n_steps + self.n_accepted_tokens), max(self.n_steps, 1)
        return min(self.plain_s / (self.plain_s - self.saved_s), n_tokens / n_steps)

    @property
    def mean_accepted(self) -> float:
        """Accepted tokens per draft, bonus tokens not counted; 0 without a draft."""
        return self.n_accepted_tokens / self.n_drafts if self.n_drafts else 0.0

    def add_reason(self, reason: str) -> None:
        """Add a sentence to `reasons`, unless it is there already."""
        if reason not in self.reasons:
            self.reasons.append(reason)

    def add_note(self, note: str) -> None:
        """Add a sentence to `notes`, unless it is there already."""
        if note not in self.notes:
            self.notes.append(note)

    def count_draft(self, n_nodes: int, n_accepted: int) -> None:
        """Count a verified draft of `n_nodes` nodes."""
        self.n_drafts += 1
        self.n_draft_tokens += n_nodes
        self.n_accepted_tokens += n_accepted
        missing = n_accepted - len(self.accepted_by_position)
        self.accepted_by_position.extend([0] * max(0, missing))
        for depth in range(n_accepted):
            self.accepted_by_position[depth] += 1

    def count_saved(self, n_tokens: int, plain_s: float, step_s: float) -> None:
        """Count a step of `step_s` seconds that gave `n_tokens` tokens, where a plain step takes `plain_s` seconds."""
        self.plain_s += n_tokens * plain_s
        self.saved_s = (self.saved_s or 0.0) + n_tokens * plain_s - max(plain_s, step_s)

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

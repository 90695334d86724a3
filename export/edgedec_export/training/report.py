"""The report on a trained drafter: what of its drafts is accepted by kind of prompt, and what that brings here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec_export.training.simulation import Costs, Drafted, Outcome, best_outcome, reach, replay
from edgedec_runtimes.trained_heads.card import HeadCard, Promise

MOST_DRAFTED = 6
"""Tokens of the longest drafts that are looked at."""

LEAST_GAIN = 0.03
"""A drafter that is expected to bring less than this is said not to pay."""


@dataclass(frozen=True, slots=True)
class KindReport:
    """What a drafter brings on one kind of prompt.

    Attributes:
        kind: The kind; "all" for all together.
        n_tokens: Tokens that it was measured on.
        tokens_per_step: Tokens that a step adds with drafts of MOST_DRAFTED tokens.
        reach: The chance that such a draft is accepted up to its first, second, ... token.
        best: The fastest way to draft under this machine's cost curve.
    """

    kind: str
    n_tokens: int
    tokens_per_step: float
    reach: tuple[float, ...]
    best: Outcome


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What a drafter brings.

    Attributes:
        kinds: By kind of prompt, "all" last.
        price: What a draft is taken to cost, in plain steps.
        curve: Seconds of a forward by its rows, as measured on this machine.
        drafter: What the drafter is called in a sentence.
    """

    kinds: tuple[KindReport, ...]
    price: DraftPrice
    curve: dict[int, float]
    drafter: str = "the head"

    @property
    def all(self) -> KindReport:
        """All kinds together."""
        return self.kinds[-1]

    @property
    def pays(self) -> bool:
        """Whether the drafter is expected to make this machine faster."""
        return self.all.best.speed >= 1 + LEAST_GAIN

    @property
    def promise(self) -> Promise:
        """What the head's card promises."""
        return Promise(self.all.reach, {kind.kind: kind.reach for kind in self.kinds[:-1]})

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        kinds = {
            kind.kind: {
                "tokens": kind.n_tokens,
                "tokens_per_step": round(kind.tokens_per_step, 4),
                "reach": [round(chance, 4) for chance in kind.reach],
                "expected_speed": round(kind.best.speed, 4),
                "draft_tokens": kind.best.n_most,
                "least_sure": kind.best.least_sure,
            }
            for kind in self.kinds
        }
        curve = {str(n): seconds for n, seconds in self.curve.items()}
        price = {"draft": self.price.once, "drafted_token": self.price.level}
        return {"kinds": kinds, **price, "curve_s": curve, "pays": self.pays}

    def sentence(self) -> str:
        """Return in a sentence what to expect on this machine."""
        every, best = self.all, self.all.best
        said = f"{every.tokens_per_step:.2f} tokens a step on prompts that it did not learn from"
        if not self.pays:
            one, two = CostCurve(self.curve).up_to(2)
            return (
                f"{self.drafter} gives {said}, and does not pay here: a step of two rows takes {two / one:.2f} of a "
                f"plain one, and a draft of one token {self.price.of(1):.2f}"
            )
        return (
            f"{self.drafter} gives {said}: about {best.speed:.2f} times plain decoding here, with drafts of up to "
            f"{best.n_most} (simulated with this machine's cost curve)"
        )


def drafter_report(
    drafted: Sequence[Drafted], curve: CostCurve, price: DraftPrice, drafter: str = "the head"
) -> DrafterReport:
    """Return the report on what was drafted on answers held back.

    Args:
        drafted: The drafts.
        curve: The measured cost of forwards.
        price: What a draft costs, in plain steps.
        drafter: What the drafter is called in a sentence.
    """
    most = max((text.right.shape[1] for text in drafted), default=MOST_DRAFTED)
    costs = _costs(curve, price, most)
    kinds = sorted({text.kind for text in drafted})
    groups = [(kind, [text for text in drafted if text.kind == kind]) for kind in kinds]
    reports = tuple(_of(kind, texts, costs) for kind, texts in [*groups, ("all", list(drafted))])
    return DrafterReport(reports, price, curve.table(), drafter)


def _of(kind: str, texts: Sequence[Drafted], costs: Costs) -> KindReport:
    gained = replay(texts, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
    n_tokens = sum(len(text.right) for text in texts)
    chances = reach(texts, min([MOST_DRAFTED, *(text.right.shape[1] for text in texts)]))
    return KindReport(kind, n_tokens, gained, chances, best_outcome(texts, costs))


def _costs(curve: CostCurve, price: DraftPrice, most: int) -> Callable[[int], float]:
    seconds = curve.up_to(1 + most)
    return lambda n: seconds[n] / seconds[0] + price.of(n)


def drafted_token_share(card: HeadCard, n_target_bytes: int, bytes_per_output_row: float) -> float:
    """Return what a drafted token is expected to cost, in times of a plain step: its share of the bytes that are read.

    Args:
        card: The head, whose layer is counted at 8 bits a weight.
        n_target_bytes: Bytes of the target's weights that a plain step reads.
        bytes_per_output_row: Bytes of a row of the output matrix.
    """
    n_q, n_kv = card.n_head * card.head_dim, card.n_head_kv * card.head_dim
    layer = 2 * card.n_embd * (n_q + 2 * n_kv) + card.n_embd * n_q + 3 * card.n_embd * card.n_ff
    return (layer * 1.0625 + card.n_vocab_draft * bytes_per_output_row) / n_target_bytes

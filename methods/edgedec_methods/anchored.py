"""Anchored Decoding: a model writes as it likes, but its law stays within a budget of nats of a safe model's law.

Each token is drawn from the law nearest to the risky model's among those whose KL divergence from the safe model's law
is within what the budget allows: a geometric mean of both. A token may spend what earlier ones left, so the divergence
of a text of n tokens is at most n times the budget, over all texts together (the chain rule of the divergence). The
bound is that of the draw at temperature 1 without truncation. The paper's debt for a prompt that quotes, and its form
over bytes for two vocabularies, are left out.

Paper: He et al. 2026, arXiv:2602.07120
Option: `--method anchored:MODEL,nats=0.5`
For: a model that may recite, beside one of the same vocabulary that can't
Measured: over four answers of 96 tokens qwen2.5-coder-1.5b is 0.46 nats a token from the 0.5B; with nats=0.1 it spends
    0.097 (`edgedec run qwen2.5-coder-1.5b -t 1 --top-p 1 --method anchored:qwen2.5-coder-0.5b,nats=0.1 --explain`)
Status: study
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, argument
from edgedec.model import Forward, ForwardItem, Session
from edgedec.progress import OnProgress
from edgedec.stats import DecodeStats
from edgedec_methods.pair_session import PairSession, name_of

_HALVINGS = 24

Logs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Anchored:
    """Implements edgedec.companion.Companion: the options of Anchored Decoding.

    Attributes:
        safe_model: The model that the text stays near; named as the target is.
        nats: The budget of a token, 0 (the safe model alone) or more.

    Raises:
        RequestError: The safe model or the budget is missing, or the budget is below 0.
    """

    safe_model: str | os.PathLike[str] | None = None
    nats: float | None = None

    role: ClassVar[str] = "safe model"
    what: ClassVar[str] = "a model that stays near another one"

    def __post_init__(self) -> None:
        if self.safe_model is None or self.nats is None:
            raise RequestError(f"anchored decoding needs {argument('safe_model')} and {argument('nats')}; give both")
        if not 0 <= self.nats < float("inf"):
            raise RequestError(f"{argument('nats')} is {self.nats:g}; it must be 0 (the safe model alone) or more")

    @property
    def model(self) -> str | os.PathLike[str]:
        """The name of the safe model."""
        assert self.safe_model is not None, "it was required"
        return self.safe_model

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session whose rows are those of the target, within the budget of the safe model's."""
        assert self.nats is not None, "it was required"
        assert companion is not None, "there is a further model"
        return AnchoredSession(target, companion, self.nats)


def log_law(row: NDArray[np.float32]) -> Logs:
    """Return f64[n_vocab], the log-probabilities of a row of logits."""
    logs: Logs = row.astype(np.float64)
    logs -= logs.max()
    logs -= np.log(np.exp(logs).sum())
    return logs


def divergence(law: Logs, other: Logs) -> float:
    """Return KL(law || other) in nats, of two laws in log-probabilities."""
    p = np.exp(law)
    inside = p > 0
    return float((p[inside] * (law[inside] - other[inside])).sum())


def anchored(risky: Logs, safe: Logs, nats: float) -> tuple[Logs, float]:
    """Return the law nearest to `risky` that is at most `nats` from `safe`, and how far it is from `safe`.

    Among the laws p with KL(p || safe) <= nats, it has the least KL(p || risky): p is proportional to risky^x times
    safe^(1 - x), with the greatest x of 0 to 1 that keeps to the bound, found to 2**-24 from below.
    """
    if (spent := divergence(risky, safe)) <= nats:
        return risky, spent
    low, high, best = 0.0, 1.0, (safe, 0.0)
    for _ in range(_HALVINGS if nats > 0 else 0):
        x = (low + high) / 2
        mixed = safe + x * (risky - safe)
        mixed -= np.log(np.exp(mixed).sum())
        spent = divergence(mixed, safe)
        if spent <= nats:
            low, best = x, (mixed, spent)
        else:
            high = x
    return best


class AnchoredSession(PairSession):
    """Implements edgedec.model.Session on two sessions: its rows are the risky model's, kept near the safe model's.

    What is spent at a row depends on the rows before it back to the prompt's end, so it is a function of the text.

    Args:
        risky: A session of the model that writes.
        safe: A session of a model with the same vocabulary. The rows of neither may depend on how a prefill is cut.
        nats: The budget of a token.

    Attributes:
        spent: By row that a token is drawn from, the divergence from the safe model in nats.

    Raises:
        CapabilityError: The rows of a model depend on how a prefill is cut, or a model can't go back.
    """

    option = "safe_model"
    together = "mix their laws"

    def __init__(self, risky: Session, safe: Session, nats: float) -> None:
        super().__init__(risky, safe)
        self.nats = nats
        self.spent: list[float] = []

    @property
    def n_cached(self) -> int:
        """How many tokens of the text both models have evaluated."""
        return min(session.n_cached for session in self.sessions)

    def begin(self, n_prompt: int) -> None:
        """Begin a text whose first `n_prompt` tokens are its prompt."""
        super().begin(n_prompt)
        self.spent = []

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate a chain after the first `n_past` tokens of the text (raises as chain_of); see Session.forward."""
        tokens, n_past = self.chain_of(item), item.n_past
        end = n_past + len(tokens)
        row_places = {n_past + row for row in item.logit_rows.tolist()}
        places = sorted(row_places | set(range(max(n_past, self._first), end)))
        at = np.array(places, np.int32) - np.int32(n_past)
        both = [session.forward(tokens, n_past=n_past, rows=at, on_progress=on_progress) for session in self.sessions]
        spent = self.spent[: max(0, n_past - self._first)]
        rows = list[NDArray[np.float32]]()
        for place, risky, safe in zip(places, both[0].logits, both[1].logits, strict=True):
            row = np.array(risky, np.float32)
            if place >= self._first:
                law = log_law(row)
                near, cost = anchored(law, log_law(safe), self.nats * (len(spent) + 1) - sum(spent))
                spent.append(cost)
                row = row if near is law else near.astype(np.float32)
            if place in row_places:
                rows.append(row)
        self.spent = spent
        return Forward(np.array(rows, np.float32).reshape(len(rows), self.model.card.n_vocab), {}, both[0].ops)

    def _count(self, stats: DecodeStats) -> None:
        """Put into the statistics how far the text went from the safe model."""
        spent: Sequence[float] = self.spent[: stats.n_generated_tokens]
        if spent:
            name = name_of(self.sessions[1])
            stats.add_note(f"lossy: the text stays within {self.nats:g} nats a token of {name}")
            stats.explanation.append(
                f"anchored: {sum(spent):.3f} nats from {name} in {len(spent)} tokens, of at most "
                f"{self.nats * len(spent):.3f}"
            )

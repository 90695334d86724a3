"""How near the distributions of one model are to those of another, position by position."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.logit_ops import LogitOps

_TOP = 64  # most probable tokens of the whole model that are compared one by one; all others count as one token
_FLOOR = 1e-12  # the least probability in a logarithm


@dataclass(frozen=True, slots=True)
class Score:
    """How near a set of half-layers is to the whole model.

    Attributes:
        agreement: Share of the positions where the set's most probable token is the whole model's.
        overlap: Mean of the sum of min(p, q), the chance that a token drawn from q is accepted.
        kl: Mean of KL(p || q) in nats, over the whole model's 64 most probable tokens and all others as one token.
        n_positions: How many positions were compared.
    """

    agreement: float
    overlap: float
    kl: float
    n_positions: int


@dataclass(frozen=True, slots=True)
class Top:
    """The whole model's most probable tokens after a position.

    Attributes:
        best: The most probable one.
        ids: int64[k], all of them, in the order of their ids.
        p: f64[k], their probabilities.
    """

    best: int
    ids: NDArray[np.int64]
    p: NDArray[np.float64]

    @classmethod
    def of(cls, row: NDArray[np.float32], ops: LogitOps) -> "Top":
        """Return the most probable tokens of a row of logits (f32[n_vocab])."""
        ids = ops.top_k(row, min(_TOP, len(row)))
        return cls(ops.argmax(row), ids, _probabilities(row, ids, ops))


@dataclass(slots=True)
class ScoreSums:
    """Sums over the positions compared so far."""

    n: int = 0
    same: int = 0
    overlap: float = 0.0
    kl: float = 0.0

    def add(self, top: Top, row: NDArray[np.float32], ops: LogitOps) -> None:
        """Compare a row of logits (f32[n_vocab]) with the whole model's after the same position."""
        q = _probabilities(row, top.ids, ops)
        rest_p, rest_q = max(0.0, 1 - float(top.p.sum())), max(0.0, 1 - float(q.sum()))
        self.n += 1
        self.same += ops.argmax(row) == top.best
        self.overlap += float(np.minimum(top.p, q).sum()) + min(rest_p, rest_q)
        self.kl += float((top.p * np.log(np.maximum(top.p, _FLOOR) / np.maximum(q, _FLOOR))).sum())
        self.kl += rest_p * float(np.log(max(rest_p, _FLOOR) / max(rest_q, _FLOOR)))

    def score(self) -> Score:
        """Return the means."""
        n = max(1, self.n)
        return Score(self.same / n, self.overlap / n, self.kl / n, self.n)


def _probabilities(row: NDArray[np.float32], ids: NDArray[np.int64], ops: LogitOps) -> NDArray[np.float64]:
    """Return f64[k], the probabilities of these tokens by a row of logits."""
    total = ops.total(row)
    return np.exp(row[ids].astype(np.float64) - total.most) / total.weight

"""What drafting costs, and the fastest way to draft under it: bytes that are read, or rows that forwards get.

Drafts of a head, a block or a draft model cost the bytes that they read, as a share of what a plain step reads: some
once a round of drafting, some for each token. Prompt tokens and transferred states cost rows of the target's forward.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve
from edgedec_export.training.kinds import bytes_per_step
from edgedec_export.training.network import Weights
from edgedec_export.training.simulation import Drafted, Outcome, replay
from edgedec_export.training.target_parts import TargetParts

BYTES_PER_WEIGHT = 1.0625
"""Of a drafter's matrices, at 8 bits."""

_THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
_EXITS_SURE = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class DraftBytes:
    """The bytes that a draft reads.

    Attributes:
        round: Once, whatever the draft's length.
        tokens: For its first token, its second, ...
    """

    round: float
    tokens: tuple[float, ...]

    def of(self, n_tokens: int) -> float:
        """Return the bytes of a draft of so many tokens."""
        return self.round + sum(self.tokens[:n_tokens]) if n_tokens else 0.0

    @property
    def token(self) -> float:
        """The bytes of a token, in the mean of the longest draft."""
        return float(np.mean(self.tokens))


@dataclass(frozen=True, slots=True)
class Priced:
    """The fastest way to draft with a method.

    Attributes:
        outcome: What it brings.
        n_rows: Rows of a mean step's forward.
        bytes: The bytes that drafts read.
        way: The way in words.
    """

    outcome: Outcome
    n_rows: float
    bytes: DraftBytes
    way: str


class Price(Protocol):
    """What a method's drafts cost."""

    def best(self, drafted: Sequence[Drafted], curve: CostCurve) -> Priced:
        """Return the fastest way to draft, given what the method drafts and the cost of the target's forwards."""

    def chains(self, drafted: Sequence[Drafted]) -> list[Drafted]:
        """Return the method's surest chains, whatever they cost."""


def bytes_of(weights: Weights, names: Iterable[str]) -> float:
    """Return the bytes of matrices; vectors do not count."""
    n_weights: int = sum(weights[name].numel() for name in names if weights[name].ndim == 2)
    return BYTES_PER_WEIGHT * n_weights


@dataclass(frozen=True, slots=True)
class ByBytes:
    """Implements Price for drafts that read the same bytes whatever they are.

    Attributes:
        bytes: These bytes.
        step_bytes: What a plain step of the target reads.
    """

    bytes: DraftBytes
    step_bytes: int

    def best(self, drafted: Sequence[Drafted], curve: CostCurve) -> Priced:
        """Return the fastest way."""
        return _cheapest(drafted, self.bytes, self.step_bytes, curve)

    def chains(self, drafted: Sequence[Drafted]) -> list[Drafted]:
        """Return the drafts as they are."""
        return list(drafted)


def _cheapest(
    drafted: Sequence[Drafted], draft_bytes: DraftBytes, step_bytes: int, curve: CostCurve, prefix: str = ""
) -> Priced:
    """Return the fastest way over lengths and thresholds; the token that ends a draft too soon is paid for as well."""
    n_longest = drafted[0].right.shape[1]
    seconds = curve.up_to(1 + n_longest)

    def outcome(n_most: int, least_sure: float) -> Outcome:
        def costs(n_tokens: int) -> float:
            return seconds[n_tokens] / seconds[0] + draft_bytes.of(min(n_tokens + 1, n_most)) / step_bytes

        return replay(drafted, costs, n_most, least_sure)

    ways = (outcome(n_most, least) for n_most in range(1, n_longest + 1) for least in _THRESHOLDS)
    best = max((Outcome(0, 0.0, 1.0, 0.0, 1.0), *ways), key=lambda found: found.speed)
    way = f"{prefix}up to {best.n_most} tokens, probability {best.least_sure}"
    return Priced(best, 1 + best.drafted_per_step, draft_bytes, way)


@dataclass(frozen=True, slots=True)
class ByExits:
    """Implements Price for drafts with several exits: the shallowest whose token is sure enough is taken.

    The columns of the drafts are those of the first exit, then those of the second, and so on.

    Attributes:
        bytes: What a token reads that is looked for at the first exit only, at the first two, ...
        step_bytes: What a plain step of the target reads.
    """

    bytes: tuple[float, ...]
    step_bytes: int

    def best(self, drafted: Sequence[Drafted], curve: CostCurve) -> Priced:
        """Return the fastest way."""
        return max((self._at(drafted, sure, curve) for sure in _EXITS_SURE), key=lambda found: found.outcome.speed)

    def _at(self, drafted: Sequence[Drafted], sure: float, curve: CostCurve) -> Priced:
        taken = [self.taken(text, sure) for text in drafted]
        each = float(np.concatenate([exits.ravel() for _, exits in taken]).choose(self.bytes).mean())
        texts = [text for text, _ in taken]
        n_most = texts[0].right.shape[1]
        prefix = f"exits at probability {sure}, " if len(self.bytes) > 1 else ""
        return _cheapest(texts, DraftBytes(0.0, (each,) * n_most), self.step_bytes, curve, prefix)

    def taken(self, text: Drafted, sure: float) -> tuple[Drafted, NDArray[np.int64]]:
        """Return the drafts, and int64[n, K] for each token the number of its exit: the first at least so sure."""
        n_exits = len(self.bytes)
        sures, rights = (part.reshape(len(part), n_exits, -1) for part in (text.sure, text.right))
        enough = sures >= sure
        enough[:, -1] = True
        exits = enough.argmax(axis=1)
        right, sure_enough = (np.take_along_axis(part, exits[:, None], 1)[:, 0] for part in (rights, sures))
        return Drafted(text.kind, right.astype(np.bool_), sure_enough.astype(np.float32)), exits

    def chains(self, drafted: Sequence[Drafted]) -> list[Drafted]:
        """Return what the deepest exit drafts."""
        return [self.taken(text, 2.0)[0] for text in drafted]


@dataclass(frozen=True, slots=True)
class ByRows:
    """Implements Price for rows behind the rows of a forward that draft what comes after them.

    Attributes:
        below: The share of a forward below the layer at which these rows enter it.
    """

    below: float = 0.0

    def best(self, drafted: Sequence[Drafted], curve: CostCurve) -> Priced:
        """Return the fastest way."""
        n_most = drafted[0].right.shape[1]
        seconds = curve.up_to((n_most + 1) ** 2)

        def cost(n_tokens: int, n_rows: int) -> float:
            return (self.below * seconds[n_tokens - 1] + (1 - self.below) * seconds[n_rows - 1]) / seconds[0]

        best, n_rows, placed = best_placed(drafted, cost)
        return Priced(best, n_rows, DraftBytes(0.0, (0.0,)), f"rows {placed}, probability {best.least_sure}")

    def chains(self, drafted: Sequence[Drafted]) -> list[Drafted]:
        """Return the drafts as they are."""
        return list(drafted)


RowCosts = Callable[[int, int], float]
"""The time of a step whose forward has so many rows of tokens, and so many rows in all, in times of a plain step."""


def replay_placed(
    texts: Sequence[Drafted], cost: RowCosts, placed: Sequence[int], least_sure: float = 0.0
) -> tuple[Outcome, float]:
    """Return what rows behind rows bring on texts, and the rows of a mean step.

    A step's forward has a row for the newest token, one for each token of the draft, and drafting rows behind each of
    these. Behind which of them the text goes on is known only afterwards; the drafting rows there give the next draft.

    Args:
        texts: What drafting rows draft.
        cost: The time of a step.
        placed: How many drafting rows stand behind the newest token, behind the draft's first token, its second, ...
        least_sure: A draft ends before the token with which the product of its probabilities falls below this.
    """
    n_steps = n_tokens = n_drafted = n_rows = 0
    total = 0.0
    for text in texts:
        path = np.cumprod(text.sure, axis=1)
        lengths = (path >= least_sure).cumprod(axis=1).sum(axis=1)
        accepted = text.right.cumprod(axis=1).sum(axis=1)
        i, n_ready = 0, placed[0]
        while i < len(lengths):
            n = min(int(lengths[i]), n_ready, len(lengths) - i)
            kept, rows = min(int(accepted[i]), n), 1 + n + sum(placed[: n + 1])
            n_steps, n_drafted, n_rows, total = n_steps + 1, n_drafted + n, n_rows + rows, total + cost(1 + n, rows)
            n_tokens, i, n_ready = n_tokens + min(kept + 1, len(lengths) - i), i + kept + 1, placed[kept]
    outcome = Outcome(max(placed), least_sure, n_tokens / n_steps, n_drafted / n_steps, n_tokens / total)
    return outcome, n_rows / n_steps


def best_placed(texts: Sequence[Drafted], cost: RowCosts) -> tuple[Outcome, float, tuple[int, ...]]:
    """Return the fastest way to place drafting rows: what it brings, the rows of a mean step, and the places."""
    n_most = texts[0].right.shape[1]
    ways = [(*replay_placed(texts, cost, way, least), way) for way in _ways(n_most) for least in _THRESHOLDS]
    return max(ways, key=lambda way: way[0].speed)


def _ways(n_most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of drafting rows behind the newest token and each token of a draft: never more than before."""
    for way in product(range(n_most, -1, -1), repeat=n_most + 1):
        if way[0] > 0 and all(a >= b for a, b in pairwise(way)):
            yield way


def by_bytes(draft_bytes: DraftBytes, parts: TargetParts) -> ByBytes:
    """Return the price of drafts for a target."""
    return ByBytes(draft_bytes, bytes_per_step(parts))

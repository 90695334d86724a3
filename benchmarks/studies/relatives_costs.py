"""What drafting costs: bytes that each kind of head reads, and rows that prompt tokens add to forwards."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product

import numpy as np
from relatives_heads import HeadShape

from edgedec.cost_curve import CostCurve
from edgedec_export.training.report import drafted_token_share
from edgedec_export.training.simulation import Costs, Drafted, Outcome
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard

BYTES_PER_WEIGHT = 1.0625
"""Of a head's matrices, at 8 bits."""

_THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)

DraftBytes = Callable[[int], float]
"""The bytes that are read to draft so many tokens."""


def step_bytes(parts: TargetParts) -> int:
    """Return the bytes of the target's weights that a plain step reads: all, but an embedding matrix of its own."""
    tensors = parts.gguf.tensors
    own = tensors["token_embd.weight"].n_bytes if "output.weight" in tensors else 0
    return sum(tensor.n_bytes for tensor in tensors.values()) - own


def row_bytes(parts: TargetParts) -> float:
    """Return the bytes of a row of the target's output matrix."""
    tensors = parts.gguf.tensors
    output = tensors.get("output.weight", tensors["token_embd.weight"])
    return output.n_bytes / output.shape[1]


def eagle3_bytes(card: HeadCard, parts: TargetParts) -> DraftBytes:
    """Return what an EAGLE-3 head reads: its layer and the output rows for each token; fc, once a step, is left out."""
    each = drafted_token_share(card, 1, row_bytes(parts))
    return lambda n: n * each


def heads_bytes(shape: HeadShape, n_vocab_draft: int, parts: TargetParts) -> DraftBytes:
    """Return what Medusa or Hydra heads read.

    Medusa's heads need nothing of each other, so their products with the output rows are one; a Hydra head waits for
    the token of the one before.
    """
    rows = n_vocab_draft * row_bytes(parts)
    matrices = [BYTES_PER_WEIGHT * shape.n_weights(k) for k in range(shape.n_heads)]

    def read(n: int) -> float:
        return sum(matrices[:n]) + rows * (n if shape.reads_drafts else min(n, 1))

    return read


def costs_of(curve: CostCurve, draft_bytes: DraftBytes, n_step_bytes: int, n_most: int) -> Costs:
    """Return the time of a step by its drafted tokens, in times of a plain step."""
    seconds = curve.up_to(1 + n_most)
    return lambda n: seconds[n] / seconds[0] + draft_bytes(n) / n_step_bytes


def replay_prompt_tokens(
    texts: Sequence[Drafted], seconds: Sequence[float], placed: Sequence[int], least_sure: float = 0.0
) -> tuple[Outcome, float]:
    """Return what prompt tokens bring on texts, and the rows of a mean step.

    A step's forward has a row for the newest token, one for each token of the draft, and prompt tokens behind each of
    these rows. Behind which of them the text goes on is known only afterwards; the prompt tokens there are the next
    draft.

    Args:
        texts: What prompt tokens draft.
        seconds: Of forwards of 1, 2, ... rows.
        placed: How many prompt tokens stand behind the newest token, behind the draft's first token, its second, ...
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
            n_steps, n_drafted, n_rows, total = n_steps + 1, n_drafted + n, n_rows + rows, total + seconds[rows - 1]
            n_tokens, i, n_ready = n_tokens + min(kept + 1, len(lengths) - i), i + kept + 1, placed[kept]
    speed = n_tokens * seconds[0] / total
    outcome = Outcome(max(placed), least_sure, n_tokens / n_steps, n_drafted / n_steps, speed)
    return outcome, n_rows / n_steps


def best_prompt_tokens(texts: Sequence[Drafted], seconds: Sequence[float]) -> tuple[Outcome, float, tuple[int, ...]]:
    """Return the fastest way to place prompt tokens: what it brings, the rows of a mean step, and the places."""
    n_most = texts[0].right.shape[1]
    ways = [(*replay_prompt_tokens(texts, seconds, way, least), way) for way in _ways(n_most) for least in _THRESHOLDS]
    return max(ways, key=lambda way: way[0].speed)


def _ways(n_most: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of prompt tokens behind the newest token and each token of a draft: never more than before."""
    for way in product(range(n_most, -1, -1), repeat=n_most + 1):
        if way[0] > 0 and all(a >= b for a, b in pairwise(way)):
            yield way

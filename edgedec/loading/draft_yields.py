"""The tokens that a verifying forward brings, by its rows, as recorded once on real texts.

Two runtimes are compared before a text is generated, by what the scheduler will get out of each, so the comparison
needs to know what drafts bring. It must not learn that from a user's requests, as the runtime may change the text.

The table was recorded with qwen2.5-coder-1.5b (Q4_K_M) and the drafters of `auto`: 20 prompts of five tasks, up to 160
tokens each, every text begun with empty stores. The table holds no times, so every machine makes the same one:

    edgedec bench qwen2.5-coder-1.5b --runtime cpu --rows ROWS.jsonl
    python -m edgedec_apps.bench.draft_yields ROWS.jsonl
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """The positions of the recorded texts at which drafts promised about the same.

    Attributes:
        share: The share of all positions that these are, 0 to 1.
        tokens: The mean tokens that a forward brings at these positions, by its rows: a draft's nodes and one.
    """

    share: float
    tokens: Mapping[int, float]


ROWS = (1, 2, 4, 8)
"""Rows of the forwards in the table: a plain step, and drafts of 1, 3 and 7 nodes."""
PROMPT_TOKENS = 1.50
"""Tokens of a prompt to each token of an answer, in the recorded texts."""
KINDS: tuple[Kind, ...] = (
    Kind(0.0705, {1: 1.000, 2: 1.000, 4: 1.000, 8: 1.000}),
    Kind(0.1079, {1: 1.000, 2: 1.181, 4: 1.332, 8: 1.383}),
    Kind(0.0841, {1: 1.000, 2: 1.222, 4: 1.468, 8: 1.630}),
    Kind(0.1449, {1: 1.000, 2: 1.355, 4: 1.696, 8: 2.065}),
    Kind(0.1515, {1: 1.000, 2: 1.586, 4: 2.260, 8: 2.910}),
    Kind(0.1203, {1: 1.000, 2: 1.816, 4: 3.149, 8: 4.913}),
    Kind(0.3209, {1: 1.000, 2: 1.982, 4: 3.902, 8: 7.556}),
)
"""All positions, from those where drafts promised least to those where they promised most."""


def seconds_per_token(seconds: Mapping[int, float], kinds: Sequence[Kind] = KINDS) -> float:
    """Return the mean seconds of a token where each kind of position gets the number of rows that pays most.

    Args:
        seconds: Seconds of a forward by its rows, one row among them; rows that are not in the table are ignored.
        kinds: The kinds of positions.

    >>> kinds = (Kind(0.5, {1: 1.0, 8: 1.0}), Kind(0.5, {1: 1.0, 8: 5.0}))
    >>> seconds_per_token({1: 0.10, 8: 0.20}, kinds)
    0.07
    """
    fastest = [
        min(seconds[n_rows] / n_tokens for n_rows, n_tokens in kind.tokens.items() if n_rows in seconds)
        for kind in kinds
    ]
    weighted = sum(kind.share * found for kind, found in zip(kinds, fastest, strict=True))
    return weighted / sum(kind.share for kind in kinds)  # shares are rounded

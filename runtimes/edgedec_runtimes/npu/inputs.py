"""Makes the inputs of an NPU's graph that depend on positions only.

Rotary positions (Su et al. 2021, arXiv:2104.09864) are tables of cosines and sines; a mask says what each row sees.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.npu.facts import Facts

_HIDDEN, _VISIBLE = 0, 65535

Arrays = dict[str, NDArray[Any]]


def position_inputs(facts: Facts, start: int, n_rows: int, context: int) -> Arrays:
    """Return cosines, sines and masks of n_rows rows after `start` cached tokens.

    Returns:
        By name cos and sin, uint16[n_rows, 1, head_dim], and mask, uint16[n_groups * n_rows, context + n_rows],
        quantized as the facts say; where there are sliding windows, the same again with the suffix "_local".
    """
    arrays: Arrays = {}
    for suffix, frequencies in facts.frequencies.items():
        cos, sin = rotation(frequencies, start, n_rows, facts.head_dim)
        arrays[f"cos{suffix}"] = facts.quantizers["rotation"].quantize(cos)
        arrays[f"sin{suffix}"] = facts.quantizers["rotation"].quantize(sin)
        seen = visible(start, n_rows, context, facts.sliding_window if suffix else 0)
        mask = np.where(seen, np.uint16(_VISIBLE), np.uint16(_HIDDEN))
        arrays[f"mask{suffix}"] = np.tile(mask, (facts.n_groups, 1))
    return arrays


def rotation(
    frequencies: NDArray[np.float64], start: int, n_rows: int, head_dim: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cosines and the sines of a rotation, each f64[n_rows, 1, head_dim].

    A head is rotated in halves: [a, b] becomes [a, b] * cos + [b, a] * sin, so the sines of the first half are
    negative. Elements that are not rotated get 1 and 0.
    """
    half = len(frequencies)
    angles = (start + np.arange(n_rows))[:, None] * frequencies
    cos, sin = np.ones((n_rows, 1, head_dim)), np.zeros((n_rows, 1, head_dim))
    cos[:, 0, :half] = cos[:, 0, half : 2 * half] = np.cos(angles)
    sin[:, 0, half : 2 * half] = np.sin(angles)
    sin[:, 0, :half] = -sin[:, 0, half : 2 * half]
    return cos, sin


def visible(start: int, n_rows: int, context: int, window: int) -> NDArray[np.bool_]:
    """Return bool[n_rows, context + n_rows]: the cached tokens and then the new rows that each row sees.

    >>> visible(1, 2, 2, 0).astype(int).tolist()
    [[1, 0, 1, 0], [1, 0, 1, 1]]
    """
    places = start + np.arange(n_rows)[:, None]
    # A slot without a token gets a position that no row sees.
    cached = np.where(np.arange(context) < start, np.arange(context), np.iinfo(np.int32).max)
    distance = places - np.concatenate((cached, places[:, 0]))
    seen: NDArray[np.bool_] = distance >= 0
    return seen & (distance < window) if window else seen


def quantized(facts: Facts, hidden: NDArray[np.floating]) -> NDArray[Any]:
    """Return rows of the embedding as the graph takes them: scaled and quantized, uint16 of the same shape."""
    return facts.quantizers["hidden"].quantize(hidden.astype(np.float32) * np.float32(facts.embedding_scale))


def shapes(facts: Facts, n_rows: int, context: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of one layer's cached keys and values, and of the rows that a run of the graph adds to them."""
    kv, head = facts.n_head_kv, facts.head_dim
    return {
        "past_key": (kv, head, context),
        "past_value": (kv, context, head),
        "new_key": (kv, head, n_rows),
        "new_value": (kv, n_rows, head),
    }

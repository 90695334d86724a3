"""Sets of half-layers, and tuned sets, which are kept on the disk.

A half-layer is the attention or the feed-forward block of a layer; leaving one out passes the hidden state through
(SWIFT, Xia et al. 2024, arXiv:2410.06161). The first and the last layer always run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve, DraftPrice, best_length
from edgedec.errors import StorageError
from edgedec.model import LayerSet
from edgedec.model_card import ModelCard
from edgedec.storage import probe_cache

_KIND, _LOSSY_KIND = "draft-layer-set", "lossy-layer-set"
_MOST_COST = 10.0  # times a whole token's: a higher cost was not measured soundly

Half = tuple[int, int]
"""A half-layer: its layer, and 0 for attention or 1 for feed-forward."""


def without(n_layer: int, left_out: Sequence[Half]) -> LayerSet:
    """Return the set of all half-layers but these.

    >>> without(3, [(1, 1)]).mlp.tolist()
    [True, False, True]
    """
    mask = np.ones((n_layer, 2), np.bool_)
    for layer, half in left_out:
        mask[layer, half] = False
    return LayerSet(mask[:, 0].copy(), mask[:, 1].copy())


def left_out(layers: LayerSet) -> list[Half]:
    """Return the half-layers that a set leaves out, in order."""
    return [(int(layer), int(half)) for layer, half in np.argwhere(~layers.mask)]


def evenly_spaced(n_layer: int, n_out: int) -> LayerSet:
    """Return the set that leaves out `n_out` whole layers at even distances (Unified Layer Skipping).

    >>> left_out(evenly_spaced(6, 2))
    [(2, 0), (2, 1), (3, 0), (3, 1)]
    >>> sorted({layer for layer, _ in left_out(evenly_spaced(28, 7))})
    [3, 7, 10, 14, 17, 20, 24]
    """
    inner = max(0, n_layer - 2)
    n_out = min(n_out, inner)
    left_in = {round((i + 1) * (n_layer - 1) / (n_out + 1)) for i in range(n_out)}
    out = sorted(layer for layer in left_in if 0 < layer < n_layer - 1)
    return without(n_layer, [(layer, half) for layer in out for half in (0, 1)])


@dataclass(frozen=True, slots=True)
class TunedSet:
    """A set of half-layers that a search found, with what was measured of it.

    Attributes:
        share: The share of a whole token's bytes that a token through the set reads.
        cost: The measured time of a token through the set, as a share of a whole token's.
        agreement: Share of held-back positions where the set's most probable token is the whole model's.
        n_positions: How many positions those were.
    """

    layers: LayerSet
    share: float
    cost: float
    agreement: float
    n_positions: int

    def promised_gain(self, curve: CostCurve, n_max: int) -> float:
        """Return how many times as fast as plain decoding drafts with the set would be, by the cost curve.

        The result is 0 where nothing was measured, or where no draft can be verified.

        >>> tuned = TunedSet(LayerSet.of(4, [0, 3]), 0.5, 0.5, 0.8, 2000)
        >>> round(tuned.promised_gain(CostCurve({1: 0.10, 2: 0.11}), 1), 3)
        1.125
        """
        whole_s = curve.seconds(1)
        if whole_s is None or n_max < 1:
            return 0.0
        cost = curve.up_to(n_max + 1).__getitem__
        return best_length(self.agreement, DraftPrice(self.cost * whole_s), cost, n_max, 1 / whole_s)[1]


def keep_tuned_set(cache_dir: Path, card: ModelCard, tuned: TunedSet, *, lossy: bool = False) -> None:
    """Keep a set under a model's fingerprint below the cache folder, in place of an earlier one.

    The set to draft with and the set to use where nothing is verified (`lossy`) are kept apart.

    Raises:
        StorageError: The set can't be written.
    """
    document = {
        "fingerprint": card.fingerprint,
        "attn": tuned.layers.attn.astype(int).tolist(),
        "mlp": tuned.layers.mlp.astype(int).tolist(),
        "share": tuned.share,
        "cost": tuned.cost,
        "agreement": tuned.agreement,
        "n_positions": tuned.n_positions,
    }
    kind = _LOSSY_KIND if lossy else _KIND
    probe_cache.put(cache_dir, kind, card.fingerprint, document)
    if probe_cache.get(cache_dir, kind, card.fingerprint) != document:
        raise StorageError(f"the set of layers can't be written below {cache_dir}; make that folder writable")


def tuned_set(cache_dir: Path | None, card: ModelCard, *, lossy: bool = False) -> TunedSet | None:
    """Return the set that is kept for a model; None where there is none, or it is damaged, or another model's."""
    stored = probe_cache.get(cache_dir, _LOSSY_KIND if lossy else _KIND, card.fingerprint)
    if not isinstance(stored, dict) or stored.get("fingerprint") != card.fingerprint:
        return None
    attn, mlp = (_switches(stored.get(name), card.n_layer) for name in ("attn", "mlp"))
    share, cost, agreement = (_number(stored.get(name)) for name in ("share", "cost", "agreement"))
    n_positions = stored.get("n_positions")
    if attn is None or mlp is None or type(n_positions) is not int or n_positions < 1:
        return None
    if not (0 < share <= 1 and 0 < cost < _MOST_COST and 0 <= agreement <= 1):
        return None
    return TunedSet(LayerSet(attn, mlp), share, cost, agreement, n_positions)


def _switches(entry: Any, n_layer: int) -> NDArray[np.bool_] | None:
    """Return bool[n_layer] of a list of 0 and 1; None for anything else."""
    if not isinstance(entry, list) or len(entry) != n_layer or any(value not in (0, 1) for value in entry):
        return None
    return np.array(entry, np.bool_)


def _number(value: Any) -> float:
    """Return a finite number; -1 for anything else."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else -1.0

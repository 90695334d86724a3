"""Sets of half-layers, the bytes that a token through a set reads, and tuned sets, which are kept on the disk.

A half-layer is the attention or the feed-forward block of a layer; leaving one out passes the hidden state through
(SWIFT, Xia et al. 2024, arXiv:2410.06161). The first and the last layer always run.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError, StorageError
from edgedec.gguf.file import GGUF, is_onnx, read_header_of
from edgedec.gguf.model_info import describe
from edgedec.model import LayerSet, ModelCard
from edgedec.storage import probe_cache

_KIND, _LOSSY_KIND = "draft-layer-set", "lossy-layer-set"
_MOST_COST = 10.0  # times a whole token's: a higher cost was not measured soundly
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

Half = tuple[int, int]
"""A half-layer: its layer, and 0 for attention or 1 for feed-forward."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """How many bytes of weights a token reads.

    Attributes:
        halves: int64[n_layer, 2], for each layer those of its attention block and of its feed-forward block.
        rest: Those of the last norm and the head, which always run.
    """

    halves: NDArray[np.int64]
    rest: int

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.halves)

    @property
    def total(self) -> int:
        """Bytes of a whole token."""
        return int(self.halves.sum()) + self.rest

    def share(self, layers: LayerSet) -> float:
        """Return the share of a whole token's bytes that a token through these half-layers reads.

        >>> LayerBytes(np.array([[10, 30], [10, 30]]), 20).share(LayerSet.of(2, [0]))
        0.6
        """
        return (int(self.halves[as_mask(layers)].sum()) + self.rest) / self.total


def layer_bytes(path: Path) -> LayerBytes:
    """Return the bytes that a token of a GGUF model or of an export reads (raises what read_gguf raises).

    Of a mixture of experts, only those that a token goes through count.
    An export's header has no tensors: its weights are counted by the sizes that the header names, each as one byte.

    Raises:
        RequestError: The file has no layers of the usual names.
    """
    gguf = read_header_of(path)
    if is_onnx(path):
        return _layer_weights(gguf)
    places: list[tuple[int, int, int]] = []
    rest, chosen = 0, _chosen_experts(gguf)
    for name, tensor in gguf.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            is_mlp = match[2].startswith(("ffn_", "post_ffw_"))
            share = chosen if "_exps." in match[2] else Fraction(1)
            places.append((int(match[1]), int(is_mlp), int(tensor.n_bytes * share)))
        elif name.startswith("output") or (name == "token_embd.weight" and "output.weight" not in gguf.tensors):
            rest += tensor.n_bytes
    if not places:
        raise RequestError(
            f"{path} has no tensor called blk.N.*, so the bytes of each half-layer are unknown; take a model with the "
            "usual names"
        )
    halves = np.zeros((max(layer for layer, _, _ in places) + 1, 2), np.int64)
    for layer, half, n_bytes in places:
        halves[layer, half] += n_bytes
    return LayerBytes(halves, rest)


def _chosen_experts(gguf: GGUF) -> Fraction:
    """Return the share of its experts that a token goes through; 1 for a model without experts."""
    if not any("_exps." in name for name in gguf.tensors):
        return Fraction(1)
    info = describe(gguf)
    return Fraction(info.n_expert_used, info.n_expert) if info.n_expert else Fraction(1)


def _layer_weights(gguf: GGUF) -> LayerBytes:
    """Return the weights of each half-layer: four matrices of attention, three of a gated feed-forward block."""
    info = describe(gguf)
    if info.n_ff is None:
        raise RequestError(
            f"{gguf.paths[0]} does not say feed_forward_length, so the bytes of each half-layer are unknown; "
            "export the model again"
        )
    attn = [
        info.n_embd * (n_head + n_head_kv) * (info.key_length + info.value_length)
        for n_head, n_head_kv in zip(info.n_head, info.n_head_kv, strict=True)
    ]
    mlp = [3 * info.n_embd * width for width in info.n_ff]
    return LayerBytes(np.array([attn, mlp], np.int64).T.copy(), info.n_embd * info.n_vocab)


def as_mask(layers: LayerSet) -> NDArray[np.bool_]:
    """Return bool[n_layer, 2]: whether each layer's attention and feed-forward block run."""
    return np.stack([layers.attn, layers.mlp], axis=1)


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
    return [(int(layer), int(half)) for layer, half in np.argwhere(~as_mask(layers))]


def evenly_spaced(n_layer: int, n_out: int) -> LayerSet:
    """Return the set that leaves out `n_out` whole layers at even distances (Unified Layer Skipping).

    >>> left_out(evenly_spaced(6, 2))
    [(2, 0), (2, 1), (3, 0), (3, 1)]
    >>> sorted({layer for layer, _ in left_out(evenly_spaced(28, 7))})
    [3, 7, 10, 14, 17, 20, 24]
    """
    inner = max(0, n_layer - 2)
    n_out = min(n_out, inner)
    kept = {round((i + 1) * (n_layer - 1) / (n_out + 1)) for i in range(n_out)}
    out = sorted(layer for layer in kept if 0 < layer < n_layer - 1)
    return without(n_layer, [(layer, half) for layer in out for half in (0, 1)])


def late_layers(n_layer: int, n_out: int) -> LayerSet:
    """Return the set that leaves out the `n_out` layers before the last."""
    out = range(max(1, n_layer - 1 - n_out), n_layer - 1)
    return without(n_layer, [(layer, half) for layer in out for half in (0, 1)])


def first_layers(n_layer: int, n_run: int) -> LayerSet:
    """Return the set of the first `n_run` layers: an early exit."""
    return LayerSet.of(n_layer, range(min(max(1, n_run), n_layer)))


@dataclass(frozen=True, slots=True)
class TunedSet:
    """A set of half-layers that a search found, with what was measured of it.

    Attributes:
        layers: The set.
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


def keep_tuned_set(cache_dir: Path, card: ModelCard, found: TunedSet, *, lossy: bool = False) -> None:
    """Keep a set under a model's fingerprint below the cache folder, in place of an earlier one.

    The set to draft with and the set to use where nothing is verified (`lossy`) are kept apart.

    Raises:
        StorageError: The set can't be written.
    """
    document = {
        "fingerprint": card.fingerprint,
        "attn": found.layers.attn.astype(int).tolist(),
        "mlp": found.layers.mlp.astype(int).tolist(),
        "share": found.share,
        "cost": found.cost,
        "agreement": found.agreement,
        "n_positions": found.n_positions,
    }
    kind = _LOSSY_KIND if lossy else _KIND
    probe_cache.put(cache_dir, kind, card.fingerprint, document)
    if probe_cache.get(cache_dir, kind, card.fingerprint) != document:
        raise StorageError(f"the set of layers can't be written below {cache_dir}; make that folder writable")


def tuned_set(cache_dir: Path | None, card: ModelCard, *, lossy: bool = False) -> TunedSet | None:
    """Return the set that is kept for a model; None where there is none, or it is damaged, or another model's."""
    found = probe_cache.get(cache_dir, _LOSSY_KIND if lossy else _KIND, card.fingerprint)
    if not isinstance(found, dict) or found.get("fingerprint") != card.fingerprint:
        return None
    attn, mlp = (_switches(found.get(name), card.n_layer) for name in ("attn", "mlp"))
    share, cost, agreement = (_number(found.get(name)) for name in ("share", "cost", "agreement"))
    n_positions = found.get("n_positions")
    if attn is None or mlp is None or type(n_positions) is not int or n_positions < 1:
        return None
    if not (0 < share <= 1 and 0 < cost < _MOST_COST and 0 <= agreement <= 1):
        return None
    return TunedSet(LayerSet(attn, mlp), share, cost, agreement, n_positions)


def _switches(found: Any, n_layer: int) -> NDArray[np.bool_] | None:
    """Return bool[n_layer] of a list of 0 and 1; None for anything else."""
    if not isinstance(found, list) or len(found) != n_layer or any(value not in (0, 1) for value in found):
        return None
    return np.array(found, np.bool_)


def _number(found: Any) -> float:
    """Return a finite number; -1 for anything else."""
    return float(found) if type(found) in (int, float) and math.isfinite(found) else -1.0

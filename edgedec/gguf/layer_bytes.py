"""The bytes that a token of a model reads, by half-layer: of all layers, or of those that run."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, is_onnx, read_header_of
from edgedec.gguf.metadata import get_int
from edgedec.gguf.model_info import describe
from edgedec.model import LayerSet

_MAX_LOOPS = 512
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


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
        return (int(self.halves[layers.mask].sum()) + self.rest) / self.total


def layer_bytes(path: Path) -> LayerBytes:
    """Return the bytes that a token of a GGUF model or of an export reads (raises what read_gguf raises).

    Layers that only predict further tokens (nextn) are left out. Of a mixture of experts, only those that a token goes
    through count.
    An export's header has no tensors: its weights are counted by the sizes that the header names, each as one byte.

    Raises:
        RequestError: The file has no layers of the usual names.
    """
    gguf = read_header_of(path)
    if is_onnx(path):
        return _layer_weights(gguf)
    places: list[tuple[int, int, int]] = []
    rest, chosen = 0, _chosen_experts(gguf)
    tied = "" if "output.weight" in gguf.tensors else "token_embd.weight"
    of_nextn = {name.split(".")[1] for name in gguf.tensors if ".nextn." in name}
    for name, tensor in gguf.tensors.items():
        match = _LAYER.fullmatch(name)
        if match is not None and match[1] in of_nextn:
            continue
        if match is not None:
            is_mlp = match[2].startswith(("ffn_", "pre_ffw_", "post_ffw_", "inp_gate.", "proj.", "post_norm."))
            share = chosen if "_exps." in match[2] else Fraction(1)
            places.append((int(match[1]), int(is_mlp), int(tensor.n_bytes * share)))
        elif name.startswith(("output", "per_layer_model_proj")) or name == tied:
            rest += tensor.n_bytes
    if not places:
        raise RequestError(
            f"{path} has no tensor called blk.N.*, so the bytes of each half-layer are unknown; take a model with the "
            "usual names"
        )
    halves = np.zeros((max(layer for layer, _, _ in places) + 1, 2), np.int64)
    for layer, half, n_bytes in places:
        halves[layer, half] += n_bytes
    n_loops = get_int(gguf, f"{gguf.metadata.get('general.architecture')}.num_loops", at_least=1, at_most=_MAX_LOOPS)
    return LayerBytes(np.tile(halves, (n_loops or 1, 1)), rest)


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

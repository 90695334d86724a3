"""Tiny random models with a nextn layer, and what the layer scores by plain formulas.

    path = write_nextn(folder / "m.gguf", Tiny("qwen3"))
    logits = PlainNextn(folder, Tiny("qwen3")).scores(states, text, drafted)

The formulas around the layer are float64. The layer itself runs on the reference runtime, as the last layer of an
ordinary model: the nextn layer of a file is a layer like the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import RowGroup, Span
from edgedec_runtimes.reference.runtime import Reference
from support.forwards import evaluated
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
OWN = ("shared_head_norm", "shared_head_head", "embed_tokens")
"""What a nextn layer may have in place of the model's last norm, output matrix and embeddings."""
EPSILON = 1e-5  # of tiny_metadata


def nextn_tensors(tiny: Tiny, own: Sequence[str] = OWN[:1], n_nextn: int = 1) -> dict[str, RawTensor]:
    """Return the tensors of a model and of nextn layers behind it; `own` are those of OWN that the layers have."""
    tensors = tiny_tensors(replace(tiny, n_layer=tiny.n_layer + n_nextn))
    rng = np.random.default_rng(tiny.seed + 99)

    def floats(*shape: int, scale: float, mean: float = 0.0) -> RawTensor:
        values = (mean + scale * rng.standard_normal(shape)).astype(np.float32)
        return RawTensor(GGMLType.F32, shape[::-1], values.tobytes())

    n = tiny.n_embd
    for layer in range(tiny.n_layer, tiny.n_layer + n_nextn):
        prefix = f"blk.{layer}.nextn"
        tensors[f"{prefix}.eh_proj.weight"] = floats(n, 2 * n, scale=(2 * n) ** -0.5)
        for norm in ("enorm", "hnorm", *({"shared_head_norm"} & {*own})):
            tensors[f"{prefix}.{norm}.weight"] = floats(n, scale=0.2, mean=1.0)
        for matrix in {"shared_head_head", "embed_tokens"} & {*own}:
            tensors[f"{prefix}.{matrix}.weight"] = floats(N_VOCAB, n, scale=2 * n**-0.5)
    return tensors


def nextn_metadata(tiny: Tiny, n_nextn: int = 1) -> dict[str, Any]:
    """Return the metadata of a model with nextn layers."""
    whole = tiny_metadata(replace(tiny, n_layer=tiny.n_layer + n_nextn))
    return whole | {f"{tiny.architecture}.nextn_predict_layers": n_nextn}


def write_nextn(path: Path, tiny: Tiny, own: Sequence[str] = OWN[:1], *, n_nextn: int = 1, alone: bool = False) -> Path:
    """Write a model with nextn layers and return its path; with `alone`, leave out the model's own layers."""
    tensors = nextn_tensors(tiny, own, n_nextn)
    first = tuple(f"blk.{layer}." for layer in range(tiny.n_layer))
    kept = {name: tensor for name, tensor in tensors.items() if not (alone and name.startswith(first))}
    return write_gguf(path, nextn_metadata(tiny, n_nextn), kept)


@dataclass(frozen=True, slots=True)
class PlainNextn:
    """The nextn layer of a model that write_nextn() wrote, by plain formulas.

    Attributes:
        folder: Where the model of the layer is written.
        tiny: The model; of F32 tensors.
        own: As in write_nextn().
    """

    folder: Path
    tiny: Tiny
    own: Sequence[str] = OWN[:1]

    def scores(self, states: F32, text: Sequence[int], drafted: Sequence[int]) -> F32:
        """Return the scores of what follows a text, and of what follows each drafted token.

        Args:
            states: float32[len(text) - 1, n_embd], what leaves the model's last layer at each token but the newest.
            text: The tokens.
            drafted: Tokens that are read behind the text.

        Returns:
            float32[len(drafted) + 1, n_vocab].
        """
        tensors, layer = nextn_tensors(self.tiny, self.own), self.tiny.n_layer
        named = {name.removeprefix(f"blk.{layer}.nextn.").removesuffix(".weight"): t for name, t in tensors.items()}
        w = {name: _floats(tensor) for name, tensor in named.items()}
        final, embedding = _floats(tensors["output_norm.weight"]), w.get("embed_tokens", w["token_embd"])
        last_norm = w.get("shared_head_norm", final)
        rows: list[F32] = []
        with Reference().load(self._layer_alone(tensors), LoadOptions(n_ctx=256, kv_type="f32")) as model:
            session = model.session(200)
            state = np.zeros(self.tiny.n_embd)
            for i, token in enumerate([*text[1:], *drafted]):
                state = _norm(states[i].astype(np.float64), final) if i < len(states) else state
                pair = np.concatenate([_norm(embedding[token], w["enorm"]), _norm(state, w["hnorm"])])
                x = (w["eh_proj"] @ pair).astype(np.float32)[None]
                result = evaluated(session, i, RowGroup(vectors=x, span=Span(enter=1)), taps=(1,))
                state = _norm(result.hidden[1][0].astype(np.float64), last_norm)
                if i >= len(states) - 1:
                    rows.append(result.logits[0].copy())
        return np.stack(rows)

    def _layer_alone(self, tensors: dict[str, RawTensor]) -> Path:
        """Write a model of two layers, the second of which is the nextn layer, and return its path."""
        nextn = f"blk.{self.tiny.n_layer}."
        found = {name: t for name, t in tensors.items() if not name.startswith("blk.") or name.startswith("blk.0.")}
        places = dict(zip(OWN, ("output_norm.weight", "output.weight", "token_embd.weight"), strict=True))
        for name, tensor in tensors.items():
            short = name.removeprefix(nextn)
            if name.startswith(f"{nextn}nextn."):
                part = short.removeprefix("nextn.").removesuffix(".weight")
                found |= {places[part]: tensor} if part in places else {}
            elif name.startswith(nextn):
                found[f"blk.1.{short}"] = tensor
        two = replace(self.tiny, n_layer=2, recurrent=tuple(layer for layer in self.tiny.recurrent if layer == 0))
        return write_gguf(self.folder / "layer.gguf", tiny_metadata(two), found)


def _floats(tensor: RawTensor) -> F64:
    assert tensor.type == GGMLType.F32
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape[::-1]).astype(np.float64)


def _norm(x: F64, weight: F64) -> F64:
    out: F64 = x / np.sqrt(np.mean(x * x) + EPSILON) * weight
    return out

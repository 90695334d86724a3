"""The layers by which a model scores a document: those behind an encoder's last layer, in a GGUF named cls."""

from dataclasses import dataclass
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ModelFormatError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_float, get_int
from edgedec.gguf.model_kinds import Pooling
from edgedec_runtimes.weights.levels import read_rows

F64 = NDArray[np.float64]
_MOST_OUTPUTS = 4096
_OUT, _DENSE = "cls.output", "cls"
_MEAN = 1


@dataclass(frozen=True, slots=True)
class RankHead:
    """The head of a cross-encoder (Nogueira and Cho 2019, arXiv:1901.04085): a layer, an activation, a norm, a layer.

    Attributes:
        pooling: Which state of a text the head reads.
        dense, dense_bias: float64[n_dense, n_embd] and float64[n_dense], or None.
        uses_gelu: Whether the activation is GELU (ModernBERT) and not tanh (BERT).
        norm: float64[n_dense], the weight of a layer norm, or None.
        epsilon: Is added to that norm's variance.
        out, out_bias: float64[n_out, n_dense] and float64[n_out], or None; without it the first layer is the last.
    """

    pooling: Pooling
    dense: F64 | None
    dense_bias: F64 | None
    uses_gelu: bool
    norm: F64 | None
    epsilon: float
    out: F64 | None
    out_bias: F64 | None

    def outputs(self, state: NDArray[np.float32]) -> F64:
        """Return float64[n_out] for a text's state, f32[n_embd]."""
        x: F64 = state.astype(np.float64)
        if self.dense is not None:
            x = self.dense @ x if self.dense_bias is None else self.dense @ x + self.dense_bias
            if self.out is None:
                return x
            x = np.array([0.5 * v * (1 + erf(v / sqrt(2))) for v in x.tolist()]) if self.uses_gelu else np.tanh(x)
        if self.norm is not None:
            centred = x - x.mean()
            x = centred / np.sqrt(np.mean(centred**2) + self.epsilon) * self.norm
        if self.out is not None:
            x = self.out @ x if self.out_bias is None else self.out @ x + self.out_bias
        return x


def lacks_pooler(gguf: GGUF, architecture: str) -> bool:
    """Return whether the layer before a BERT's head is missing, as llama.cpp's converter leaves it out."""
    return architecture == "bert" and f"{_DENSE}.weight" not in gguf.tensors


def read_rank_head(gguf: GGUF, architecture: str, n_embd: int, *, causal: bool = False) -> RankHead:
    """Return the head of a file; `causal` for a model that writes, which reads the state of a text's last token.

    Raises:
        CapabilityError: The file has none.
        ModelFormatError: Its layers do not fit the model or each other.
        UnsupportedModelError: edgedec does not take their quantization apart.
    """
    if f"{_OUT}.weight" not in gguf.tensors and f"{_DENSE}.weight" not in gguf.tensors:
        raise CapabilityError(
            f"{gguf.paths[0]}: the model has no head for ranking (no tensor {_OUT}.weight); use a reranker's GGUF"
        )
    dense = _matrix(gguf, f"{_DENSE}.weight", n_embd)
    n_dense = n_embd if dense is None else len(dense)
    out = _matrix(gguf, f"{_OUT}.weight", n_dense)
    n_out = n_dense if out is None else len(out)
    is_modern = architecture == "modern-bert"
    number = get_int(gguf, f"{architecture}.classifier.pooling_type", at_least=-1, at_most=2**31 - 1)
    by_mean = number == _MEAN or (number in (None, -1) and is_modern)
    epsilon = get_float(gguf, f"{architecture}.attention.layer_norm_epsilon")
    return RankHead(
        pooling="last" if causal else "mean" if by_mean else "cls",
        dense=dense,
        dense_bias=_vector(gguf, f"{_DENSE}.bias", n_dense),
        uses_gelu=is_modern,
        norm=_vector(gguf, f"{_DENSE}.norm.weight", n_dense),
        epsilon=1e-5 if epsilon is None else epsilon,
        out=out,
        out_bias=_vector(gguf, f"{_OUT}.bias", n_out),
    )


def _matrix(gguf: GGUF, name: str, n_in: int) -> F64 | None:
    """Return a tensor as float64[n_out, n_in], or None where there is none."""
    if name not in gguf.tensors:
        return None
    shape = gguf.tensors[name].shape
    n_out = shape[1] if len(shape) > 1 else 1
    if not (1 <= len(shape) <= 2 and shape[0] == n_in and 1 <= n_out <= max(n_in, _MOST_OUTPUTS)):
        raise _misshapen(gguf, name, shape, f"({n_in}, 1 or more)")
    return read_rows(gguf, name, 0, n_out).astype(np.float64)


def _vector(gguf: GGUF, name: str, n: int) -> F64 | None:
    if name not in gguf.tensors:
        return None
    shape = gguf.tensors[name].shape
    if shape not in ((n,), (n, 1)):
        raise _misshapen(gguf, name, shape, f"({n},)")
    return read_rows(gguf, name, 0, 1).reshape(-1).astype(np.float64)


def _misshapen(gguf: GGUF, name: str, shape: tuple[int, ...], expected: str) -> ModelFormatError:
    return ModelFormatError(
        f"{gguf.paths[0]}: {name} has the shape {shape}, expected {expected}; download another GGUF of the model"
    )

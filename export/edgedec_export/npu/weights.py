"""Weights of a GGUF for NPUs: matrices in int8 with one scale per column, vectors in float, the embedding apart.

Three changes leave the network's results as they are. Rows of the queries' and keys' matrices are reordered where the
file rotates neighbours. Hidden states are rotated (rotation.py), except where a norm stands before what is added to
them (gemma3). And channels of keys and values are scaled to equal size, because they are cached with one scale and a
few are much larger than the others (as Xiao et al. 2022, arXiv:2211.10438, do between activations and weights). For
keys, the queries' scales compensate; for values, a factor behind the attention. Keys are centred, too (Zhang et al.
2024, arXiv:2410.02367).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF
from edgedec_export.npu.graph import Plan
from edgedec_export.npu.rotation import rotate
from edgedec_export.onnx_graph.parts import Initializers
from edgedec_export.packing.rows import matrix_of, read_rows
from edgedec_export.packing.weights import PIECE_WEIGHTS, parse_rows, weights_of
from edgedec_export.source import read_vector
from edgedec_runtimes.cpu.network import Network

F32 = NDArray[np.float32]

_LARGEST = 127
_LEAST_FACTOR = 1 / 64
"""Channels that are smaller than the largest one by more than this are scaled by this only."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a plan needs beside the matrices' data; `equalize_keys` and `equalize_values` change both fields.

    Attributes:
        scales: float32[n_out] of each matrix.
        vectors: float32 of each vector.
    """

    scales: dict[str, F32]
    vectors: dict[str, F32]


def write_weights(
    gguf: GGUF, network: Network, plan: Plan, initializers: Initializers, step: Callable[[str], None]
) -> Weights:
    """Write the data of all matrices, int8[n_in, n_out], and return their scales and all vectors.

    Args:
        gguf: The source.
        network: Its shape.
        plan: Names the matrices and vectors.
        initializers: Where the matrices go.
        step: Called with each matrix's name once it is written; it may raise.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: The file is damaged, gone, or cannot be read.
        UnsupportedModelError: A matrix has a type that the export does not read.
    """
    vectors = {name: _ordered_vector(gguf, network, name) for name in plan.vectors}
    scales = {}
    for name in plan.matrices:
        pieces = read_values(gguf, name)
        if is_rotated(gguf):
            pieces = _turned(pieces, name, vectors, matrix_of(gguf, name).shape[::-1])
        data, scales[name] = _quantized(pieces, matrix_of(gguf, name).shape[::-1])
        if network.switches.rope_interleaved and _has_positions(name):
            order = _halves(network, data.shape[0])
            data, scales[name] = data[order], scales[name][order]
        initializers.add(name, np.ascontiguousarray(data.T))
        step(name)
    if is_rotated(gguf):  # these norms are part of the matrices now
        vectors |= {name: np.ones_like(vectors[name]) for name in plan.vectors if _norm_before(name) == name}
    for name, shape in plan.fitted.items():
        vectors[name] = np.full(shape, name.endswith("factors"), np.float32)
    weights = Weights(scales, vectors)
    for layer in range(network.n_layer):
        _scale_heads(weights, f"blk.{layer}.attn_q", np.float32(network.switches.attention_scale))
    return weights


def is_rotated(gguf: GGUF) -> bool:
    """Tell whether hidden states can be rotated: not where a norm stands before what is added to them."""
    return "blk.0.post_attention_norm.weight" not in gguf.tensors


def _turned(
    pieces: Iterator[tuple[int, F32]], name: str, vectors: dict[str, F32], shape: tuple[int, ...]
) -> Iterator[tuple[int, F32]]:
    """Yield a matrix as it is between rotated hidden states, in pieces with the number of their first row."""
    norm = _norm_before(name)
    if norm is not None:
        yield from ((begin, rotate(values * vectors[norm])) for begin, values in pieces)
        return
    whole = np.empty(shape, np.float32)
    for begin, values in pieces:
        whole[begin : begin + len(values)] = values
    yield 0, rotate(whole.T).T


def _norm_before(name: str) -> str | None:
    """Return the norm whose weights a matrix's input was multiplied by; for a norm, itself; else None."""
    layer, _, short = name.rpartition("blk.")[2].partition(".")
    if short in ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"):
        return f"blk.{layer}.attn_norm.weight"
    if short in ("ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight"):
        return f"blk.{layer}.ffn_norm.weight"
    return "output_norm.weight" if name in ("output_norm.weight", "output.weight", "token_embd.weight") else None


def _quantized(pieces: Iterator[tuple[int, F32]], shape: tuple[int, ...]) -> tuple[NDArray[np.int8], F32]:
    """Return int8[n_out, n_in], and float32[n_out]: the scale of each row."""
    data, scales = np.empty(shape, np.int8), np.empty(shape[0], np.float32)
    for begin, values in pieces:
        end = begin + len(values)
        largest = np.abs(values).max(axis=1)
        scales[begin:end] = np.where(largest > 0, largest, 1) / _LARGEST
        data[begin:end] = np.rint(values / scales[begin:end, None])
    return data, scales


def read_values(gguf: GGUF, name: str) -> Iterator[tuple[int, F32]]:
    """Yield a matrix in pieces: the first row's number, and rows float32[n_rows, n_in].

    Raises:
        ModelFormatError: The tensor is no matrix, or holds NaN or an infinity.
        UnsupportedModelError: The tensor has a type that the export does not read.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
    """
    tensor = matrix_of(gguf, name)
    for begin, rows in read_rows(gguf, tensor, PIECE_WEIGHTS):
        yield begin, weights_of(parse_rows(gguf, tensor, rows))


def write_embedding(gguf: GGUF, path: Path) -> tuple[float, float]:
    """Write the embedding, float16[n_vocab, n_embd], rotated as hidden states are; return its range.

    Raises:
        OSError: The file cannot be written. And what `read_values` raises.
    """
    lowest = highest = 0.0
    with path.open("xb") as file:
        for _, read in read_values(gguf, "token_embd.weight"):
            values = rotate(read) if is_rotated(gguf) else read
            lowest, highest = min(lowest, float(values.min())), max(highest, float(values.max()))
            file.write(values.astype("<f2").tobytes())
    return lowest, highest


def equalize_keys(network: Network, weights: Weights, layer: int, seen: F32) -> None:
    """Centre the channels of a layer's keys and scale them to equal size; scale its queries the other way.

    Args:
        network: Shape.
        weights: Scales and vectors, changed in place.
        layer: Number of the layer.
        seen: float32[2, n_head_kv, head_dim], smallest and largest values of the rotated keys.
    """
    half, name = network.n_rot // 2, f"blk.{layer}.attn_"
    lowest, highest = seen
    pairs = (highest - lowest) / 2
    # The rotation mixes both elements of a pair, so they need the same factor.
    pairs[:, :half] = pairs[:, half : 2 * half] = np.maximum(pairs[:, :half], pairs[:, half : 2 * half])
    if f"{name}k_norm.weight" in weights.vectors:  # one vector for all heads
        pairs[:] = pairs.max(axis=0)
    factors = _factors(pairs)
    _scale_heads(weights, f"{name}k", np.reciprocal(factors))
    _scale_heads(weights, f"{name}q", np.repeat(factors, network.n_head // network.n_head_kv, axis=0))
    weights.vectors[f"blk.{layer}.key_offsets"] = -(lowest + highest) / 2 / factors


def equalize_values(network: Network, weights: Weights, layer: int, seen: F32) -> None:
    """Scale the channels of a layer's values to equal size; a factor behind the attention scales them back.

    Args:
        network: Shape.
        weights: Scales and vectors, changed in place.
        layer: Number of the layer.
        seen: float32[2, n_head_kv, head_dim], smallest and largest values.
    """
    factors = _factors(np.abs(seen).max(axis=0))
    _scale_heads(weights, f"blk.{layer}.attn_v", np.reciprocal(factors))
    by_query = np.repeat(factors, network.n_head // network.n_head_kv, axis=0)
    weights.vectors[f"blk.{layer}.value_factors"] = by_query.reshape(-1)


def _factors(largest: F32) -> F32:
    """Return each channel's size divided by the largest channel's, at least _LEAST_FACTOR."""
    most = largest.max()
    return np.clip(largest / most, _LEAST_FACTOR, 1) if most > 0 else np.ones_like(largest)


def _scale_heads(weights: Weights, name: str, factors: F32 | np.float32) -> None:
    """Multiply the result of a projection by float32[n_head, head_dim], or by one factor."""
    norm = f"{name}_norm.weight"
    if norm in weights.vectors:
        weights.vectors[norm] = weights.vectors[norm] * (factors[0] if isinstance(factors, np.ndarray) else factors)
        return
    flat = factors.reshape(-1) if isinstance(factors, np.ndarray) else factors
    weights.scales[f"{name}.weight"] = weights.scales[f"{name}.weight"] * flat
    if f"{name}.bias" in weights.vectors:
        weights.vectors[f"{name}.bias"] = weights.vectors[f"{name}.bias"] * flat


def _ordered_vector(gguf: GGUF, network: Network, name: str) -> F32:
    values = read_vector(gguf, name)
    if network.switches.rope_interleaved and _has_positions(name):
        values = values[_halves(network, len(values))]
    return values


def _has_positions(name: str) -> bool:
    return ".attn_q." in name or ".attn_k." in name


def _halves(network: Network, n_out: int) -> NDArray[np.intp]:
    """Return the order of rows in which the neighbours of each head become its halves; unrotated elements come last.

    With 4 of 5 elements rotated, the order within a head is 0, 2, 1, 3, 4.
    """
    n_rot = network.n_rot
    head = np.concatenate((np.arange(0, n_rot, 2), np.arange(1, n_rot, 2), np.arange(n_rot, network.head_dim)))
    starts = np.arange(0, n_out, network.head_dim)
    return (starts[:, None] + head).reshape(-1)

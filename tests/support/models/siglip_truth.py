"""The rows of pictures in float64: a plain form of the encoders of the SigLIP kind, from formulas alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF, floats, read_gguf
from edgedec.gguf.tensor_types import GGMLType

Numbers = NDArray[np.float64]


def true_rows(
    path: Path, kind: str, pixels: NDArray[np.uint8], *, merge: int, n_head: int, activation: str = "gelu"
) -> Numbers:
    """Return f64[n_rows, n_embd of the text model] of one tile, u8[height, width, 3].

    The encoder has the tanh form of GELU, or another activation of its layers ("silu", "gelu_quick"); a mean and a
    deviation of 0.5, and an epsilon of 1e-6.
    """
    w = _tensors(read_gguf(path))
    x, (n_y, n_x), _ = _states(w, pixels, n_head, activation)
    n_embd = x.shape[1]
    x = _norm(x, w, "v.post_ln", 1e-6)
    merged: Any = x.reshape(n_y // merge, merge, n_x // merge, merge, n_embd).transpose(0, 2, 1, 3, 4)
    merged = merged.reshape(n_y * n_x // merge**2, merge**2, n_embd)
    if kind == "gemma3":
        mean = merged.mean(1)
        root = np.sqrt((mean**2).mean(-1, keepdims=True) + 1e-6)
        return np.asarray(mean / root * w["mm.soft_emb_norm.weight"] @ w["mm.input_projection.weight"])
    merged = merged.reshape(len(merged), -1)
    if kind == "idefics3":
        return np.asarray(merged @ w["mm.model.fc.weight"].T)
    return _linear(_gelu(_linear(_norm(merged, w, "mm.input_norm", 1e-5), w, "mm.1")), w, "mm.2")


def true_seen(path: Path, pixels: NDArray[np.uint8], *, n_head: int) -> tuple[Numbers, Numbers]:
    """Return f64[n_patches], the mean attention that patches get in the last layer, and f64[n_layer, n_patches].

    The latter is what each patch gives in a layer: the attention that the patches' mean query pays to it, the mean of
    heads, times the sum of sizes of the heads' mean value.
    """
    flows = list[Numbers]()
    mass = np.empty(0)
    for x, block in _states(_tensors(read_gguf(path)), pixels, n_head, "gelu")[2]:
        q, k, v = _heads(x, block, n_head)
        mass = _softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])).mean((0, 1))
        to_mean = _softmax(np.einsum("hd,hnd->hn", q.mean(1), k) / np.sqrt(q.shape[-1])).mean(0)
        flows.append(to_mean * np.abs(v.mean(0)).sum(-1))
    return mass, np.array(flows)


def _states(
    w: dict[str, Numbers], pixels: NDArray[np.uint8], n_head: int, activation: str
) -> tuple[Numbers, tuple[int, int], list[tuple[Numbers, dict[str, Numbers]]]]:
    """Return the states behind the last layer, the grid's rows and columns, and each layer's input with its tensors."""
    kernel, layers = w["v.patch_embd.weight"], list[tuple[Numbers, dict[str, Numbers]]]()
    n_embd, patch = kernel.shape[0], kernel.shape[-1]
    n_y, n_x = pixels.shape[0] // patch, pixels.shape[1] // patch
    scaled = (pixels.astype(np.float64) / 255 - 0.5) / 0.5
    squares = scaled.reshape(n_y, patch, n_x, patch, 3).transpose(0, 2, 4, 1, 3).reshape(n_y * n_x, -1)
    x = squares @ kernel.reshape(n_embd, -1).T + w["v.patch_embd.bias"]
    x += _places(w["v.position_embd.weight"], n_x, n_y)
    for i in range(sum(name.endswith("attn_q.weight") for name in w)):
        block = {name.removeprefix(f"v.blk.{i}."): tensor for name, tensor in w.items()}
        layers.append((_norm(x, block, "ln1", 1e-6), block))
        x = x + _attention(*layers[-1], n_head)
        hidden = _ACTIVATIONS[activation](_linear(_norm(x, block, "ln2", 1e-6), block, "ffn_up"))
        x = x + _linear(hidden, block, "ffn_down")
    return x, (n_y, n_x), layers


def _tensors(gguf: GGUF) -> dict[str, Numbers]:
    found = {}
    for name, tensor in gguf.tensors.items():
        data = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)
        if tensor.type is GGMLType.Q8_0:
            blocks = data.reshape(-1, 34)
            values: Any = blocks[:, :2].copy().view("<f2").astype(np.float64) * blocks[:, 2:].copy().view(np.int8)
        else:
            values = floats(tensor.type, data).astype(np.float64)
        found[name] = values.reshape(tensor.shape[::-1])
    return found


def _linear(x: Numbers, w: dict[str, Numbers], name: str) -> Numbers:
    return np.asarray(x @ w[f"{name}.weight"].T + w[f"{name}.bias"])


def _norm(x: Numbers, w: dict[str, Numbers], name: str, epsilon: float) -> Numbers:
    middle = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((middle**2).mean(-1, keepdims=True) + epsilon)
    return np.asarray(middle / deviation * w[f"{name}.weight"] + w[f"{name}.bias"])


def _gelu(x: Numbers) -> Numbers:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


_ACTIVATIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "gelu": _gelu,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_quick": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def _attention(x: Numbers, w: dict[str, Numbers], n_head: int) -> Numbers:
    q, k, v = _heads(x, w, n_head)
    out = _softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])) @ v
    return _linear(out.transpose(1, 0, 2).reshape(len(x), -1), w, "attn_out")


def _heads(x: Numbers, w: dict[str, Numbers], n_head: int) -> list[Numbers]:
    made = (_linear(x, w, f"attn_{name}") for name in ("q", "k", "v"))
    return [each.reshape(len(x), n_head, -1).transpose(1, 0, 2) for each in made]


def _softmax(scores: Numbers) -> Numbers:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _places(table: Numbers, n_x: int, n_y: int) -> Numbers:
    """Return the table, or its bilinear form with antialiasing at another size, computed place by place."""
    side = round(len(table) ** 0.5)
    if (n_x, n_y) == (side, side):
        return table
    grid, places = table.reshape(side, side, -1), np.empty((n_y, n_x, table.shape[1]))
    middles = np.arange(side) + 0.5
    for y in range(n_y):
        for x in range(n_x):
            down, right = (
                np.maximum(0, 1 - np.abs(middles - (i + 0.5) * side / n) / max(1.0, side / n))
                for i, n in ((y, n_y), (x, n_x))
            )
            weights = np.outer(down, right)
            places[y, x] = np.tensordot(weights, grid, 2) / weights.sum()
    return places.reshape(n_x * n_y, -1)

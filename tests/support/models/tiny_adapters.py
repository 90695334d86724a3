"""Random low-rank adapters for tiny GGUF models, and models into which adapters are merged."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUFArray, Value, ValueType, read_gguf
from edgedec_runtimes.weights.levels import dequantize
from support.models.gguf_writer import Typed, write_gguf

LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def tiny_adapter(
    path: Path,
    base: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    matrices: Sequence[str] = LAYER_MATRICES,
    dtype: type[np.floating[Any]] = np.float32,
    changed: Mapping[str, NDArray[Any] | None] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter of some matrices of every layer of a model, and return its path.

    Args:
        path: Where to write it.
        base: The model.
        seed: Of the random numbers.
        rank, alpha: Those of the adapter.
        matrices: The matrices that it changes.
        dtype: Of its matrices.
        changed: Tensors to write in place of those of the same name, or to leave out (None).
        metadata: Further metadata, or other values of a key.
    """
    rng, gguf = np.random.default_rng(seed), read_gguf(base)
    tensors: dict[str, Any] = {}
    for name, tensor in gguf.tensors.items():
        if name.split(".")[-2] in matrices and name.startswith("blk.") and len(tensor.shape) == 2:
            n_cols, n_rows = tensor.shape
            a, b = rng.standard_normal((rank, n_cols)) / n_cols**0.5, rng.standard_normal((n_rows, rank)) / rank**0.5
            tensors |= {f"{name}.lora_a": a.astype(dtype), f"{name}.lora_b": (b / 2).astype(dtype)}
    keys = {
        "general.type": "adapter",
        "general.architecture": gguf.metadata["general.architecture"],
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    written = {name: array for name, array in (tensors | dict(changed or {})).items() if array is not None}
    return write_gguf(path, keys | dict(metadata or {}), written)


def merged(path: Path, base: Path, adapters: Sequence[tuple[Path, float]]) -> Path:
    """Write a model of F32 tensors with adapters merged into it, each at a scale, and return its path."""
    gguf = read_gguf(base)
    tensors = {name: matrix(base, name).astype(np.float64) for name in gguf.tensors}
    for adapter, scale in adapters:
        file = read_gguf(adapter)
        alpha = float(str(file.metadata["adapter.lora.alpha"]))
        for name in file.tensors:
            if name.endswith(".lora_a"):
                of, a = name.removesuffix(".lora_a"), matrix(adapter, name).astype(np.float64)
                b = matrix(adapter, f"{of}.lora_b").astype(np.float64)
                tensors[of] = tensors[of] + scale * (alpha / len(a) if alpha else 1.0) * (b @ a)
    metadata = {key: _written(value) for key, value in gguf.metadata.items()}
    return write_gguf(path, metadata, {name: array.astype(np.float32) for name, array in tensors.items()})


def matrix(path: Path, name: str) -> NDArray[np.float32]:
    """Return a tensor of a GGUF, its rows first."""
    gguf = read_gguf(path)
    tensor = gguf.tensors[name]
    rows = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8).reshape(tensor.shape[-1], -1)
    return dequantize(tensor.type, rows).reshape(tensor.shape[::-1])


def _written(value: Value) -> Any:
    """Return a value of the metadata as write_gguf takes it."""
    return Typed(ValueType.ARRAY, value.tolist(), value.element_type) if isinstance(value, GGUFArray) else value

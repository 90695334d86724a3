"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): read, and checked against the model that they change.

An adapter has two small matrices for each matrix W that it changes: W x becomes W x + s * factor * B (A x). The factor
is part of the file (alpha / rank); s is the user's scale. An adapter is a GGUF, as llama.cpp reads it, or a folder of
PEFT (edgedec_runtimes.weights.peft).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.metadata import get_float, get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.adapter_pairs import Adapter, AdapterPair, Floats, content_hash, refuse, require_pair
from edgedec_runtimes.weights.levels import dequantize
from edgedec_runtimes.weights.peft import peft_bytes, read_peft

_SUFFIXES = (".lora_a", ".lora_b")
_INVOCATION = "adapter.alora.invocation_tokens"


def load_adapters(paths: Iterable[Path], gguf: GGUF) -> tuple[Adapter, ...]:
    """Return adapters for the model with this header, as its file has it.

    Raises:
        ModelFormatError: An adapter is damaged, or does not fit the model.
        UnsupportedModelError: An adapter changes what edgedec's runtimes leave as it is, or is of another kind.
        ModelNotFoundError, StorageError: An adapter can't be read.
    """
    return tuple(_checked(_read(path, gguf), gguf) for path in paths)


def adapter_bytes(path: Path, gguf: GGUF) -> int:
    """Return the most bytes that the matrices of an adapter for this model take in memory, from its header.

    Raises:
        As load_adapters, where the header of the adapter does not fit the model's.
    """
    if path.is_dir():
        return peft_bytes(path, gguf)
    tensors = _header(path, gguf).tensors
    for name in _bases(path, tensors):
        a, b = (tensors[name + suffix].shape for suffix in _SUFFIXES)
        require_pair(path, name, a[::-1], b[::-1], gguf)
    # A matrix is kept in tiles of 16 rows.
    sizes = ((t, 2 if t.type is GGMLType.F16 else 4) for t in tensors.values())
    return sum(t.shape[0] * (-(-t.shape[-1] // 16) * 16) * n_bytes for t, n_bytes in sizes)


def pair_of(adapter: Adapter, gguf: GGUF, part: TensorInfo) -> tuple[str, AdapterPair | None]:
    """Return what an adapter has for a matrix of the model, and the name of its tensor; None where it has nothing.

    Args:
        gguf: The header of the model as its file has it.
        part: The matrix, or a part of a matrix that the file keeps as one, at its place in the file.
    """
    for name, pair in adapter.pairs.items():
        stored = gguf.tensors[name]
        if stored.shard == part.shard and stored.offset <= part.offset < stored.offset + stored.n_bytes:
            begin = (part.offset - stored.offset) // (stored.n_bytes // stored.shape[-1])
            return name, pair.rows(begin, begin + part.shape[-1])
    return "", None


def _read(path: Path, gguf: GGUF) -> Adapter:
    if path.is_dir():
        return read_peft(path, gguf)
    file = _header(path, gguf)
    alpha = get_float(file, "adapter.lora.alpha")
    if alpha is None:
        refuse(path, "adapter.lora.alpha is missing")
    pairs = {}
    for name in _bases(path, file.tensors):
        a, b = (_matrix(file, name + suffix) for suffix in _SUFFIXES)
        narrow = a.dtype == b.dtype == np.float16
        a, b = (a, b) if narrow else (a.astype(np.float32), b.astype(np.float32))
        pairs[name] = AdapterPair(a, b, alpha / a.shape[0] if alpha else 1.0)
    return Adapter(path, content_hash((path,)), pairs)


def _header(path: Path, gguf: GGUF) -> GGUF:
    """Return the header of an adapter of the model's architecture."""
    file = read_gguf(path)
    kind, adapter_type = get_text(file, "general.type"), get_text(file, "adapter.type")
    if kind != "adapter" or adapter_type != "lora":
        refuse(path, f"general.type is {kind!r:.40} and adapter.type {adapter_type!r:.40}, expected a LoRA adapter")
    architecture, expected = get_text(file, "general.architecture"), get_text(gguf, "general.architecture")
    if architecture != expected:
        refuse(
            path, f"an adapter of the architecture {architecture!r:.40}, and {gguf.paths[0].name} is {expected!r:.40}"
        )
    if _INVOCATION in file.metadata:
        raise UnsupportedModelError(
            f"{path}: an activated LoRA ({_INVOCATION}), which acts from some tokens on; edgedec takes adapters that "
            "act on the whole text"
        )
    return file


def _bases(path: Path, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of the matrices that an adapter's tensors change."""
    bases = []
    for name in tensors:
        base, suffix = name[: -len(_SUFFIXES[0])], name[-len(_SUFFIXES[0]) :]
        if suffix not in _SUFFIXES:
            refuse(path, f"tensor {name[:80]!r} ends neither with .lora_a nor with .lora_b")
        other = base + _SUFFIXES[suffix == _SUFFIXES[0]]
        if other not in tensors:
            refuse(path, f"tensor {name[:80]!r} is there without {other[:80]!r}")
        if suffix == _SUFFIXES[0]:
            bases.append(base)
    return bases


def _matrix(gguf: GGUF, name: str) -> Floats:
    """Return a tensor of an adapter, [rows, columns]: halves as they are, all others as float32."""
    tensor = gguf.tensors[name]
    if len(tensor.shape) != 2 or not all(tensor.shape):
        refuse(gguf.paths[0], f"tensor {name[:80]!r} has the shape {tensor.shape}, expected a matrix")
    data = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8).reshape(tensor.shape[1], -1)
    return data.view("<f2").astype(np.float16) if tensor.type is GGMLType.F16 else dequantize(tensor.type, data)


def _checked(adapter: Adapter, gguf: GGUF) -> Adapter:
    """Return an adapter of which every pair was found to fit a matrix of the model."""
    for name, pair in adapter.pairs.items():
        require_pair(adapter.path, name, pair.a.shape, pair.b.shape, gguf)
        if not all(np.isfinite(part).all() for part in (pair.a, pair.b)) or not np.isfinite(np.float32(pair.factor)):
            refuse(adapter.path, f"the pair of {name[:80]!r} holds what is no number")
    if not adapter.pairs:
        refuse(adapter.path, "it changes no matrix")
    return adapter

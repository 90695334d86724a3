"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): read, and checked against the model that they change.

An adapter has two small matrices for each matrix W that it changes: W x becomes W x + s * factor * B (A x). The factor
is part of the file (alpha / rank); s is the user's scale. An adapter is a GGUF, as llama.cpp reads it, or a folder of
PEFT, which the entry point `peft_adapter` of the group edgedec.own reads.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec import plugins
from edgedec.errors import ModelFormatError, StorageError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.metadata import get_float, get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.levels import dequantize

MOST_RANK = 4096
_SUFFIXES = (".lora_a", ".lora_b")
_INVOCATION = "adapter.alora.invocation_tokens"
_FIXED = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_EXPERTS = re.compile(r"_exps\.weight$")
_HASH_BYTES = 1 << 20

Floats = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPair:
    """What an adapter has for one matrix.

    Attributes:
        a: f16 or f32[rank, columns of the matrix].
        b: f16 or f32[rows of the matrix, rank], of the same type.
        factor: What B (A x) is multiplied by, beside the user's scale.
    """

    a: Floats
    b: Floats
    factor: float

    def rows(self, begin: int, end: int) -> "AdapterPair":
        """Return the pair for some rows of the matrix."""
        return AdapterPair(self.a, self.b[begin:end], self.factor)

    def delta(self, scale: float) -> NDArray[np.float64]:
        """Return f64[rows, columns], what the adapter adds to the matrix."""
        return scale * self.factor * (self.b.astype(np.float64) @ self.a.astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that fits a model.

    Attributes:
        path: Its file, or its folder.
        sha256: Of its content, hex: two adapters of one content are the same adapter.
        pairs: By the name of the tensor of the model's file.
    """

    path: Path
    sha256: str
    pairs: Mapping[str, AdapterPair]


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
        return int(plugins.load_plugin(plugins.OWN, "peft_adapter_bytes")(path, gguf))
    tensors = _header(path, gguf).tensors
    for name in _bases(path, tensors):
        a, b = (tensors[name + suffix].shape for suffix in _SUFFIXES)
        require_pair(path, name, a[::-1], b[::-1], gguf)
    # A matrix is kept in tiles of 16 rows.
    sizes = ((t, 2 if t.type is GGMLType.F16 else 4) for t in tensors.values())
    return sum(t.shape[0] * (-(-t.shape[-1] // 16) * 16) * n_bytes for t, n_bytes in sizes)


def require_pair(path: Path, name: str, a: tuple[int, ...], b: tuple[int, ...], gguf: GGUF) -> None:
    """Raise ModelFormatError or UnsupportedModelError unless a pair of these shapes fits the model's matrix `name`."""
    what, tensor, model = f"the pair of {name[:80]!r}", gguf.tensors.get(name), gguf.paths[0].name
    if tensor is None:
        _refuse(path, f"{what} is for a tensor that {model} lacks")
    if name in _FIXED or _EXPERTS.search(name) or len(tensor.shape) != 2:
        raise UnsupportedModelError(
            f"{path}: {what} changes embeddings, the output matrix, experts or a vector; edgedec takes "
            "adapters of a layer's dense matrices: merge it with PEFT (merge_and_unload), and convert the result"
        )
    for shape in (a, b):
        if len(shape) != 2 or not all(shape):
            _refuse(path, f"{what} has the shape {shape}, expected a matrix")
    if not 1 <= a[0] <= MOST_RANK or b[1] != a[0]:
        _refuse(path, f"{what} has the ranks {a[0]} and {b[1]}, expected one of 1 to {MOST_RANK}")
    if (b[0], a[1]) != tensor.shape[::-1]:
        _refuse(path, f"{what} is for {b[0]} rows and {a[1]} columns, and {model}'s matrix has {tensor.shape[::-1]}")


def pair_of(adapter: Adapter, gguf: GGUF, part: TensorInfo) -> tuple[str, AdapterPair | None]:
    """Return what an adapter has for a matrix of the model, and the name of its tensor; None where it has nothing.

    Args:
        adapter: The adapter.
        gguf: The header of the model as its file has it.
        part: The matrix, or a part of a matrix that the file keeps as one, at its place in the file.
    """
    for name, pair in adapter.pairs.items():
        stored = gguf.tensors[name]
        if stored.shard == part.shard and stored.offset <= part.offset < stored.offset + stored.n_bytes:
            begin = (part.offset - stored.offset) // (stored.n_bytes // stored.shape[-1])
            return name, pair.rows(begin, begin + part.shape[-1])
    return "", None


def content_hash(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of files, one after another (StorageError where one can't be read)."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while data := file.read(_HASH_BYTES):
                    digest.update(data)
        except OSError as error:
            raise StorageError(f"{path}: can't be read ({error.strerror or error})") from error
    return digest.hexdigest()


def _read(path: Path, gguf: GGUF) -> Adapter:
    if path.is_dir():
        found: Adapter = plugins.load_plugin(plugins.OWN, "peft_adapter")(path, gguf)
        return found
    file = _header(path, gguf)
    alpha = get_float(file, "adapter.lora.alpha")
    if alpha is None:
        _refuse(path, "adapter.lora.alpha is missing")
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
        _refuse(path, f"general.type is {kind!r:.40} and adapter.type {adapter_type!r:.40}, expected a LoRA adapter")
    architecture, expected = get_text(file, "general.architecture"), get_text(gguf, "general.architecture")
    if architecture != expected:
        _refuse(
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
            _refuse(path, f"tensor {name[:80]!r} ends neither with .lora_a nor with .lora_b")
        other = base + _SUFFIXES[suffix == _SUFFIXES[0]]
        if other not in tensors:
            _refuse(path, f"tensor {name[:80]!r} is there without {other[:80]!r}")
        if suffix == _SUFFIXES[0]:
            bases.append(base)
    return bases


def _matrix(gguf: GGUF, name: str) -> Floats:
    """Return a tensor of an adapter, [rows, columns]: halves as they are, all others as float32."""
    tensor = gguf.tensors[name]
    if len(tensor.shape) != 2 or not all(tensor.shape):
        _refuse(gguf.paths[0], f"tensor {name[:80]!r} has the shape {tensor.shape}, expected a matrix")
    data = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8).reshape(tensor.shape[1], -1)
    return data.view("<f2").astype(np.float16) if tensor.type is GGMLType.F16 else dequantize(tensor.type, data)


def _checked(adapter: Adapter, gguf: GGUF) -> Adapter:
    """Return an adapter of which every pair was found to fit a matrix of the model."""
    for name, pair in adapter.pairs.items():
        require_pair(adapter.path, name, pair.a.shape, pair.b.shape, gguf)
        if not all(np.isfinite(part).all() for part in (pair.a, pair.b)) or not np.isfinite(np.float32(pair.factor)):
            _refuse(adapter.path, f"the pair of {name[:80]!r} holds what is no number")
    if not adapter.pairs:
        _refuse(adapter.path, "it changes no matrix")
    return adapter


def _refuse(path: Path, found: str) -> NoReturn:
    raise ModelFormatError(f"{path}: {found}; take an adapter that was made for this model, or download it again")

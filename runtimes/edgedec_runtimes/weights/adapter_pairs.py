"""A low-rank adapter in memory, and whether its matrices fit a model."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, StorageError, UnsupportedModelError
from edgedec.gguf.file import GGUF

MOST_RANK = 4096
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


def require_pair(path: Path, name: str, a: tuple[int, ...], b: tuple[int, ...], gguf: GGUF) -> None:
    """Raise ModelFormatError or UnsupportedModelError unless a pair of these shapes fits the model's matrix `name`."""
    what, tensor, model = f"the pair of {name[:80]!r}", gguf.tensors.get(name), gguf.paths[0].name
    if tensor is None:
        refuse(path, f"{what} is for a tensor that {model} lacks")
    if name in _FIXED or _EXPERTS.search(name) or len(tensor.shape) != 2:
        raise UnsupportedModelError(
            f"{path}: {what} changes embeddings, the output matrix, experts or a vector; edgedec takes "
            "adapters of a layer's dense matrices: merge it with PEFT (merge_and_unload), and convert the result"
        )
    for shape in (a, b):
        if len(shape) != 2 or not all(shape):
            refuse(path, f"{what} has the shape {shape}, expected a matrix")
    if not 1 <= a[0] <= MOST_RANK or b[1] != a[0]:
        refuse(path, f"{what} has the ranks {a[0]} and {b[1]}, expected one of 1 to {MOST_RANK}")
    if (b[0], a[1]) != tensor.shape[::-1]:
        refuse(path, f"{what} is for {b[0]} rows and {a[1]} columns, and {model}'s matrix has {tensor.shape[::-1]}")


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


def refuse(path: Path, actual: str) -> NoReturn:
    """Raise ModelFormatError for an adapter, of which `actual` says what is wrong."""
    raise ModelFormatError(f"{path}: {actual}; take an adapter that was made for this model, or download it again")

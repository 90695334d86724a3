"""How an embedding model makes one vector of a text: its pooling, and the norm that its hidden states go through."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.formats import header_path
from edgedec.gguf.levels import floats
from edgedec.gguf.metadata import get_float, get_int, get_text

Pooling = Literal["mean", "cls", "last"]
"""What a text's vector is: the mean of its hidden states, or that of its first or of its last token."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_OF_NUMBER: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's enum llama_pooling_type
_NORM = "output_norm.weight"


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The RMS norm after a model's last layer (Zhang and Sennrich 2019, arXiv:1910.07467).

    Attributes:
        weight: f32[n_embd].
        epsilon: Is added to the mean square.
    """

    weight: NDArray[np.float32]
    epsilon: float

    def of(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return hidden states f32[n, n_embd] after the norm."""
        mean_square = np.mean(hidden.astype(np.float64) ** 2, axis=1, keepdims=True)
        scaled: NDArray[np.float32] = (hidden / np.sqrt(mean_square + self.epsilon) * self.weight).astype(np.float32)
        return scaled


def read_pooling(gguf: GGUF, architecture: str) -> Pooling | None:
    """Return how a model was trained to pool; None where its header does not say it."""
    number = get_int(gguf, f"{architecture}.pooling_type", at_least=-1, at_most=2**31 - 1)
    return None if number is None else _OF_NUMBER.get(number)


def number_of(pooling: Pooling) -> int:
    """Return the number that a GGUF has for a pooling."""
    return next(number for number, name in _OF_NUMBER.items() if name == pooling)


def read_final_norm(path: Path) -> FinalNorm:
    """Return the norm after the last layer of a model's file.

    Raises:
        CapabilityError: The file has no such norm.
        ModelFormatError, StorageError: The file is damaged, or can't be read.
    """
    gguf = read_gguf(header_path(path))
    epsilon = get_float(gguf, f"{get_text(gguf, 'general.architecture')}.attention.layer_norm_rms_epsilon")
    if _NORM not in gguf.tensors or epsilon is None:
        raise CapabilityError(f"{path}: it has no RMS norm {_NORM!r}, so edgedec can't embed with it; use a GGUF")
    rows = np.frombuffer(gguf.read_tensor_bytes(_NORM), np.uint8)
    return FinalNorm(floats(gguf.tensors[_NORM].type, rows[None]).reshape(-1), epsilon)

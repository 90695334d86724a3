"""The norm that hidden states go through behind a model's last layer, for whoever reads them there."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError
from edgedec.gguf.file import floats, read_header_of
from edgedec.gguf.metadata import get_float, get_text

# The last norm's name in most models, in LFM2, and in T5's encoder.
_NORMS = ("output_norm.weight", "token_embd_norm.weight", "enc.output_norm.weight")


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


def read_final_norm(path: Path) -> FinalNorm:
    """Return the norm after the last layer of a model's file.

    Raises:
        CapabilityError: The file has no such norm.
        ModelFormatError, StorageError: The file is damaged, or can't be read.
    """
    gguf = read_header_of(path)
    epsilon = get_float(gguf, f"{get_text(gguf, 'general.architecture')}.attention.layer_norm_rms_epsilon")
    name = next((name for name in _NORMS if name in gguf.tensors), None)
    if name is None or epsilon is None:
        raise CapabilityError(f"{path}: it has no RMS norm {_NORMS[0]!r}, so edgedec can't embed with it; use a GGUF")
    rows = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)
    return FinalNorm(floats(gguf.tensors[name].type, rows[None]).reshape(-1), epsilon)

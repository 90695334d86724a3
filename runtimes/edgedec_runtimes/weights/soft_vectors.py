"""Soft prompts on the disk: a GGUF of the vectors that stand before every text of the model they were tuned for."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.metadata import get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec.model_card import ModelCard

KIND, TARGET, TENSOR = "soft_prompt", "soft_prompt.target", "soft_prompt"
"""The file's general.type, the key of the model that it was tuned for (tuned_model), and its one tensor."""
MOST_VECTORS = 1024


def tuned_model(architecture: str, n_layer: int, n_embd: int, n_vocab: int, variant: str) -> str:
    """Return how a file names the model that it was tuned for: its sizes, and ModelCard.variant."""
    return f"{architecture} {n_layer}x{n_embd} {n_vocab} {variant}".rstrip()


def read_vectors(path: Path, card: ModelCard) -> NDArray[np.float32]:
    """Return the vectors of a file, f32[n, n_embd].

    Raises:
        ModelFormatError: The file is damaged, or holds no 1 to MOST_VECTORS vectors of finite numbers.
        UnsupportedModelError: It is no soft prompt, or one for another model.
        ModelNotFoundError, StorageError: It can't be read.
    """
    gguf = read_gguf(path)
    kind, target = get_text(gguf, "general.type"), get_text(gguf, TARGET)
    expected = tuned_model(card.architecture, card.n_layer, card.n_embd, card.n_vocab, card.variant)
    if kind != KIND:
        raise UnsupportedModelError(f"{path}: general.type is {kind!r:.40}, expected {KIND!r}; give a soft prompt")
    if target != expected:
        raise UnsupportedModelError(
            f"{path}: the soft prompt was tuned for {target!r:.80}, and this model is {expected!r}; tune one for it"
        )
    tensor = gguf.tensors.get(TENSOR)
    shape = None if tensor is None else tensor.shape
    if tensor is None or tensor.type is not GGMLType.F32 or len(tensor.shape) != 2 or tensor.shape[0] != card.n_embd:
        raise ModelFormatError(f"{path}: the vectors have the shape {shape}, expected F32 of {card.n_embd} columns")
    if not 1 <= tensor.shape[1] <= MOST_VECTORS:
        raise ModelFormatError(f"{path}: it has {tensor.shape[1]} vectors, expected 1 to {MOST_VECTORS}")
    vectors = np.frombuffer(gguf.read_tensor_bytes(TENSOR), "<f4").astype(np.float32).reshape(-1, card.n_embd)
    if not np.isfinite(vectors).all():
        raise ModelFormatError(f"{path}: a vector holds what is no number; tune the soft prompt again")
    return vectors

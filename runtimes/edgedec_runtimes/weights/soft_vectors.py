"""Soft prompts on the disk: a GGUF of the vectors that stand before every text of the model they were tuned for."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf, read_header_of
from edgedec.gguf.metadata import get_text
from edgedec.gguf.tensor_types import GGMLType
from edgedec.model_card import ModelCard
from edgedec_runtimes.trained_heads.target import target_of

KIND, TARGET, WEIGHTS, TENSOR = "soft_prompt", "soft_prompt.target", "soft_prompt.target_weights", "soft_prompt"
"""The file's general.type, the keys of the tuned model (tuned_model) and of its weights' hash, and the one tensor."""
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
    kind, target, trained = (get_text(gguf, key) for key in ("general.type", TARGET, WEIGHTS))
    expected = tuned_model(card.architecture, card.n_layer, card.n_embd, card.n_vocab, card.variant)
    if kind != KIND:
        raise UnsupportedModelError(f"{path}: general.type is {kind!r:.40}, expected {KIND!r}; give a soft prompt")
    if target != expected:
        raise UnsupportedModelError(
            f"{path}: the soft prompt was tuned for {target!r:.80}, and this model is {expected!r}; tune one for it"
        )
    weights = "" if card.path is None else target_of(read_header_of(card.path)).weights_hash
    if not trained or trained != weights:
        says = f"was tuned for the weights {trained!r:.40}" if trained else "names no weights that it was tuned for"
        raise UnsupportedModelError(
            f"{path}: the soft prompt {says}, and those of {card.name or 'this model'} are {weights!r}; give the file "
            "that it was tuned for, or tune one for this file"
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

"""What a GGUF says of a diffusion language model: its mask token, its blocks, and which row is of which position."""

from collections.abc import Mapping
from typing import Any

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_array, get_bool, get_int, get_text, refuse_missing
from edgedec.gguf.values import ValueType

MOST_ROWS = 256
"""Most rows of a block, and of a forward over blocks."""
WHOLE_ROWS = 1024
"""Most tokens of a text whose rows all see each other: those of one forward."""
MOST_LENGTH = 32
"""Most positions that are denoised together in such a text."""
_ARCHITECTURES = ("dream", "llada", "qwen2", "qwen3")


def denoising(gguf: GGUF) -> Mapping[str, Mapping[str, Any]]:
    """Return ModelCard.methods of a diffusion language model.

    Raises:
        UnsupportedModelError: The architecture is not one of those that were checked.
        ModelFormatError: A key is missing, or out of range.
    """
    path, architecture = gguf.paths[0], get_text(gguf, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: a diffusion language model of the architecture {architecture!r}; those that can be run are of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    mask = get_int(gguf, "tokenizer.ggml.mask_token_id", at_most=2**31 - 1)
    if mask is None:
        refuse_missing(gguf, "tokenizer.ggml.mask_token_id")
    if tokens is None or mask >= len(tokens):
        raise ModelFormatError(
            f"{path}: the mask token is {mask}, which is outside the vocabulary; convert the checkpoint again"
        )
    block = get_int(gguf, "diffusion.block_size", at_least=1, at_most=MOST_ROWS // 2)
    window = get_int(gguf, "diffusion.window_size", at_least=1, at_most=MOST_ROWS // 2)
    is_whole = architecture in ("dream", "llada") or get_bool(gguf, f"{architecture}.attention.causal") is False
    if (block is not None) + (window is not None) + is_whole != 1:
        raise ModelFormatError(
            f"{path}: a diffusion language model says its block by diffusion.block_size, or that its rows see all of a "
            f"text by a false {architecture}.attention.causal, or what is before them alone by diffusion.window_size; "
            "this file says none of these, or several; convert the checkpoint again"
        )
    shift = get_bool(gguf, "diffusion.shift_logits")
    facts = {"mask": mask, "block": block, "window": window, "shift": shift is not False}
    facts |= {"most_rows": WHOLE_ROWS if is_whole else MOST_ROWS, "kept_rows": 3 * (block or window or MOST_LENGTH)}
    return {"diffusion": {name: value for name, value in facts.items() if value is not None}}

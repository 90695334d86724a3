"""What a model was trained for, as its header says: the context, texts or vectors; a note for a longer context."""

from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.formats import header_path
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder


def trained_context(path: Path) -> int:
    """Return the longest context that a model was trained for, in tokens; 0 where its header does not say it."""
    info = read_model_info(path)
    return (info.n_ctx_train or 0) if info is not None else 0


def embeds_only(path: Path) -> bool:
    """Return whether a model's file holds a model that was trained to embed texts, not to write them."""
    try:
        return is_embedder(read_gguf(header_path(path)))
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return False


def context_note(path: Path, n_ctx: int, what: str = "the model") -> str:
    """Return a note if a context is longer than what a model was trained for, else "".

    Args:
        path: The model's file, or the folder of an export.
        n_ctx: The context, in tokens. Where the metadata scales positions, it is compared with the scaled length.
        what: What the note calls the model.
    """
    info = read_model_info(path)
    n_trained = 0 if info is None else info.n_ctx_scaled or 0
    if not 0 < n_trained < n_ctx:
        return ""
    return (
        f"the context of {n_ctx} tokens is longer than the {n_trained} that {what} was trained for: "
        "text beyond them tends to be poor"
    )


def read_model_info(path: Path) -> ModelInfo | None:
    """Return what the header of a model's file or of an exported folder says; None where no header can be read."""
    try:
        return describe(read_gguf(header_path(path)))
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return None

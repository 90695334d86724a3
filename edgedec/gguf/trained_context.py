"""The context that a model was trained for, as its header says, and what to tell of a longer one."""

from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.formats import header_path
from edgedec.gguf.model_info import ModelInfo, describe


def trained_context(path: Path) -> int:
    """Return the longest context that a model was trained for, in tokens; 0 where its file does not say it."""
    info = described(path)
    return (info.n_ctx_train or 0) if info is not None else 0


def context_note(path: Path, n_ctx: int, what: str = "the model") -> str:
    """Return what to tell of a context that is longer than what a model was trained for; else nothing.

    Where the metadata scales positions, the scaled length counts.
    """
    info = described(path)
    n_trained = 0 if info is None else info.n_ctx_scaled or 0
    if not 0 < n_trained < n_ctx:
        return ""
    return (
        f"the context of {n_ctx} tokens is longer than the {n_trained} that {what} was trained for: "
        "text beyond them tends to be poor"
    )


def described(path: Path) -> ModelInfo | None:
    """Return what a model's header says, whatever the file is called; None where it has none that can be read."""
    try:
        return describe(read_gguf(header_path(path)))
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return None

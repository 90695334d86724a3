"""The hyperparameters of a decoder in a GGUF's metadata, for the runtimes that read them themselves."""

from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_float, get_int, refuse_missing

DECODER_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)
"""Keys, below the architecture's name, that every llama-like decoder may have."""

_MOST = 2**31 - 1


def whole(gguf: GGUF, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = _MOST) -> int:
    """Return a whole number below the architecture's name.

    Raises:
        ModelFormatError: It is out of bounds, or missing without a default.
    """
    key = f"{gguf.metadata['general.architecture']}.{key}"
    value = get_int(gguf, key, at_least=at_least, at_most=at_most)
    if value is None and default is None:
        refuse_missing(gguf, key)
    return value if value is not None else default or 0


def number(gguf: GGUF, key: str, default: float | None) -> float:
    """Return a finite number below the architecture's name.

    Raises:
        ModelFormatError: It is none, or missing without a default.
    """
    key = f"{gguf.metadata['general.architecture']}.{key}"
    value = get_float(gguf, key)
    if value is None and default is None:
        refuse_missing(gguf, key)
    return value if value is not None else default or 0.0

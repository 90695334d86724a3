"""How long a context is where nobody says it: as long as the model was trained for, where memory allows that."""

from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.gguf.file import is_onnx, read_gguf, read_header_of
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder
from edgedec.load_options import default_n_ctx

_AMPLE, _AMPLE_MORE = 1.5, 500_000_000  # times a model's file, and bytes: with so much free memory, nothing is planned
_SHARE = 0.25  # of the memory that is left beside the model: what a context longer than default_n_ctx may take of it
_ELEMENT_BYTES = 2  # of a key or a value in f16, the largest type that is taken without being asked for
_LONG_DIVISORS = "rope_factors_long.weight"  # a model that has them turns positions otherwise in long contexts


def longest_context(path: Path, room_bytes: float, n_copies: int) -> int:
    """Return the tokens of a model's default context: the trained ones, or as many halves of them as memory allows.

    It is never shorter than `default_n_ctx`. Embedding models and ONNX exports keep that length: the first compute with
    their whole context at once, and the graphs of the second have lengths of their own. So do models whose rotations
    differ in long contexts, as their texts would depend on the memory of the machine.

    Args:
        path: The model's file, or the folder of an export.
        room_bytes: Bytes of memory that the model leaves free, on the device that has the least.
        n_copies: How often the keys and values of a whole context may be held at the same time.
    """
    try:
        gguf = read_header_of(path)
        found = describe(gguf)
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return default_n_ctx(0)
    n_trained = found.n_ctx_train or 0
    shortest = default_n_ctx(n_trained)
    if is_onnx(path) or is_embedder(gguf) or _LONG_DIVISORS in gguf.tensors:
        return shortest
    token_bytes, n_ctx = n_copies * _token_bytes(found), n_trained
    while n_ctx > shortest and (n_ctx - shortest) * token_bytes > _SHARE * room_bytes:
        n_ctx //= 2
    return max(n_ctx, shortest)


def ample_bytes(path: Path) -> float:
    """Return the bytes of free memory with which nothing needs to be planned for a model file."""
    return _AMPLE * file_bytes(path) + _AMPLE_MORE


def file_bytes(path: Path) -> int:
    """Return the size of a model's file, or of all parts of a split one."""
    parts = read_gguf(path).paths if "-of-" in path.name else [path]  # by the name of a split model
    return sum(part.stat().st_size for part in parts)


def _token_bytes(found: ModelInfo) -> int:
    """Return the bytes of the keys and values of a token; layers with a window or a state take less than that."""
    return sum(found.n_head_kv) * (found.key_length + found.value_length) * _ELEMENT_BYTES

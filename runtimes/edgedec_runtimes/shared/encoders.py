"""What llama.cpp takes for granted of encoders, and ends the process over where a header says something else."""

from edgedec.gguf.file import GGUF, GGUFArray
from edgedec.gguf.metadata import get_int, get_per_layer
from edgedec.gguf.model_info import ModelInfo

_MAX_WIDTH = 2**24
# By architecture: one layer of so many sees the whole text, and whether it is the first or the last one of them.
_WINDOWED = {"gemma-embedding": (6, False), "modern-bert": (3, True)}
_DENSE = ("dense_2", "dense_3")


def encoder_fault(gguf: GGUF, info: ModelInfo) -> tuple[str, str] | None:
    """Return what an encoder's header says wrongly, and what was expected; None where nothing is wrong."""
    name = info.architecture
    if "bert" not in name and name not in _WINDOWED and name != "t5encoder":
        return None
    if info.key_length != info.value_length:
        return f"a key has the length {info.key_length}, a value {info.value_length}", "the same twice"
    if name == "t5encoder":
        n = get_int(gguf, "t5encoder.attention.relative_buckets_count", at_most=_MAX_WIDTH) or 0
        return (
            (f"there are {n} ranges of distances", "a multiple of 4 up to 128") if n not in range(4, 129, 4) else None
        )
    if name == "modern-bert" and {n * info.key_length for n in (*info.n_head, *info.n_head_kv)} != {info.n_embd}:
        return f"the heads of queries or keys have not {info.n_embd} elements together", "so many"
    return _windows(gguf, info) or _dense(gguf, info)


def _windows(gguf: GGUF, info: ModelInfo) -> tuple[str, str] | None:
    """Return what is wrong with sliding windows: llama.cpp wants layers with a window and layers without."""
    if info.architecture not in _WINDOWED or not info.sliding_window:
        return None if info.architecture != "gemma-embedding" else ("there is no sliding window", "one")
    period, first = _WINDOWED[info.architecture]
    key = f"{info.architecture}.attention.sliding_window_pattern"
    if isinstance(gguf.metadata.get(key), GGUFArray):
        slides = [bool(each) for each in get_per_layer(gguf, key, info.n_layer, at_most=1) or ()]
    else:
        said = get_int(gguf, key, at_most=_MAX_WIDTH)
        period = period if said is None else said
        whole = 0 if first else period - 1
        slides = [period == 0 or i % period != whole for i in range(info.n_layer)]
    if len(set(slides)) == 1:
        return f"all {info.n_layer} layers have a window, or none has one", "layers of both kinds"
    return None


def _dense(gguf: GGUF, info: ModelInfo) -> tuple[str, str] | None:
    """Return what is wrong with the layers behind the pooling; None where they fit each other.

    The first takes n_embd numbers, each further one what the layer before gives, and the last gives n_embd again.
    """
    if info.architecture != "gemma-embedding":
        return None
    width = info.n_embd
    for name, which in zip(_DENSE, ("feat_in", "feat_out"), strict=True):
        said = get_int(gguf, f"{info.architecture}.{name}_{which}", at_most=_MAX_WIDTH)
        if said not in (None, 0, info.n_embd):
            return f"{info.architecture}.{name}_{which} is {said}", f"{info.n_embd}"
        tensor = gguf.tensors.get(f"{name}.weight")
        if tensor is not None:
            if len(tensor.shape) != 2 or tensor.shape[0] != width:
                return f"{name}.weight has the shape {tensor.shape}", f"({width}, any)"
            width = tensor.shape[1]
    return None if width == info.n_embd else (f"the layers behind the pooling give {width} numbers", f"{info.n_embd}")

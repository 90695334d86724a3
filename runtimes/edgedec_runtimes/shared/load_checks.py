"""Checks of the options that a model is loaded with: sizes, and what a runtime cannot use."""

from edgedec.errors import OptionError, RequestError, argument
from edgedec.load_options import LoadOptions

_WHY = {
    "llamacpp": "llama.cpp's C interface does not give the hidden states that a head reads, and its internal functions "
    "for them end the process for architectures such as qwen2 and gemma3",
    "npu": "its graphs do not return the hidden states that a head reads",
}
_NO_STATE = "it keeps no head's keys and values beside a text"


def refuse_draft_head(options: LoadOptions, runtime: str) -> None:
    """Raise RequestError where the options name a draft head, which this runtime can't follow a text with."""
    if options.draft_head is not None:
        raise RequestError(
            f"the {runtime} runtime does not run draft heads: {_WHY.get(runtime, _NO_STATE)}; use the cpu runtime, or "
            f"leave {argument('draft_head')} out"
        )


def refuse_adapters(options: LoadOptions, runtime: str) -> None:
    """Raise RequestError where the options name low-rank adapters, which this runtime can't use."""
    if options.adapters:
        raise RequestError(
            f"the {runtime} does not take adapters; use the cpu or the llamacpp runtime, merge the adapter into "
            f"the model (edgedec export --lora), or leave {argument('lora')} out"
        )


_MOST = {"n_ctx": 1 << 24, "n_parallel": 1 << 16, "n_threads": 256, "max_rows": 1 << 16, "resident_bytes": 1 << 62}


def refuse_resident_bytes(options: LoadOptions, runtime: str) -> None:
    """Raise RequestError where the options say how much of the weights to keep in memory: this runtime keeps all."""
    if options.resident_bytes is not None:
        raise RequestError(f"the {runtime} runtime keeps all weights in memory; leave {argument('resident_bytes')} out")


def check_sizes(options: LoadOptions, **most: int) -> None:
    """Raise OptionError for a size that is out of range; None leaves it to the runtime.

    Args:
        options: What a model is loaded with.
        most: The largest values of some sizes that the model itself allows.
    """
    for name, largest in (_MOST | most).items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= largest:
            of_model = " for this model" if name in most else ""
            raise OptionError(name, value, f"it must be from 1 to {largest}{of_model}")

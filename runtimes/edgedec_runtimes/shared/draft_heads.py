"""What runtimes without trained draft heads, or without adapters, say when one is given."""

from edgedec.errors import RequestError, argument
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

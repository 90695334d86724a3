"""The options that only the llamacpp runtime has."""

import math
from dataclasses import dataclass
from typing import ClassVar

from edgedec.errors import OptionError
from edgedec.load_options import LoadOptions, Sacrifice, read_options
from edgedec.loading.other_machines import addresses_of


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """The llamacpp runtime's own options (edgedec.load_options).

    Attributes:
        mmap: Map the weights from the file instead of copying them.
        repack: Rearrange the weights for speed, which takes private memory.
        flash_attention: Fused attention; None to let llama.cpp decide.
        rpc: "HOST:PORT,..." of machines that run llama.cpp's rpc-server, which take layers of the model. Drafting stays
            on this machine. An rpc-server asks nobody for a password, and nothing is encrypted: use it on a network of
            your own. None for this machine alone.
        rpc_wait: Most seconds for which a text waits when a server is lost. As soon as every server is back, the model
            is loaded again, and the text goes on as the one that it would have been. With 0, or when the time is over,
            RuntimeLostError ends the text.
    """

    mmap: bool = True
    repack: bool = True
    flash_attention: bool | None = None
    rpc: str | None = None
    rpc_wait: float = 0.0

    sacrifices: ClassVar[tuple[Sacrifice, ...]] = (
        Sacrifice("mapping", "weights read instead of mapped", "mmap", False, with_devices=True),
        Sacrifice("weights", "weights not rearranged", "repack", False),
    )

    def __post_init__(self) -> None:
        addresses_of(self.rpc)
        wait = self.rpc_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or math.isnan(wait) or wait < 0:
            raise OptionError("rpc_wait", wait, "it must be 0 or more seconds; inf waits for ever")


def own(options: LoadOptions) -> LlamaCppOptions:
    """Return the runtime's own options (raises as edgedec.load_options.read_options)."""
    return read_options(LlamaCppOptions, options.runtime_options, "the llamacpp runtime")

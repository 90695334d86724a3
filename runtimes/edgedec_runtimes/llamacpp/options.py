"""The options that only the llamacpp runtime has."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from edgedec.errors import OptionError
from edgedec.load_options import LoadOptions, Sacrifice, read_options
from edgedec_runtimes.llamacpp.rpc.addresses import addresses_of, require_no_layers_here, servers_note


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
        own_process: Run the model in a process of its own, whose end is an error of the text that it wrote, and not the
            application's end. None where that pays: Vulkan devices, whose drivers may die, have layers, and no adapters
            are used.
    """

    mmap: bool = True
    repack: bool = True
    flash_attention: bool | None = None
    rpc: str | None = None
    rpc_wait: float = 0.0
    own_process: bool | None = None

    of_other_machines: ClassVar[tuple[str, ...]] = ("rpc", "rpc_wait")
    sacrifices: ClassVar[tuple[Sacrifice, ...]] = (
        Sacrifice("mapping", "weights read instead of mapped", "mmap", False, with_devices=True),
        Sacrifice("weights", "weights not rearranged", "repack", False),
    )

    def __post_init__(self) -> None:
        addresses_of(self.rpc)
        wait = self.rpc_wait
        if isinstance(wait, bool) or not isinstance(wait, int | float) or math.isnan(wait) or wait < 0:
            raise OptionError("rpc_wait", wait, "it must be 0 or more seconds; inf waits for ever")

    @property
    def machines(self) -> tuple[str, ...]:
        """The servers that take layers, each as "host:port"."""
        return addresses_of(self.rpc)

    @property
    def warning(self) -> str:
        """What a person should know of servers beyond this machine; "" where there are none."""
        return servers_note(self.machines)

    @property
    def wait_s(self) -> float:
        """Most seconds for which a text waits for a server that is lost."""
        return self.rpc_wait

    def require_no_layers_here(self, *, layer_skip: bool, draft_head: bool) -> None:
        """Raise RequestError for options that need the model's layers on this machine, where servers have them."""
        if self.machines:
            require_no_layers_here(layer_skip=layer_skip, draft_head=draft_head)


def of_this_machine(options: LoadOptions) -> LoadOptions:
    """Return the options without the servers of other machines."""
    pairs = options.runtime_options.items()
    local = {name: value for name, value in pairs if name not in LlamaCppOptions.of_other_machines}
    return replace(options, runtime_options=local, machines=())


def is_apart(options: LoadOptions) -> bool:
    """Return whether a model runs in a process of its own; `options.layer_split` says which devices have layers."""
    chosen = llamacpp_options(options)
    if chosen.machines or chosen.own_process is not None:
        return bool(chosen.machines or chosen.own_process)
    return not options.adapters and any(name.startswith("Vulkan") for name, n in options.layer_split or () if n)


def llamacpp_options(options: LoadOptions) -> LlamaCppOptions:
    """Return the runtime's own options (raises as edgedec.load_options.read_options)."""
    return read_options(LlamaCppOptions, options.runtime_options, "the llamacpp runtime")

"""How a runtime loads a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.progress import CancelToken, OnProgress

_COUNTS = ("n_ctx", "n_parallel", "max_rows", "n_threads", "resident_bytes", "planning_bytes", "n_gpu_layers")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a runtime loads a model; a runtime refuses options that it can't honour.

    Attributes:
        n_ctx: Tokens of the sessions that will be opened; None for the trained context, at most 4,096. A plan names it.
        n_parallel: How many sessions of that size share one forward.
        max_rows: Most rows of logits of one session's forward: a draft's nodes and one. 1 saves the memory of trees.
        n_threads: Threads of a forward; None for as many as there are cores that this process may use.
        kv_type: Element type of the KV cache ("f16", "q8_0", ...).
        tiles_only: Let the rearranged weights of a fetched model take the place of its file.
        resident_bytes: Most bytes of weights held in memory; each forward reads the others from the disk. None for all.
        planning_bytes: Most bytes that making the memory plan may take for a while, or None; a runtime that would take
            more returns only the terms that it knows without (MemoryTerm.partial).
        draft_head: A trained draft head that follows each session's text, or None.
        n_gpu_layers: Layers on the GPU; 0 for none, None for the runtime's default, -1 for all.
        device: Name of the device (`edgedec doctor` lists the names), or None.
        layer_split: How many layers each device takes, by its name, in the order of the layers; the host keeps the
            first layers, as many as are left. The output matrix counts as the last layer. A memory plan chooses it
            (edgedec.device); None to go by `n_gpu_layers`.
        runtime_options: Values by the names of options that only this runtime has (edgedec.runtime_options).
        machines: Other machines that take layers, as these options name them; times that are measured hold for these.
        cache_dir: Root of edgedec's cache, for what a runtime remembers between starts; None to remember nothing.
        on_progress: Called during loading, in the calling thread.
        cancel: Stops the loading.
    """

    n_ctx: int | None = None
    n_parallel: int = 1
    max_rows: int = 16
    n_threads: int | None = None
    kv_type: str = "f16"
    tiles_only: bool = False
    resident_bytes: int | None = None
    planning_bytes: int | None = None
    draft_head: Path | None = None
    n_gpu_layers: int | None = None
    device: str | None = None
    layer_split: tuple[tuple[str, int], ...] | None = None
    runtime_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    machines: tuple[str, ...] = ()
    cache_dir: Path | None = None
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise RequestError(f"{name} is {value!r}; it must be a whole number")

    def with_own(self, **values: object) -> "LoadOptions":
        """Return the options with other values of options that only the runtime has."""
        return replace(self, runtime_options={**self.runtime_options, **values})

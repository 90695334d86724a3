"""How a model is found and loaded: the contract of a resolver, the options of every runtime, and those of a single one.

A resolver turns what a user types (a catalogue name, hf:owner/repo, ollama:name) into a file on disk. Resolvers are
plug-ins (entry point group `edgedec.resolvers`); edgedec's own is in edgedec_models. An existing path is used as it is,
without a resolver.

A runtime names the options that only it has in its attribute `own_options`, a frozen dataclass with a default for each
field:

    @dataclass(frozen=True, slots=True)
    class CpuOptions:
        mmap: bool = True
        huge_pages: Literal["auto", "on", "off"] = "auto"

Users give `load(..., runtime_options={"huge_pages": "off"})`, or `--runtime-option huge_pages=off`. A field is a truth
value, a number, a text or a Literal of texts, each perhaps or None; numbers and truth values may be given as text.

`edgedec --help` imports this file, which imports next to nothing.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args, get_type_hints, runtime_checkable

from edgedec.callers import check_fields, checked_value, did_you_mean
from edgedec.errors import OptionError, RequestError, argument
from edgedec.progress import CancelToken, OnProgress

T = TypeVar("T")

N_DRAFT_MAX = 15
"""The most nodes of a draft, unless a user says otherwise."""

_WORDS = {**dict.fromkeys(("1", "yes", "true", "on"), True), **dict.fromkeys(("0", "no", "false", "off"), False)}


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
        prompt_cache_bytes: Most bytes of the disk, in `cache_dir`, that the prompts of all models take; 0 keeps none.
        adapters: Low-rank adapters of the model, each a GGUF or a folder of PEFT with the scale that texts begin with.
        n_gpu_layers: Layers on the GPU; 0 for none, None for the runtime's default, -1 for all.
        device: Name of the device (`edgedec doctor` lists the names), or None.
        layer_split: How many layers each device takes, by its name, in the order of the layers; the host keeps the
            first layers, as many as are left. The output matrix counts as the last layer. A memory plan chooses it
            (edgedec.memory_plan.Device); None to go by `n_gpu_layers`.
        runtime_options: Values by the names of options that only this runtime has (read_options).
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
    prompt_cache_bytes: int = 0
    adapters: tuple[tuple[Path, float], ...] = ()
    n_gpu_layers: int | None = None
    device: str | None = None
    layer_split: tuple[tuple[str, int], ...] | None = None
    runtime_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    machines: tuple[str, ...] = ()
    cache_dir: Path | None = None
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None

    def __post_init__(self) -> None:
        check_fields(self)


def default_n_ctx(n_ctx_train: int) -> int:
    """Return the context that needs no look at memory: what the model was trained for, at most 4,096 tokens."""
    return min(n_ctx_train, 4096) if n_ctx_train > 0 else 4096


@dataclass(frozen=True, slots=True)
class ResolveOptions:
    """How a resolver may look a model up and fetch it.

    Attributes:
        cache_dir: Root of edgedec's cache; None for the platform's default.
        offline: Never touch the network; raise OfflineError where it would be needed.
        on_progress: Called with the progress of downloads, from the calling thread.
        cancel: Stops a download; the part that was fetched is kept for resuming.
        draft_head: The name is a trained draft head's: a repository may hold config.json and safetensors instead of a
            GGUF, and the file returned is then config.json.
    """

    cache_dir: Path | None = None
    offline: bool = False
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None
    draft_head: bool = False


class Resolver(Protocol):
    """Turns a model name into the path of a local file, and fetches the file where that is allowed."""

    def __call__(self, name: str, options: ResolveOptions) -> Path | None:
        """Return the file of `name`, or None where the name is of no kind that this resolver knows.

        Raises:
            ModelNotFoundError: The name is of this resolver's kind, but there is no model of that name.
            PullError, OfflineError, StorageError, CancelledError: Fetching the file failed.
        """


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a runtime that has none of its own."""


@dataclass(frozen=True, slots=True)
class Sacrifice:
    """An option that a memory plan may set to save memory, when nothing better is left to give up.

    A runtime's dataclass of options names them in the class attribute `sacrifices`, in their order.

    Attributes:
        kind: What is given up, in a word; of two sacrifices of one kind the later one is told.
        phrase: What is given up, in words for a person.
        name: The option.
        value: The value that it is set to.
        with_devices: Whether this saves memory only where layers are on devices.
    """

    kind: str
    phrase: str
    name: str
    value: object
    with_devices: bool = False


@runtime_checkable
class OtherMachines(Protocol):
    """Own options by which a runtime puts layers of a model on other machines.

    Their class attribute `of_other_machines` names the options that a model on this machine alone goes without.
    """

    @property
    def machines(self) -> tuple[str, ...]:
        """The other machines; none where all layers stay on this one."""

    @property
    def warning(self) -> str:
        """What a person should know before layers are put there; may be empty."""

    @property
    def wait_s(self) -> float:
        """Most seconds for which a text waits for a machine that is lost."""

    def require_no_layers_here(self, *, layer_skip: bool, draft_head: bool) -> None:
        """Raise RequestError where other machines take the layers, and one of these needs them on this one."""


def own_options(runtime: object) -> type[Any]:
    """Return the dataclass of the options that only this runtime has."""
    return getattr(runtime, "own_options", NoOptions)  # other packages' runtimes need not have it


def known_to(runtime: object, options: Mapping[str, object]) -> dict[str, object]:
    """Return those of the given options that a runtime has for a model on this machine."""
    kind = own_options(runtime)
    names = {field.name for field in fields(kind)} - set(getattr(kind, "of_other_machines", ()))
    return {name: value for name, value in options.items() if name in names}


def read_options(kind: type[T], options: Mapping[str, object], owner: str) -> T:
    """Return the options of a runtime or of a method: what is given, and the defaults of the others.

    Args:
        kind: The dataclass of the options.
        options: Values by the names of options.
        owner: Whose options they are, for errors: "the cpu runtime".

    Raises:
        RequestError: There is no option of a name.
        OptionError: An option does not take the value.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
    for name in checked_value(owner, Mapping, options):
        if name not in names:
            has = f"{did_you_mean(str(name), names)}; its own are {', '.join(names)}" if names else ""
            raise RequestError(
                f"{owner} has no option {name!r}{has}; leave it out, or name what has it ({argument('runtime')})"
            )
    return kind(**{name: read_value(name, hints[name], value) for name, value in options.items()})


def read_value(name: str, hint: Any, value: object) -> object:
    """Return the value of an option of this type, read from a text where it is one (OptionError)."""
    kinds = [*get_args(hint), hint]
    if str in kinds and isinstance(value, os.PathLike):
        return value
    if isinstance(value, str) and bool in kinds and str not in kinds:
        if value.lower() not in _WORDS:
            raise OptionError(name, value, "it must be yes or no")
        return _WORDS[value.lower()]
    for kind in (int, float):
        if isinstance(value, str) and value.isascii() and kind in kinds:
            try:
                return kind(value)
            except ValueError:
                break
    return checked_value(name, hint, value)

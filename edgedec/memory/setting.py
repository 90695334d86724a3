"""A way to load a model, and the memory that there is for it: under a cap, beside other models, or free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from edgedec.drafter import STORE_BYTES
from edgedec.errors import EdgedecError
from edgedec.gguf.file import is_onnx, read_gguf, read_header_of
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder
from edgedec.gguf.places import standing
from edgedec.load_options import LoadOptions, default_n_ctx
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.system import available_bytes
from edgedec.memory_plan import Device, MemoryPlan, MemoryTerm, devices_of

DRAFT_MODEL = "draft model"
"""What the terms of a draft model begin with."""

_AMPLE, _AMPLE_MORE = 1.5, 500_000_000  # times a model's file, and bytes: with so much free memory, nothing is planned
_USABLE = 0.9  # of the memory that the system has free
_SHARE = 0.25  # of the memory that is left beside the model: what a context longer than default_n_ctx may take of it
_ELEMENT_BYTES = 2  # of a key or a value in f16, the largest type that is taken without being asked for
_LONG_DIVISORS = "rope_factors_long.weight"  # a model that has them turns positions otherwise in long contexts


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to load a model.

    Attributes:
        options: The runtime's options.
        drafters: Names of the drafters, "model" or "cascade" among them where a draft model drafts.
        pinned: Whether the drafters were asked for by name; they are not given up then.
        draft_model: The draft model's file, or None.
        store_bytes: Most bytes that each drafter with a store keeps between requests.
        grammar_bytes: Most bytes that compiled grammars take, and that each text takes whose tokens a grammar limits;
            0 where no grammar is used. The first grammar also takes a second copy of the vocabulary.
        given_up: What was given up to fit: for each kind of sacrifice, the phrase that describes it.
        companion: The file of a further model that writes with this one, or None.
        companion_role: What that model is called.
        draft_overlap: Whether the draft model drafts on the CPU while the target verifies.
        max_rows_pinned: Whether `options.max_rows` was asked for by name; it is not given up then.
        request_bytes: Bytes that a server keeps for requests, from their bodies to their answers.
        n_texts: Texts of one prompt that a request writes at the same time.
        fewer_layers: Whether as many layers as fit are put on devices, instead of all that are wished for.
        learned_bytes: Most bytes of the user's own files that the drafters may read from; 0 for none.
        slides: Whether the context slides. Its length decides then what the model sees of a text, so free memory does
            not make it longer.
        stores: Names of drafters that keep a store between requests.
        least_rows: The fewest rows of a forward that the drafters can do with.
        picture_terms: What reading pictures takes; none where no pictures are read.
        pictures_pinned: Whether pictures were asked for by name; they are not given up then.
    """

    options: LoadOptions
    drafters: tuple[str, ...] = ()
    pinned: bool = False
    draft_model: Path | None = None
    store_bytes: int = STORE_BYTES
    grammar_bytes: int = 0
    given_up: Mapping[str, str] = field(default_factory=dict)
    companion: Path | None = None
    companion_role: str = ""
    draft_overlap: bool = False
    max_rows_pinned: bool = False
    request_bytes: int = 0
    n_texts: int = 1
    fewer_layers: bool = False
    learned_bytes: int = 0
    slides: bool = False
    stores: tuple[str, ...] = ()
    least_rows: int = 1
    picture_terms: tuple[MemoryTerm, ...] = ()
    pictures_pinned: bool = False

    @property
    def n_stores(self) -> int:
        """How many of the drafters keep a store between requests."""
        return sum(name in self.stores for name in self.drafters)

    def less(self, kind: str, phrase: str, options: Mapping[str, Any] | None = None, **fields: Any) -> "Setting":
        """Return the setting with a sacrifice of this kind; its phrase replaces an earlier one of the same kind.

        Args:
            kind: The kind of sacrifice, a key of `given_up`.
            phrase: What is given up, in words for a person.
            options: Fields of the runtime's options that change.
            **fields: Fields of the setting that change.
        """
        given_up = {**self.given_up_without(kind), kind: phrase}
        return replace(self, options=replace(self.options, **options or {}), given_up=given_up, **fields)

    def given_up_without(self, kind: str) -> dict[str, str]:
        """Return `given_up` without the sacrifice of that kind."""
        return {name: phrase for name, phrase in self.given_up.items() if name != kind}

    def drafters_without(self, *names: str) -> tuple[str, ...]:
        """Return the names of the drafters that are not among `names`."""
        return tuple(name for name in self.drafters if name not in names)


@dataclass(frozen=True, slots=True)
class Cap:
    """How much memory may be held.

    Attributes:
        n_bytes: The most bytes, or None for no limit.
        beside_bytes: Bytes that are held already and count: those of the whole process before the model is loaded, or
            those of edgedec's other models.
        whole_process: Whether the cap is for the whole process, the interpreter included, or for edgedec's models only.
        name: Where the cap comes from: "allowed" by the user, or "free" on this machine.
        earlier_peak_bytes: The most bytes that the process held before the plan was begun, as a server may have done.
        beside: How `beside_bytes` were found, where they are the process's: "measured" or "assumed".
        gpu_bytes: The most bytes on each device, or None for what the device has free.
        gpu_beside_bytes: Bytes that edgedec's other models hold there and that count.
    """

    n_bytes: int | None = None
    beside_bytes: int = 0
    whole_process: bool = False
    name: str = "allowed"
    earlier_peak_bytes: int = 0
    beside: str = "measured"
    gpu_bytes: int | None = None
    gpu_beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting, the runtime that loads it, and the memory that this takes under the cap."""

    setting: Setting
    plan: MemoryPlan
    choice: Choice


Plan = Callable[[Setting], Planned]
"""Plans a setting."""


class Holder(Protocol):
    """What holds memory that counts against the caps of models loaded later.

    Attributes:
        held_bytes: Bytes of the host's memory.
        gpu_held_bytes: Bytes of the device that holds most.
    """

    held_bytes: int
    gpu_held_bytes: int


class HeldByModels:
    """What edgedec's models hold in this process: the cap of load(memory=...) is for all of them together."""

    def __init__(self) -> None:
        self._holders: WeakSet[Holder] = WeakSet()

    def add(self, holder: Holder) -> None:
        """Count a model, for as long as it exists."""
        self._holders.add(holder)

    def cap(self, n_bytes: int | None, gpu_bytes: int | None) -> Cap:
        """Return the cap of a model loaded now, where these are for all models together."""
        held, gpu_held = (sum(getattr(one, name) for one in self._holders) for name in ("held_bytes", "gpu_held_bytes"))
        return Cap(n_bytes, held, gpu_bytes=gpu_bytes, gpu_beside_bytes=gpu_held)


HELD = HeldByModels()
"""The one account of this process's models."""


def planning_bytes(cap: Cap) -> int | None:
    """Return the bytes that making a plan may take beside what is held already (LoadOptions.planning_bytes)."""
    if cap.n_bytes is None:
        return None
    room, free = max(0, cap.n_bytes - cap.beside_bytes), available_bytes()
    return room if free is None else min(room, free)


def free_if_short(path: Path) -> int | None:
    """Return the bytes that the system has free where the model may not fit into them, else None."""
    free = available_bytes()
    return int(free * _USABLE) if free is not None and ample_bytes(path) > free else None


def ample_bytes(path: Path) -> float:
    """Return the bytes of free memory with which nothing needs to be planned for a model file."""
    return _AMPLE * file_bytes(path) + _AMPLE_MORE


def file_bytes(path: Path) -> int:
    """Return the size of a model's file, or of all parts of a split one."""
    parts = read_gguf(path).paths if "-of-" in path.name else [path]  # by the name of a split model
    return sum(standing(part).stat().st_size for part in parts)


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


def _token_bytes(found: ModelInfo) -> int:
    """Return the bytes of the keys and values of a token; layers with a window or a state take less than that."""
    return sum(found.n_head_kv) * (found.key_length + found.value_length) * _ELEMENT_BYTES


def devices_for(choice: Choice, wishes: Setting) -> tuple[Device, ...]:
    """Return the devices that layers may be put on (raises as HasDevices.devices); none where none are wanted there."""
    return () if wishes.options.n_gpu_layers == 0 else devices_of(choice.runtime, wishes.options)

"""The memory that there is for a model: under a cap, beside other models, or free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

from edgedec.drafter import DrafterFactory
from edgedec.drafter_traits import demands_of
from edgedec.errors import EdgedecError
from edgedec.gguf.file import is_onnx, read_gguf, read_header_of
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.model_kinds import is_embedder
from edgedec.gguf.places import standing
from edgedec.load_options import default_n_ctx
from edgedec.load_plan import LoadPlan
from edgedec.memory.system import available_bytes
from edgedec.memory_plan import Device, devices_of

DRAFT_MODEL = "draft model"
"""What the terms of a draft model begin with."""

_AMPLE, _AMPLE_MORE = 1.5, 500_000_000  # times a model's file, and bytes: with so much free memory, nothing is planned
_USABLE = 0.9  # of the memory that the system has free
_SHARE = 0.25  # of the memory that is left beside the model: what a context longer than default_n_ctx may take of it
_ELEMENT_BYTES = 2  # of a key or a value in f16, the largest type that is taken without being asked for
_LONG_DIVISORS = "rope_factors_long.weight"  # a model that has them turns positions otherwise in long contexts


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


Plan = Callable[[LoadPlan], LoadPlan]
"""Returns a plan with the memory that it takes under the cap."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Held:
    """What a loaded model holds: it counts against the caps of models loaded later.

    Attributes:
        n_bytes: Bytes of the host's memory.
        gpu_bytes: Bytes of the device that holds most.
    """

    n_bytes: int
    gpu_bytes: int


HELD: WeakSet[Held] = WeakSet()
"""What the models of this process hold, each as long as it keeps that: load(memory=...) caps all of them together."""


def cap_beside_held(n_bytes: int | None, gpu_bytes: int | None) -> Cap:
    """Return the cap of a model loaded now, where these are for all models together."""
    held = [*HELD]
    return Cap(
        n_bytes,
        sum(one.n_bytes for one in held),
        gpu_bytes=gpu_bytes,
        gpu_beside_bytes=sum(one.gpu_bytes for one in held),
    )


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
        info = describe(gguf)
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return default_n_ctx(0)
    n_trained = info.n_ctx_train or 0
    shortest = default_n_ctx(n_trained)
    if is_onnx(path) or is_embedder(gguf) or _LONG_DIVISORS in gguf.tensors:
        return shortest
    token_bytes, n_ctx = n_copies * _token_bytes(info), n_trained
    while n_ctx > shortest and (n_ctx - shortest) * token_bytes > _SHARE * room_bytes:
        n_ctx //= 2
    return max(n_ctx, shortest)


def _token_bytes(info: ModelInfo) -> int:
    """Return the bytes of the keys and values of a token; layers with a window or a state take less than that."""
    return sum(info.n_head_kv) * (info.key_length + info.value_length) * _ELEMENT_BYTES


def devices_for(plan: LoadPlan) -> tuple[Device, ...]:
    """Return the devices that layers may be put on (raises as HasDevices.devices); none where none are wanted there."""
    return () if plan.options.n_gpu_layers == 0 else devices_of(plan.runtime, plan.options)


def with_drafters(plan: LoadPlan, drafters: Mapping[str, DrafterFactory]) -> LoadPlan:
    """Return the plan with these drafters only, and without the draft model or the head if none drafts with it."""
    demands = [demands_of(factory) for factory in drafters.values()]
    plan = replace(plan, drafters=drafters)
    if plan.draft_model is not None and not any(each.draft_model for each in demands):
        terms = tuple(term for term in plan.memory.terms if not term.name.startswith(f"{DRAFT_MODEL}: "))
        plan = replace(plan, draft_model=None, memory=replace(plan.memory, terms=terms))
    return plan if any(each.head for each in demands) else plan.with_options(draft_head=None)

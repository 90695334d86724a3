"""What a model takes: the terms of its memory plan, with layers split among devices under their caps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edgedec.drafter_traits import demands_of, keeps_store
from edgedec.errors import counted
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.setting import DRAFT_MODEL, Cap, Plan, devices_for
from edgedec.memory.shedding import margin_bytes
from edgedec.memory_plan import (
    DRIVER,
    HOST,
    OTHER_MODELS,
    Device,
    DeviceCap,
    HasDevices,
    MemoryPlan,
    MemoryTerm,
    Split,
    format_bytes,
)
from edgedec.sessions.text_pages import PAGE_TOKENS, ROWS_OF_TEXT, n_pages

REQUESTS = "requests"
"""The term of what a server keeps for requests."""
RESERVE = "reserve"
"""The term of what a plan keeps free below the cap."""

_OF_EACH_TEXT = ("KV cache", "KV cache of the draft head", "columns of convolutions")
_WORKING_BYTES = 4_000_000
_GRAMMAR_BYTES_PER_TOKEN = 175  # measured with llguidance: 160 to 168
_USABLE_OF_DEVICE = 0.9  # of what a device has free


def planner_of(wishes: LoadPlan, cap: Cap) -> Plan:
    """Return the function that gives a plan its terms; it asks each runtime once for the same options."""
    vocabulary = list[MemoryTerm]()
    if wishes.grammar_bytes:
        n_vocab = describe(read_header_of(wishes.path)).n_vocab
        n_bytes, detail = n_vocab * _GRAMMAR_BYTES_PER_TOKEN, f"a second vocabulary, {n_vocab} tokens"
        vocabulary = [MemoryTerm("vocabulary of grammars", n_bytes, detail)]
    caps = device_caps(devices_for(wishes), cap.gpu_bytes, cap.gpu_beside_bytes)
    n_layers = describe(read_header_of(wishes.path)).n_layer + 1 if caps else 0  # the output is the last

    @lru_cache
    def second_terms(path: Path, options: LoadOptions, name: str) -> tuple[MemoryTerm, ...]:
        from edgedec.loading.second_model import second_model_terms

        return second_model_terms(path, options, name)

    @lru_cache
    def runtime_terms(options: LoadOptions) -> tuple[MemoryTerm, ...]:
        return wishes.runtime.plan(wishes.path, options)

    def planned(plan: LoadPlan) -> LoadPlan:
        if caps and isinstance(wishes.runtime, HasDevices):
            plan = _with_split(plan, caps, n_layers, wishes.runtime, model_terms)
        terms = model_terms(plan)
        if cap.whole_process:
            terms.insert(0, MemoryTerm("interpreter and libraries", cap.beside_bytes, cap.beside, base=True))
        elif cap.beside_bytes:
            terms.append(MemoryTerm(OTHER_MODELS, cap.beside_bytes, "loaded already"))
        terms += [*drafter_terms(plan), *_request_terms(plan, terms)]
        if cap.n_bytes is not None:
            detail = "kept free: drafters shrink near the cap" if plan.drafters else "kept free"
            terms.append(MemoryTerm(RESERVE, margin_bytes(cap.n_bytes), detail, grows=True))
        given_up = tuple(plan.given_up.values())
        return replace(plan, memory=MemoryPlan(tuple(terms), cap.n_bytes, given_up, cap.name, caps))

    def model_terms(plan: LoadPlan) -> list[MemoryTerm]:
        options = replace(plan.options, on_progress=None, cancel=None)
        terms = [*(term for term in runtime_terms(options) if not term.base), *vocabulary]
        for second in _second_models(plan, options):
            terms += second_terms(*second)
        return terms + _driver_terms(terms, caps)

    return planned


def _second_models(plan: LoadPlan, options: LoadOptions) -> list[tuple[Path, LoadOptions, str]]:
    """Return the models beside the target, whose options are given: their files, options and names."""
    models = list[tuple[Path, LoadOptions, str]]()
    if plan.draft_model is None and plan.companion_path is None:
        return models
    from edgedec.loading.second_model import companion_options, draft_model_options

    if plan.draft_model is not None:
        models.append((plan.draft_model, draft_model_options(options, overlap=plan.draft_overlap), DRAFT_MODEL))
    if plan.companion is not None and plan.companion_path is not None:
        models.append((plan.companion_path, companion_options(options), plan.companion.role))
    return models


def drafter_terms(plan: LoadPlan) -> list[MemoryTerm]:
    """Return the terms of what the drafters hold, a draft model not included; drafters share equal terms."""
    declared = (term for factory in plan.drafters.values() for term in demands_of(factory).memory(plan))
    n_bytes = plan.store_bytes * sum(map(keeps_store, plan.drafters.values()))
    store = MemoryTerm("draft stores", n_bytes, "texts kept between requests, where full", grows=True)
    return [*dict.fromkeys(declared), *([store] if n_bytes else [])]


def _request_terms(plan: LoadPlan, terms: Sequence[MemoryTerm]) -> Iterator[MemoryTerm]:
    """Yield the terms of what texts and requests take beside the model, whose own terms are among `terms`."""
    n_parallel, n_more = plan.options.n_parallel, plan.n_texts - 1
    logit_bytes = sum(t.n_bytes for t in terms if t.name == "logits")
    if plan.grammar_bytes:
        detail = f"{format_bytes(plan.grammar_bytes)} to compile them, as much for each text that keeps to one"
        n_bytes = plan.grammar_bytes * (1 + n_parallel * plan.n_texts)
        yield MemoryTerm("grammars", n_bytes, detail, grows=True)
    for device in dict.fromkeys((HOST, *(t.device for t in terms))) if n_more else ():
        n_held = sum(t.n_bytes for t in terms if t.name in _OF_EACH_TEXT and t.device == device)
        n_page = n_held // max(1, n_pages(0, plan.options.n_ctx or PAGE_TOKENS))
        n_rows = ROWS_OF_TEXT * n_parallel * n_more * logit_bytes // plan.options.max_rows if device == HOST else 0
        detail = f"keys, values and two rows of logits of {n_more} more"
        yield MemoryTerm("texts of one prompt", n_more * n_held + n_page + n_rows, detail, grows=True, device=device)
    if n_parallel > 1:
        yield MemoryTerm("shared forwards", 2 * n_parallel * logit_bytes, "logits of parallel requests")
    if plan.request_bytes:
        detail = "their bodies and prompts, until they are answered"
        yield MemoryTerm(REQUESTS, plan.request_bytes, detail, grows=True)
    if plan.pictures is not None:
        yield from plan.pictures.terms()
    yield MemoryTerm("working memory", _WORKING_BYTES, "of Python, while text is generated")


def device_caps(devices: Sequence[Device], gpu_bytes: int | None, held: int = 0) -> tuple[DeviceCap, ...]:
    """Return how much of each device may be held: of what is free nine tenths, and at most what the user allows.

    Args:
        gpu_bytes: The most bytes on each device, or None for no limit.
        held: Bytes of other models that count against `gpu_bytes`.
    """
    caps = []
    for device in devices:
        free = int(device.free_bytes * _USABLE_OF_DEVICE)
        allowed = free + 1 if gpu_bytes is None else max(0, gpu_bytes - held)
        caps.append(DeviceCap(device, min(free, allowed), "allowed" if allowed <= free else "free"))
    return tuple(caps)


def _with_split(
    plan: LoadPlan,
    caps: Sequence[DeviceCap],
    n_layers: int,
    runtime: HasDevices,
    terms_of: Callable[[LoadPlan], Sequence[MemoryTerm]],
) -> LoadPlan:
    """Return the plan with its layers split: all that are wished for on devices, or as many as fit.

    Args:
        caps: How much of each device may be held.
        n_layers: All layers of the model, the output matrix among them.
        runtime: Decides which device takes how many.
        terms_of: Returns the terms of a plan's models; those without a device are the host's.
    """
    options = plan.options
    limits = {cap.device.name: cap.cap_bytes for cap in caps}

    def is_over(split: Split, name: str) -> bool:
        terms = terms_of(plan.with_options(layer_split=split))
        return sum(term.n_bytes for term in terms if term.device == name) > limits[name]

    n_wanted = n_layers if options.n_gpu_layers in (None, -1) else min(options.n_gpu_layers or 0, n_layers)
    split = runtime.split([*limits], n_wanted, is_over, whole=not plan.fewer_layers)
    plan = plan.with_options(layer_split=split)
    if not plan.fewer_layers:  # a number of layers that was asked for gives nothing up
        return plan
    where = " and ".join(f"{n} on {name}" for name, n in split) or "none on a GPU"
    return replace(plan, given_up={**plan.given_up, "layers": f"of {counted(n_layers, 'layer')} {where}"})


def _driver_terms(terms: Sequence[MemoryTerm], caps: Sequence[DeviceCap]) -> list[MemoryTerm]:
    """Return the terms of drivers and libraries on the devices that hold something."""
    used = {term.device for term in terms}
    return [
        MemoryTerm(
            DRIVER,
            device.driver_bytes,
            "measured" if device.measured else "until a load has measured it",
            device=device.name,
        )
        for device in (cap.device for cap in caps)
        if device.name in used and device.driver_bytes
    ]

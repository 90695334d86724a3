"""What a setting takes: the terms of its memory plan, with layers split among devices under their caps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from edgedec.drafters.suffix.automaton import STATE_BYTES
from edgedec.errors import counted
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.setting import (
    DRAFT_MODEL,
    Cap,
    Plan,
    Planned,
    Setting,
    devices_for,
)
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
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, MODEL, SUFFIX
from edgedec.sessions.text_pages import PAGE_TOKENS, ROWS_OF_TEXT, n_pages

REQUESTS = "requests"
"""The term of what a server keeps for requests."""
RESERVE = "reserve"
"""The term of what a plan keeps free below the cap."""
TEXTS = "texts of one prompt"
"""The term of what several texts of one prompt take beside the first one."""
STORES = "draft stores"
"""The term of what drafters keep between requests; texts fill the stores."""

_OF_EACH_TEXT = ("KV cache", "KV cache of the draft head", "columns of convolutions")
_COMMON_BYTES = 10_000_000
_INDEX_TEXT = (SUFFIX, CASCADE, MODEL)  # the drafters that hold an automaton of the text
_STATES_PER_TOKEN = 1.5
_WORKING_BYTES = 4_000_000
_GRAMMAR_BYTES_PER_TOKEN = 175  # measured with llguidance: 160 to 168
_USABLE_OF_DEVICE = 0.9  # of what a device has free


def planner_of(choice: Choice, wishes: Setting, cap: Cap) -> Plan:
    """Return the function that plans a setting; it asks each runtime once for the same options."""
    vocabulary = [_grammar_vocabulary(choice.path)] if wishes.grammar_bytes else []
    caps = device_caps(devices_for(choice, wishes), cap.gpu_bytes, cap.gpu_beside_bytes)
    n_layers = describe(read_header_of(choice.path)).n_layer + 1 if caps else 0  # the output is the last

    @lru_cache
    def second_terms(path: Path, options: LoadOptions, name: str) -> tuple[MemoryTerm, ...]:
        from edgedec.loading.second_model import second_model_terms

        return second_model_terms(path, options, name)

    @lru_cache
    def runtime_terms(options: LoadOptions) -> tuple[MemoryTerm, ...]:
        return choice.runtime.plan(choice.path, options)

    def plan(setting: Setting) -> Planned:
        if caps and isinstance(choice.runtime, HasDevices):
            setting = _with_split(
                setting, caps, n_layers, choice.runtime, lambda options: model_terms(replace(setting, options=options))
            )
        terms = model_terms(setting)
        if cap.whole_process:
            terms.insert(0, MemoryTerm("interpreter and libraries", cap.beside_bytes, cap.beside, base=True))
        elif cap.beside_bytes:
            terms.append(MemoryTerm(OTHER_MODELS, cap.beside_bytes, "loaded already"))
        terms += [*_drafter_terms(setting, setting.options.n_ctx or 0), *_request_terms(setting, terms)]
        if cap.n_bytes is not None:
            detail = "kept free: drafters shrink near the cap" if setting.drafters else "kept free"
            terms.append(MemoryTerm(RESERVE, margin_bytes(cap.n_bytes), detail, grows=True))
        given_up = tuple(setting.given_up.values())
        return Planned(setting, MemoryPlan(tuple(terms), cap.n_bytes, given_up, cap.name, caps), choice)

    def model_terms(setting: Setting) -> list[MemoryTerm]:
        options = replace(setting.options, on_progress=None, cancel=None)
        terms = [*(term for term in runtime_terms(options) if not term.base), *vocabulary]
        for second in _second_models(setting, options):
            terms += second_terms(*second)
        return terms + _driver_terms(terms, caps)

    return plan


def _second_models(setting: Setting, options: LoadOptions) -> list[tuple[Path, LoadOptions, str]]:
    """Return the models beside the target, whose options are given: their files, options and names."""
    found = list[tuple[Path, LoadOptions, str]]()
    if setting.draft_model is None and setting.companion is None:
        return found
    from edgedec.loading.second_model import companion_options, draft_model_options

    if setting.draft_model is not None:
        smaller = draft_model_options(options, overlap=setting.draft_overlap)
        found.append((setting.draft_model, smaller, DRAFT_MODEL))
    if setting.companion is not None:
        found.append((setting.companion, companion_options(options), setting.companion_role))
    return found


def _grammar_vocabulary(path: Path) -> MemoryTerm:
    n_vocab = describe(read_header_of(path)).n_vocab
    detail = f"a second vocabulary, {n_vocab} tokens"
    return MemoryTerm("vocabulary of grammars", n_vocab * _GRAMMAR_BYTES_PER_TOKEN, detail)


def _drafter_terms(setting: Setting, n_ctx: int) -> Iterator[MemoryTerm]:
    """Yield the terms of what the drafters hold, a draft model not included."""
    if COMMON in setting.drafters:
        yield MemoryTerm("common text", _COMMON_BYTES, "for the first drafts")
    if setting.learned_bytes:
        yield MemoryTerm("learned files", setting.learned_bytes, "mapped; those of edgedec learn")
    if n_ctx and any(name in _INDEX_TEXT for name in setting.drafters):
        n_bytes = int(n_ctx * setting.options.n_parallel * setting.n_texts * _STATES_PER_TOKEN * STATE_BYTES)
        yield MemoryTerm("index of the text", n_bytes, f"for drafts, {counted(n_ctx, 'token')}", grows=True)
    if n_bytes := setting.store_bytes * setting.n_stores:
        yield MemoryTerm(STORES, n_bytes, "texts kept between requests, where full", grows=True)


def _request_terms(setting: Setting, terms: Sequence[MemoryTerm]) -> Iterator[MemoryTerm]:
    """Yield the terms of what texts and requests take beside the model, whose own terms are among `terms`."""
    n_parallel, n_more = setting.options.n_parallel, setting.n_texts - 1
    logit_bytes = sum(t.n_bytes for t in terms if t.name == "logits")
    if setting.grammar_bytes:
        detail = f"{format_bytes(setting.grammar_bytes)} to compile them, as much for each text that keeps to one"
        n_bytes = setting.grammar_bytes * (1 + n_parallel * setting.n_texts)
        yield MemoryTerm("grammars", n_bytes, detail, grows=True)
    for device in dict.fromkeys((HOST, *(t.device for t in terms))) if n_more else ():
        n_held = sum(t.n_bytes for t in terms if t.name in _OF_EACH_TEXT and t.device == device)
        n_page = n_held // max(1, n_pages(0, setting.options.n_ctx or PAGE_TOKENS))
        n_rows = ROWS_OF_TEXT * n_parallel * n_more * logit_bytes // setting.options.max_rows if device == HOST else 0
        detail = f"keys, values and two rows of logits of {n_more} more"
        yield MemoryTerm(TEXTS, n_more * n_held + n_page + n_rows, detail, grows=True, device=device)
    if n_parallel > 1:
        yield MemoryTerm("shared forwards", 2 * n_parallel * logit_bytes, "logits of parallel requests")
    if setting.request_bytes:
        detail = "their bodies and prompts, until they are answered"
        yield MemoryTerm(REQUESTS, setting.request_bytes, detail, grows=True)
    yield from setting.picture_terms
    yield MemoryTerm("working memory", _WORKING_BYTES, "of Python, while text is generated")


def drafter_bytes(setting: Setting, n_ctx: int) -> int:
    """Return the most bytes that the drafters hold in a context of `n_ctx` tokens, a draft model not included."""
    return sum(term.n_bytes for term in _drafter_terms(setting, n_ctx))


def device_caps(devices: Sequence[Device], gpu_bytes: int | None, held: int = 0) -> tuple[DeviceCap, ...]:
    """Return how much of each device may be held: of what is free nine tenths, and at most what the user allows.

    Args:
        devices: The devices.
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
    setting: Setting,
    caps: Sequence[DeviceCap],
    n_layers: int,
    runtime: HasDevices,
    terms_of: Callable[[LoadOptions], Sequence[MemoryTerm]],
) -> Setting:
    """Return the setting with its layers split: all that are wished for on devices, or as many as fit.

    Args:
        setting: The setting.
        caps: How much of each device may be held.
        n_layers: All layers of the model, the output matrix among them.
        runtime: Decides which device takes how many.
        terms_of: Returns the terms of the models under options; those without a device are the host's.
    """
    options = setting.options
    limits = {cap.device.name: cap.cap_bytes for cap in caps}

    def is_over(split: Split, name: str) -> bool:
        terms = terms_of(replace(options, layer_split=split))
        return sum(term.n_bytes for term in terms if term.device == name) > limits[name]

    n_wanted = n_layers if options.n_gpu_layers in (None, -1) else min(options.n_gpu_layers or 0, n_layers)
    split = runtime.split([*limits], n_wanted, is_over, whole=not setting.fewer_layers)
    setting = replace(setting, options=replace(options, layer_split=split))
    if not setting.fewer_layers:  # a number of layers that was asked for gives nothing up
        return setting
    where = " and ".join(f"{n} on {name}" for name, n in split) or "none on a GPU"
    return replace(setting, given_up={**setting.given_up, "layers": f"of {counted(n_layers, 'layer')} {where}"})


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

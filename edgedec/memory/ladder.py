"""The ladder of a memory plan: what is given up, and in which order, until a model fits under a cap.

What costs the user least is given up first; docs/memory.md shows the order with its measurements. Nothing that was
asked for by name is given up. The text stays the same, with two exceptions: a shorter context ends a text sooner, and a
smaller type of the KV cache, which is taken only where `kv_type` is "auto", may change the text.

SpecMemo (2025) asks which speculation still pays under a memory limit; the ladder answers that for the whole model.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgedec.grammar import LEAST_GRAMMAR_BYTES
from edgedec.load_options import Sacrifice, own_options, read_options
from edgedec.memory.setting import Setting
from edgedec.memory_plan import format_bytes
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, HEAD, MODEL

_GRAMMAR_BYTES = (16_000_000, LEAST_GRAMMAR_BYTES)
_STORE_BYTES = (8_000_000, 2_000_000)
_REQUEST_BYTES = (4_000_000, 2_000_000)
CONTEXTS = (4096, 2048, 1024, 512)  # the first is given up before anything else
_SHORT_CONTEXTS = (256, 128)  # of models that embed or rank, whose texts are short and never grow
_ROWS = (16, 8, 4)
_KV_TYPES = ("q8_0", "gear", "q4_0")


Rung = Callable[[Setting], Setting]
"""A step down the ladder: gives something up, or returns the setting unchanged where there is nothing to give up."""


def rungs(wishes: Setting, runtime: object, *, with_devices: bool = False, embeds: bool = False) -> Sequence[Rung]:
    """Return the steps down from these wishes on a runtime, in their order (docs/memory.md).

    `embeds` says that the model embeds or ranks texts and writes none.
    """
    kind = own_options(runtime)
    sacrifices: tuple[Sacrifice, ...] = getattr(kind, "sacrifices", ())
    free_layers = with_devices and wishes.options.n_gpu_layers in (None, -1)
    kv_types = _KV_TYPES if wishes.options.kv_type == "auto" else ()
    lengths = CONTEXTS if wishes.options.n_ctx is None else ()
    return (
        *(partial(with_context, n_ctx) for n_ctx in lengths[:1]),
        _without_kept_prompts,
        _without_pictures,
        *_cuts("grammars", "grammar_bytes", "grammars of at most {}", _GRAMMAR_BYTES),
        *(partial(_without_option, kind, one) for one in sacrifices if with_devices or not one.with_devices),
        _without_draft_model,
        *_cuts("store", "store_bytes", "draft stores cut to {}", _STORE_BYTES if wishes.n_stores else ()),
        *_cuts("requests", "request_bytes", "{} for all requests together", _REQUEST_BYTES),
        *(partial(_with_rows, n_rows) for n_rows in _ROWS[:-1]),
        *([_with_fewer_layers] if free_layers else []),
        _without_head,
        *(partial(_with_kv, kv_type) for kv_type in kv_types[:1]),
        *(partial(with_context, n_ctx) for n_ctx in lengths[1:]),
        *(partial(_with_kv, kv_type) for kv_type in kv_types[1:]),
        *(partial(with_context, n_ctx) for n_ctx in _SHORT_CONTEXTS if embeds and lengths),
        _without_learned,
        _without_common,
        partial(_with_rows, _ROWS[-1]),
        _without_drafting,
    )


def with_more_rows(setting: Setting, wishes: Setting) -> Setting:
    """Return the setting with the rows that were wished for, or with those that the ladder's first step leaves."""
    options = replace(setting.options, max_rows=wishes.options.max_rows)
    return _with_rows(_ROWS[0], replace(setting, options=options, given_up=setting.given_up_without("rows")))


def _cuts(kind: str, name: str, phrase: str, sizes: Sequence[int]) -> list[Rung]:
    """Return the steps that cut a field of the setting, which counts bytes, to each of these sizes."""
    return [partial(_cut, kind, name, phrase, n_bytes) for n_bytes in sizes]


def _cut(kind: str, name: str, phrase: str, n_bytes: int, setting: Setting) -> Setting:
    if getattr(setting, name) <= n_bytes:
        return setting
    fields: dict[str, Any] = {name: n_bytes}
    return setting.less(kind, phrase.format(format_bytes(n_bytes)), **fields)


def _without_kept_prompts(setting: Setting) -> Setting:
    if not setting.options.prompt_cache_bytes:
        return setting
    return setting.less("prompts", "no prompts kept on the disk", {"prompt_cache_bytes": 0})


def _without_pictures(setting: Setting) -> Setting:
    if setting.pictures_pinned or not setting.picture_terms:
        return setting
    return setting.less("pictures", "pictures left out", picture_terms=())


def _with_fewer_layers(setting: Setting) -> Setting:
    return setting.less("layers", "fewer layers on devices", fewer_layers=True)


def _without_option(kind: type[Any], sacrifice: Sacrifice, setting: Setting) -> Setting:
    given = setting.options.runtime_options
    if getattr(read_options(kind, given, "it"), sacrifice.name) == sacrifice.value:
        return setting
    changed = {"runtime_options": {**given, sacrifice.name: sacrifice.value}}
    return setting.less(sacrifice.kind, sacrifice.phrase, changed)


def _without_draft_model(setting: Setting) -> Setting:
    if setting.pinned or setting.draft_model is None:
        return setting
    drafters = setting.drafters_without(MODEL, CASCADE)
    return setting.less("draft model", "draft model left out", draft_model=None, drafters=drafters)


def _without_head(setting: Setting) -> Setting:
    if setting.pinned or HEAD not in setting.drafters:
        return setting
    return setting.less(HEAD, "draft head left out", {"draft_head": None}, drafters=setting.drafters_without(HEAD))


def _with_kv(kv_type: str, setting: Setting) -> Setting:
    return setting.less("kv", f"KV cache kept as {kv_type}", {"kv_type": kv_type})


def with_context(n_ctx: int, setting: Setting) -> Setting:
    """Return the setting with a context of at most so many tokens."""
    if n_ctx >= (setting.options.n_ctx or 0):
        return setting
    return setting.less("context", f"context cut to {n_ctx} tokens", {"n_ctx": n_ctx})


def _with_rows(n_rows: int, setting: Setting) -> Setting:
    if not setting.drafters or setting.max_rows_pinned or not setting.least_rows <= n_rows < setting.options.max_rows:
        return setting
    return setting.less("rows", f"drafts cut to {n_rows - 1} tokens", {"max_rows": n_rows})


def _without_learned(setting: Setting) -> Setting:
    if setting.pinned or not setting.learned_bytes:
        return setting
    return setting.less("learned", "your learned files left out", learned_bytes=0)


def _without_common(setting: Setting) -> Setting:
    if setting.pinned or COMMON not in setting.drafters:
        return setting
    return setting.less("common", "common text left out", drafters=setting.drafters_without(COMMON))


def _without_drafting(setting: Setting) -> Setting:
    if setting.pinned or not setting.drafters:
        return setting
    n_rows = setting.options.max_rows if setting.max_rows_pinned else 1
    setting = replace(setting, given_up=setting.given_up_without("rows"))
    options = {"max_rows": n_rows, "draft_head": None}
    return setting.less("drafting", "drafting turned off", options, drafters=(), learned_bytes=0)

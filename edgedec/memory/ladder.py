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

from edgedec.drafter_traits import Place, demands_of, keeps_store
from edgedec.grammar import LEAST_GRAMMAR_BYTES
from edgedec.load_options import Sacrifice, own_options, read_options
from edgedec.load_plan import LoadPlan
from edgedec.memory.setting import with_drafters
from edgedec.memory_plan import format_bytes

_GRAMMAR_BYTES = (16_000_000, LEAST_GRAMMAR_BYTES)
_STORE_BYTES = (8_000_000, 2_000_000)
_REQUEST_BYTES = (4_000_000, 2_000_000)
CONTEXTS = (4096, 2048, 1024, 512)  # the first is given up before anything else
_SHORT_CONTEXTS = (256, 128)  # of models that embed or rank, whose texts are short and never grow
_ROWS = (16, 8, 4)
_KV_TYPES = ("q8_0", "q8_0/q4_0", "gear", "q4_0")


Rung = Callable[[LoadPlan], LoadPlan]
"""A step down the ladder: gives something up, or returns the plan unchanged where there is nothing to give up."""


def rungs(wishes: LoadPlan, *, with_devices: bool = False, embeds: bool = False) -> Sequence[Rung]:
    """Return the steps down from these wishes, in their order (docs/memory.md).

    `embeds` says that the model embeds or ranks texts and writes none.
    """
    kind = own_options(wishes.runtime)
    sacrifices: tuple[Sacrifice, ...] = getattr(kind, "sacrifices", ())
    free_layers = with_devices and wishes.options.n_gpu_layers in (None, -1)
    kv_types = _KV_TYPES if wishes.options.kv_type == "auto" else ()
    lengths = CONTEXTS if wishes.options.n_ctx is None else ()
    stores = _STORE_BYTES if any(map(keeps_store, wishes.drafters.values())) else ()
    return (
        *(partial(with_context, n_ctx) for n_ctx in lengths[:1]),
        _without_kept_prompts,
        _without_pictures,
        *_cuts("grammars", "grammar_bytes", "grammars of at most {}", _GRAMMAR_BYTES),
        *(partial(_without_option, kind, one) for one in sacrifices if with_devices or not one.with_devices),
        *_without_drafters(wishes, Place.FIRST),
        *_cuts("store", "store_bytes", "draft stores cut to {}", stores),
        *_cuts("requests", "request_bytes", "{} for all requests together", _REQUEST_BYTES),
        *(partial(_with_rows, n_rows) for n_rows in _ROWS[:-1]),
        *([_with_fewer_layers] if free_layers else []),
        *_without_drafters(wishes, Place.BEFORE_KV_TYPES),
        *(partial(_with_kv, kv_type) for kv_type in kv_types[:1]),
        *(partial(with_context, n_ctx) for n_ctx in lengths[1:]),
        *(partial(_with_kv, kv_type) for kv_type in kv_types[1:]),
        *(partial(with_context, n_ctx) for n_ctx in _SHORT_CONTEXTS if embeds and lengths),
        *_without_drafters(wishes, Place.LAST),
        partial(_with_rows, _ROWS[-1]),
        _without_drafting,
    )


def with_more_rows(plan: LoadPlan, wishes: LoadPlan) -> LoadPlan:
    """Return the plan with the rows that were wished for, or with those that the ladder's first step leaves."""
    more = replace(plan.with_options(max_rows=wishes.options.max_rows), given_up=plan.given_up_without("rows"))
    return _with_rows(_ROWS[0], more)


def _cuts(kind: str, name: str, phrase: str, sizes: Sequence[int]) -> list[Rung]:
    """Return the steps that cut a field of the plan, which counts bytes, to each of these sizes."""
    return [partial(_cut, kind, name, phrase, n_bytes) for n_bytes in sizes]


def _cut(kind: str, name: str, phrase: str, n_bytes: int, plan: LoadPlan) -> LoadPlan:
    if getattr(plan, name) <= n_bytes:
        return plan
    fields: dict[str, Any] = {name: n_bytes}
    return plan.less(kind, phrase.format(format_bytes(n_bytes)), **fields)


def _without_kept_prompts(plan: LoadPlan) -> LoadPlan:
    if not plan.options.prompt_cache_bytes:
        return plan
    return plan.less("prompts", "no prompts kept on the disk").with_options(prompt_cache_bytes=0)


def _without_pictures(plan: LoadPlan) -> LoadPlan:
    if plan.pictures_pinned or plan.pictures is None:
        return plan
    return plan.less("pictures", "pictures left out", pictures=None)


def _with_fewer_layers(plan: LoadPlan) -> LoadPlan:
    return plan.less("layers", "fewer layers on devices", fewer_layers=True)


def _without_option(kind: type[Any], sacrifice: Sacrifice, plan: LoadPlan) -> LoadPlan:
    runtime_options = plan.options.runtime_options
    if getattr(read_options(kind, runtime_options, "it"), sacrifice.name) == sacrifice.value:
        return plan
    changed = {**runtime_options, sacrifice.name: sacrifice.value}
    return plan.less(sacrifice.kind, sacrifice.phrase).with_options(runtime_options=changed)


def _without_drafters(wishes: LoadPlan, place: Place) -> list[Rung]:
    """Return the steps that leave out drafters which declare this place, the drafter that was named last first."""
    demands = [demands_of(factory) for factory in reversed([*wishes.drafters.values()])]
    return [
        partial(_without, called) for called in dict.fromkeys(each.called for each in demands if each.place is place)
    ]


def _without(called: str, plan: LoadPlan) -> LoadPlan:
    left = {name: factory for name, factory in plan.drafters.items() if demands_of(factory).called != called}
    if plan.pinned or len(left) == len(plan.drafters):
        return plan
    return with_drafters(plan.less(called, f"{called} left out"), left)


def _with_kv(kv_type: str, plan: LoadPlan) -> LoadPlan:
    return plan.less("kv", f"KV cache kept as {kv_type}").with_options(kv_type=kv_type)


def with_context(n_ctx: int, plan: LoadPlan) -> LoadPlan:
    """Return the plan with a context of at most so many tokens."""
    if n_ctx >= (plan.options.n_ctx or 0):
        return plan
    return plan.less("context", f"context cut to {n_ctx} tokens").with_options(n_ctx=n_ctx)


def _with_rows(n_rows: int, plan: LoadPlan) -> LoadPlan:
    least = max((demands_of(factory).rows for factory in plan.drafters.values()), default=1)
    if not plan.drafters or plan.max_rows_pinned or not least <= n_rows < plan.options.max_rows:
        return plan
    return plan.less("rows", f"drafts cut to {n_rows - 1} tokens").with_options(max_rows=n_rows)


def _without_drafting(plan: LoadPlan) -> LoadPlan:
    if plan.pinned or not plan.drafters:
        return plan
    n_rows = plan.options.max_rows if plan.max_rows_pinned else 1
    plan = replace(with_drafters(plan, {}), given_up=plan.given_up_without("rows"))
    return plan.less("drafting", "drafting turned off").with_options(max_rows=n_rows)

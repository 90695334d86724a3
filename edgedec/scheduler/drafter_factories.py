"""The factories of drafters by their names."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec import plugins
from edgedec.cost_curve import CostCurve
from edgedec.drafter import DrafterFactory
from edgedec.drafter_traits import demands_of
from edgedec.errors import RequestError, argument
from edgedec.model import Model

if TYPE_CHECKING:
    from edgedec.drafters.draft_model.model import DraftSource

SUFFIX, COMMON, MODEL, CASCADE = "suffix", "common", "model", "cascade"
HEAD, LEARNED = "head", "learned"
AUTO = (SUFFIX, COMMON)

PromisedGain = Callable[[CostCurve, int], float]
"""(the measured curve, most nodes of a draft) -> how many times as fast as plain decoding a drafter should be."""


def drafter_factories(
    draft: str | DrafterFactory | None, *, with_model: bool, with_head: bool = False, cache_dir: Path | None = None
) -> tuple[dict[str, DrafterFactory], bool]:
    """Return the factories by name, and whether these drafters are pinned, so that they draft whatever it costs.

    `with_model` says whether a draft model is given; with_draft_model() puts it into the factories later. `with_head`
    says whether a trained head is given, which is loaded with the target. What was learned lies in `cache_dir`.

    Raises:
        PluginError: A drafter has no such name, or does not import.
        RequestError: A drafter needs a draft model or a head, and none is given.
    """
    if draft is None or draft == "off":
        return {}, False
    if not isinstance(draft, str):
        return {getattr(draft, "__name__", "custom"): _guarded(draft)}, True
    has_learned = cache_dir is not None and (cache_dir / LEARNED).is_dir()
    usable = {MODEL: with_model, HEAD: with_head, LEARNED: has_learned}
    names = [*AUTO, *(name for name in usable if usable[name])] if draft == "auto" else draft.split("+")
    factories = {name: drafter_factory(name) for name in names}
    for name, factory in factories.items():
        demands = demands_of(factory)
        if demands.draft_model and not with_model:
            raise RequestError(f"{name!r} needs a draft model; give one ({argument('draft_model')})")
        if demands.head and not with_head:
            raise RequestError(f"the drafter {name!r} needs a trained head; give one ({argument('draft_head')})")
    return factories, draft != "auto"


def with_draft_model(
    factories: Mapping[str, DrafterFactory], source: "DraftSource", *, pinned: bool
) -> dict[str, DrafterFactory]:
    """Return the factories with those of the draft model in their places.

    Where `model` is not pinned and the tokenizer is the target's, a cascade takes its place: it drafts the same in less
    time.

    Raises:
        RequestError: A cascade is wanted, and the draft model's tokenizer is not the target's.
    """
    from edgedec.drafters.draft_model.cascade import CascadeModel

    filled = dict(factories)
    if CASCADE in filled:
        if not source.cascades:
            raise RequestError("'cascade' needs a draft model with the target's tokenizer; use 'model'")
        filled[CASCADE] = CascadeModel(source.source)
    if MODEL in filled:
        if source.cascades and not pinned:
            del filled[MODEL]
            filled[CASCADE] = CascadeModel(source.source)
        else:
            filled[MODEL] = source
    return filled


def require_overlap(drafters: Collection[str]) -> None:
    """Raise RequestError unless one of these drafters is a draft model that can draft while the target verifies."""
    if MODEL not in drafters or CASCADE in drafters:
        names = " + ".join(drafters) or "none"
        raise RequestError(
            f"{argument('draft_overlap')} takes a draft model ({argument('draft_model')}) and "
            f"{argument('draft')} 'auto' or 'model', found {names}; give them, or leave {argument('draft_overlap')} out"
        )


def promised_gains(model: Model, cache_dir: Path | None) -> dict[str, PromisedGain]:
    """Return the drafters that were prepared for a model, with what they promise; a plug-in that fails has none."""
    gains: dict[str, PromisedGain | None] = {}
    for plugin in plugins.plugins(plugins.PREPARED_DRAFTERS).values():
        with suppress(Exception):  # a model answers without what was prepared for it
            gains[plugin.name] = plugin.load()(model, cache_dir)
    return {name: gain for name, gain in gains.items() if gain is not None}


def drafter_factory(name: str) -> DrafterFactory:
    """Return the factory of that name (raises PluginError); another package's drafter is held at arm's length.

    Its drafters run in threads of their own, where being late or failing never holds up the text.
    """
    factory: DrafterFactory = plugins.load_plugin(plugins.DRAFTERS, name)
    return factory if plugins.is_own(plugins.DRAFTERS, name) else _guarded(factory)


def _guarded(factory: DrafterFactory) -> DrafterFactory:
    from edgedec.scheduler.plugin_guard import GuardedFactory

    return GuardedFactory(factory)

"""What the sessions of a loaded model draft with: the drafters, the measured cost of forwards, the draft model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Literal

from edgedec.cost_curve import CostCurve
from edgedec.decoding.generate import SessionSlot
from edgedec.draft import DrafterFactory
from edgedec.drafters.draft_model.model import ModelFactory
from edgedec.drafters.suffix.corpus_text import common_text
from edgedec.drafters.suffix.store_file import DraftStore
from edgedec.layer_skip.layer_sets import tuned_set
from edgedec.layer_skip.skipping_model import variant
from edgedec.loading.draft_model import open_draft_model
from edgedec.loading.draft_worth import file_bytes, why_it_cannot_pay
from edgedec.memory.planner import Planned, drafter_bytes, without_draft_model
from edgedec.model import LoadOptions, Model
from edgedec.progress import stage
from edgedec.scheduler.cost_probe import MOST_ROWS, cost_curve
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, EXIT, MODEL, SUFFIX, with_draft_model
from edgedec.scheduler.drafter_set import Drafting
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.sessions.batching import BatchedSession
from edgedec.sessions.sliding_window import holder

Numerics = Literal["strict", "loose"]
Factories = Mapping[str, DrafterFactory]

logger = logging.getLogger("edgedec.api.load")


@dataclass(frozen=True, slots=True)
class DraftWishes:
    """How to draft, beside what the memory plan has settled.

    Attributes:
        factories: The drafters by name, the draft model's still to be filled in.
        n_max: Most nodes of a draft.
        numerics: Whether drafts keep to rows that are bit-equal to single steps ("strict").
        store: File that keeps what the suffix drafter learns, or None.
        notes: What is to be told with every text.
    """

    factories: Factories
    n_max: int
    numerics: Numerics
    store: Path | None
    notes: tuple[str, ...] = ()


def open_drafting(
    model: Model, targets: Sequence[SessionSlot], planned: Planned, wishes: DraftWishes, undo: ExitStack
) -> Planned:
    """Let the sessions draft, and return the plan: without the draft model where that is not loaded.

    `undo` gets what closes the draft model should the rest of the load fail.

    Raises:
        EdgedecError: What loading the draft model, reading the store or measuring raises.
    """
    setting, first = planned.setting, targets[0]
    options, pinned = setting.options, setting.pinned
    factories: Factories = {name: made for name, made in wishes.factories.items() if name in setting.drafters}
    if not factories:
        return planned
    max_rows = options.max_rows if planned.plan.terms else None
    n_most = wishes.n_max if max_rows is None else min(wishes.n_max, max_rows - 1)
    with stage(options.on_progress, "checking how long drafts with the bits of single steps may be"):
        n_max = _draft_limit(model, n_most, wishes.numerics)
    if n_max >= 1 and (EXIT in factories or not pinned):  # it decides by cost, whoever asked for it
        _share_curve(targets, cost_curve(first.session, options, most_rows=max_rows or MOST_ROWS))
    notes = list(wishes.notes)
    if setting.draft_model is not None:
        why = None if pinned else _why_not(setting.draft_model, planned, model, first.curve, n_max)
        if why is None:
            with stage(options.on_progress, "load", setting.draft_model.name):
                source = open_draft_model(setting.draft_model, model, options, overlap=setting.draft_overlap)
            undo.callback(source.close)
            factories = with_draft_model(factories, source, pinned=pinned)
        else:
            logger.warning("%s", why)
            notes.append(why)
            factories = {name: made for name, made in factories.items() if name not in (MODEL, CASCADE)}
            planned = without_draft_model(planned)
    make = partial(
        Drafting,
        n_max=n_max,
        always=pinned,
        strict=wishes.numerics == "strict",
        tuned=tuned_set(options.cache_dir, model.card),
    )
    budget = drafter_bytes(setting, first.session.n_ctx) if planned.plan.terms else None
    _draft_with(targets, factories, make, budget, setting.store_bytes, notes, wishes.store)
    if n_max >= 1 and COMMON in factories:
        _share_common_text(targets, model, options)
    if n_max >= 1 and SUFFIX in factories and wishes.store is not None and first.drafting is not None:
        first.drafting.use_file(DraftStore(wishes.store, model, variant(model.card.left_out)), options)
    return planned


def _why_not(path: Path, planned: Planned, model: Model, curve: CostCurve, n_max: int) -> str | None:
    """Return what to tell of a draft model that is not loaded, as it can't pay; None where it may."""
    why = why_it_cannot_pay(
        path, planned.choice.path, curve, n_max, share=model.card.share, overlap=planned.setting.draft_overlap
    )
    if why is None:
        return None
    size = file_bytes(path)
    return f"the draft model {path.name}{f' ({size})' if size else ''} is not loaded: {why}"


def _draft_limit(model: Model, n_draft_max: int, numerics: Numerics) -> int:
    """Return the most nodes of a draft: in strict numerics, those whose verification has the bits of single steps."""
    limit = min(n_draft_max, model.capabilities.max_rows - 1)
    if numerics == "loose":
        return limit
    invariant = model.batch_invariant
    return limit if invariant is True else min(limit, invariant - 1)


def _draft_with(
    targets: Sequence[SessionSlot],
    factories: Factories,
    make: Callable[..., Drafting],
    budget_bytes: int | None,
    store_bytes: int,
    notes: Sequence[str],
    store: Path | None,
) -> None:
    """Let requests draft, each with a store of its own; a draft model, which has one KV cache, with the first only.

    What the others do without is told with each of their texts.
    """
    n = len(targets)
    models = {name: factory for name, factory in factories.items() if isinstance(factory, ModelFactory)}
    alone = {name: factory for name, factory in factories.items() if name not in models}
    missing = [*notes]
    if n > 1:
        missing += [f"{name}: {_one_of(n, factory.summary())}" for name, factory in models.items()]
        missing += [_one_of(n, f"the draft store {store.name}")] if store is not None and SUFFIX in factories else []
    for target in targets:
        is_first = target is targets[0]
        budget = None if budget_bytes is None else budget_bytes // n
        target.drafting = make(
            factories if is_first else alone,
            budget_bytes=budget,
            store_bytes=store_bytes // n,
            reasons=tuple(notes if is_first else missing),
        )


def _one_of(n: int, what: str) -> str:
    return f"{what} serves one of {n} parallel requests at a time, and not this one"


def _share_common_text(targets: Sequence[SessionSlot], model: Model, options: LoadOptions) -> None:
    common = common_text(model.tokenizer, options.cache_dir, model.card.fingerprint)
    common.build(options)
    for target in targets:
        if target.drafting is not None:
            target.drafting.common = common


def _share_curve(targets: Sequence[SessionSlot], curve: CostCurve) -> None:
    lock = Lock()
    for target in targets:
        session = holder(target.session)
        target.curve = JoinedCurve(curve, session, lock) if isinstance(session, BatchedSession) else curve

"""Let the sessions of a loaded model draft: the drafters, the draft model, and the measured cost of forwards."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

from edgedec.api.options import EngineOptions, Numerics
from edgedec.api.wishes import Wishes
from edgedec.cost_curve import CostCurve
from edgedec.decoding.generate import SessionSlot
from edgedec.draft import DrafterFactory
from edgedec.drafters.suffix.corpus_text import common_text
from edgedec.drafters.suffix.learned import NAME as LEARNED
from edgedec.drafters.suffix.learned import LearnedDrafter
from edgedec.drafters.suffix.learned_file import learned_path, read_learned
from edgedec.drafters.suffix.store_file import DraftStore, vocabulary_hash
from edgedec.errors import StorageError
from edgedec.layer_skip.layer_sets import tuned_set
from edgedec.layer_skip.skipping_model import variant
from edgedec.loading.draft_worth import file_bytes, why_it_cannot_pay
from edgedec.loading.second_model import open_draft_model
from edgedec.memory.planner import Planned, drafter_bytes, without_draft_model
from edgedec.model import Model
from edgedec.progress import stage
from edgedec.scheduler.cost_probe import MOST_ROWS, cost_curve
from edgedec.scheduler.drafter_factories import COMMON, EXIT, HEAD, SUFFIX, with_draft_model
from edgedec.scheduler.drafter_set import Drafting
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.sorted_text import SortedText
from edgedec.storage.probe_cache import cache_folder
from edgedec.tree_shapes import parse_shape

Factories = Mapping[str, DrafterFactory]

logger = logging.getLogger("edgedec.api.load")


def open_drafters(
    model: Model,
    slots: Sequence[SessionSlot],
    planned: Planned,
    wishes: Wishes,
    options: EngineOptions,
    undo: ExitStack,
) -> Planned:
    """Open the drafters of the sessions; return the plan, without the draft model where that is not loaded.

    `undo` gets what closes the draft model, should the rest of the load fail.

    Raises:
        EdgedecError: The draft model can't be loaded, the draft store can't be read, or a forward failed.
    """
    setting, first, notes = planned.setting, slots[0], [*wishes.notes]
    factories = _left(wishes.factories, planned)
    if not factories:
        for slot in slots:
            slot.notes += wishes.notes
        return planned
    max_rows = setting.options.max_rows if planned.plan.terms else None
    n_most = options.n_draft_max if max_rows is None else min(options.n_draft_max, max_rows - 1)
    with stage(options.on_progress, "checking how long drafts with the bits of single steps may be"):
        n_max = _draft_limit(model, n_most, options.draft_numerics)
    if n_max >= 1 and (EXIT in factories or not setting.pinned):  # `exit` decides by cost, even where it is pinned
        _share_curve(slots, cost_curve(first.session, setting.options, most_rows=max_rows or MOST_ROWS))
    if setting.draft_model is not None:
        factories, planned, why_not = _with_draft_model(factories, planned, model, slots, n_max, options, undo)
        notes += why_not
    if HEAD in factories and first.session.draft_head is not None:
        notes += first.session.draft_head.notes
    learned, why = _learned(model, options) if setting.learned_bytes else (None, None)
    if why is not None:
        notes.append(why)
    if learned is not None and SUFFIX in factories and not setting.pinned:
        factories = {**factories, LEARNED: LearnedDrafter}
    drafting = Drafting(
        factories,
        n_max,
        always=setting.pinned,
        budget_bytes=drafter_bytes(setting, first.session.n_ctx) if planned.plan.terms else None,
        store_bytes=setting.store_bytes,
        tuned=tuned_set(setting.options.cache_dir, model.card),
        strict=options.draft_numerics != "loose",
        learned=learned,
        tree=None if options.draft_tree is None else parse_shape(options.draft_tree),
        reasons=tuple(notes),
        head=first.session.draft_head,
    )
    for slot in slots:
        slot.drafting = drafting
    if n_max >= 1:
        _fill_stores(drafting, model, planned, wishes.draft_store)
    return planned


def _with_draft_model(
    factories: Factories,
    planned: Planned,
    model: Model,
    slots: Sequence[SessionSlot],
    n_max: int,
    options: EngineOptions,
    undo: ExitStack,
) -> tuple[Factories, Planned, list[str]]:
    """Load the draft model; return the factories with it, and the plan, or both without it and a sentence why."""
    setting, path = planned.setting, planned.setting.draft_model
    assert path is not None, "asked for where a draft model is planned"
    why = None if setting.pinned else _why_not(path, planned, model, slots[0].curve, n_max)
    if why is not None:
        logger.warning("%s", why)
        planned = without_draft_model(planned)
        return _left(factories, planned), planned, [why]
    most = setting.options.n_parallel if planned.plan.terms else None
    with stage(options.on_progress, "load", path.name):
        source = open_draft_model(path, model, setting.options, overlap=options.draft_overlap, most=most)
    undo.callback(source.close)
    return with_draft_model(factories, source, pinned=setting.pinned), planned, []


def _learned(model: Model, options: EngineOptions) -> tuple[SortedText | None, str | None]:
    """Return the user's files that were learned for a model's vocabulary, and a sentence where they can't be read."""
    path = learned_path(cache_folder(options.resolving.cache_dir), vocabulary_hash(model.tokenizer))
    try:
        found = read_learned(path, model.card.n_vocab)
    except StorageError as error:
        return None, f"{LEARNED} off: {error}"
    return (None if found is None else found[1]), None


def _left(factories: Factories, planned: Planned) -> Factories:
    """Return the factories of the drafters that the plan keeps."""
    return {name: factory for name, factory in factories.items() if name in planned.setting.drafters}


def _draft_limit(model: Model, n_draft_max: int, numerics: Numerics) -> int:
    """Return the most nodes of a draft: in strict numerics, those whose verification has the bits of single steps.

    None where the model can't go back (most recurrent ones), as a rejected draft could not be forgotten.
    """
    limit = min(n_draft_max, model.capabilities.max_rows - 1) if model.capabilities.rollback else 0
    if numerics == "loose":
        return limit
    invariant = model.batch_invariant
    return limit if invariant is True else min(limit, invariant - 1)


def _why_not(path: Path, planned: Planned, model: Model, curve: CostCurve, n_max: int) -> str | None:
    """Return a sentence on a draft model that is not loaded, as it can't pay; None where it may pay."""
    overlap = planned.setting.draft_overlap
    why = why_it_cannot_pay(path, planned.choice.path, curve, n_max, share=model.card.share, overlap=overlap)
    if why is None:
        return None
    size = file_bytes(path)
    return f"the draft model {path.name}{f' ({size})' if size else ''} is not loaded: {why}"


def _fill_stores(drafting: Drafting, model: Model, planned: Planned, store: Path | None) -> None:
    """Give the drafters the common text, and the draft store, where they use them."""
    options, drafters = planned.setting.options, planned.setting.drafters
    if COMMON in drafters:
        drafting.common = common_text(model.tokenizer, options.cache_dir, model.card.fingerprint)
        drafting.common.build(options)
    if SUFFIX in drafters and store is not None:
        drafting.use_file(DraftStore(store, model, variant(model.card.left_out)), options)


def _share_curve(slots: Sequence[SessionSlot], curve: CostCurve) -> None:
    """Give all sessions the measured curve; sessions of one batcher measure joined forwards together."""
    lock = Lock()
    for slot in slots:
        slot.curve = curve if slot.session.shared is None else JoinedCurve(curve, slot.session, lock)

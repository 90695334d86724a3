"""Let the sessions of a loaded model draft: the drafters, the draft model, and the measured cost of forwards."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from edgedec.api.options import EngineOptions, Numerics
from edgedec.api.wishes import Wishes
from edgedec.cost_curve import CostCurve
from edgedec.draft import TreeShape
from edgedec.drafter import DrafterFactory, SortedText
from edgedec.drafters.suffix.common import CommonText, common_text
from edgedec.errors import StorageError
from edgedec.load_options import LoadOptions
from edgedec.memory.planner import without_draft_model
from edgedec.memory.setting import Planned
from edgedec.model import Model, Session
from edgedec.progress import stage
from edgedec.scheduler.drafter_factories import (
    COMMON,
    LEARNED,
    SUFFIX,
    demands_of,
    drafter_factory,
    promised_gains,
    with_draft_model,
)
from edgedec.scheduler.drafter_set import Drafting, share_of
from edgedec.sessions.cost_probe import MOST_ROWS, cost_curve
from edgedec.storage.cache_files import cache_folder

if TYPE_CHECKING:
    from edgedec.drafters.suffix.store_file import DraftStore

Factories = Mapping[str, DrafterFactory]

logger = logging.getLogger("edgedec.api.load")


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the sessions of a model draft with.

    Attributes:
        planned: The plan, without the draft model where that is not loaded.
        curves: The cost of forwards for each of the sessions, as measured; empty where it was not measured.
        drafting: What all of the sessions draft with; None where nothing is drafted.
        notes: Sentences for the statistics of every text, where nothing is drafted.
    """

    planned: Planned
    curves: tuple[CostCurve, ...] = ()
    drafting: Drafting | None = None
    notes: tuple[str, ...] = ()


def open_drafters(
    model: Model,
    sessions: Sequence[Session],
    planned: Planned,
    wishes: Wishes,
    options: EngineOptions,
    undo: ExitStack,
) -> Drafts:
    """Open the drafters of the sessions, and measure what forwards cost where a decision needs it.

    `undo` gets what closes the draft model, should the rest of the load fail.

    Raises:
        EdgedecError: The draft model can't be loaded, the draft store can't be read, or a forward failed.
    """
    setting, first, notes = planned.setting, sessions[0], [*wishes.notes]
    factories = _left(wishes.factories, planned)
    if not factories:
        return Drafts(planned, notes=wishes.notes)
    max_rows = setting.options.max_rows if planned.plan.terms else None
    n_most = options.n_draft_max if max_rows is None else min(options.n_draft_max, max_rows - 1)
    with stage(options.on_progress, "checking how long drafts with the bits of single steps may be"):
        n_max = _draft_limit(model, n_most, options.drafting.numerics)
    curves: tuple[CostCurve, ...] = ()
    if n_max >= 1 and (not setting.pinned or any(demands_of(factory).costs for factory in factories.values())):
        curves = _curves(sessions, cost_curve(first, setting.options, most_rows=max_rows or MOST_ROWS))
    token_s = None
    if setting.draft_model is not None:
        curve = curves[0] if curves else CostCurve()
        factories, planned, token_s, left_out = _with_draft_model(factories, planned, model, curve, n_max, undo)
        notes += left_out
    learned, why = _learned(model, options) if setting.learned_bytes else (None, None)
    if why is not None:
        notes.append(why)
    if learned is not None and SUFFIX in factories and not setting.pinned:
        factories = {**factories, LEARNED: drafter_factory(LEARNED)}
    budget_bytes = None
    if planned.plan.terms:
        from edgedec.memory.terms import drafter_bytes

        budget_bytes = drafter_bytes(setting, first.n_ctx)
    store, of_store = dict[str, Any](), list[str]()
    file = _opened_store(wishes.draft_store, model, planned) if n_max >= 1 else None
    if file is not None:
        note = file.fill(store, share_of(budget_bytes, setting.store_bytes), setting.options)
        of_store += [] if note is None else [note]
    drafting = Drafting(
        factories,
        n_max,
        always=setting.pinned,
        budget_bytes=budget_bytes,
        store_bytes=setting.store_bytes,
        store=store,
        file=file,
        notes=of_store,
        common=_common(model, planned) if n_max >= 1 else None,
        promised={} if setting.pinned else promised_gains(model, setting.options.cache_dir),
        cache_dir=setting.options.cache_dir,
        strict=options.drafting.numerics != "loose",
        learned=learned,
        tree=_shape(options),
        reasons=tuple(notes),
        head=first.draft_head,
        token_s=token_s,
    )
    return Drafts(planned, curves, drafting)


def _opened_store(path: Path | None, model: Model, planned: Planned) -> "DraftStore | None":
    """Return the file of that path that keeps what the suffix drafter learns, where that drafter drafts."""
    if path is None or SUFFIX not in planned.setting.drafters:
        return None
    from edgedec.drafters.suffix.store_file import DraftStore

    return DraftStore(path, model, model.card.variant)


def _with_draft_model(
    factories: Factories, planned: Planned, model: Model, curve: CostCurve, n_max: int, undo: ExitStack
) -> tuple[Factories, Planned, float | None, list[str]]:
    """Load and time the draft model; return the factories with it, the plan, and its seconds for a token.

    Where it can't pay, return the factories and the plan without it, None, and a sentence why. One that is pinned is
    not timed.
    """
    from edgedec.loading.draft_worth import expected_time, file_bytes, measured_time, why_it_cannot_pay
    from edgedec.loading.second_model import draft_model_options, draft_token_s, open_draft_model

    setting, path = planned.setting, planned.setting.draft_model
    assert path is not None, "asked for where a draft model is planned"
    options, overlap = setting.options, setting.draft_overlap

    def without(why: str) -> tuple[Factories, Planned, None, list[str]]:
        size = file_bytes(path)
        note = f"the draft model {path.name}{f' ({size})' if size else ''} is not loaded: {why}"
        logger.warning("%s", note)
        left = without_draft_model(planned)
        return _left(factories, left), left, None, [note]

    is_apart = overlap or bool(options.machines)  # the target's time is then that of another device
    expected = None if is_apart else expected_time(path, planned.choice.path, curve, model.card.share)
    if not setting.pinned and (why := why_it_cannot_pay(expected, curve, n_max)) is not None:
        return without(why)
    most = options.n_parallel if planned.plan.terms else None
    with stage(options.on_progress, "load", path.name):
        source = open_draft_model(path, model, options, overlap=overlap, most=most)
    undo.callback(source.close)
    token_s = None if setting.pinned else draft_token_s(source, draft_model_options(options, overlap=overlap))
    if token_s is not None and (why := why_it_cannot_pay(measured_time(token_s), curve, n_max, overlap=overlap)):
        source.close()
        return without(why)
    return with_draft_model(factories, source, pinned=setting.pinned), planned, token_s, []


def _shape(options: EngineOptions) -> TreeShape | None:
    """Return the shape of drafts that the options name (raises what parse_shape raises)."""
    if options.drafting.tree is None:
        return None
    from edgedec.drafters.drawn_trees import parse_shape

    return parse_shape(options.drafting.tree)


def _learned(model: Model, options: EngineOptions) -> tuple[SortedText | None, str | None]:
    """Return the user's files that were learned for a model's vocabulary, and a sentence where they can't be read."""
    from edgedec.drafters.suffix.learned_file import learned_path, read_learned
    from edgedec.drafters.suffix.store_file import vocabulary_hash

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

    The result is 0 where the model can't go back, as most recurrent ones: a rejected draft could not be forgotten.
    """
    limit = min(n_draft_max, model.capabilities.max_rows - 1) if model.capabilities.rollback else 0
    if numerics == "loose":
        return limit
    invariant = model.batch_invariant
    return limit if invariant is True else min(limit, invariant - 1)


def _common(model: Model, planned: Planned) -> CommonText | None:
    """Return the common text in the model's tokens, where a drafter uses it."""
    if COMMON not in planned.setting.drafters:
        return None
    options: LoadOptions = planned.setting.options
    found = common_text(model.tokenizer, options.cache_dir, model.card.fingerprint)
    found.build(options)
    return found


def _curves(sessions: Sequence[Session], curve: CostCurve) -> tuple[CostCurve, ...]:
    """Return the measured curve for each session; sessions of one batcher measure joined forwards together."""
    if all(one.shared is None for one in sessions):
        return (curve,) * len(sessions)
    from edgedec.scheduler.shared_cost_curve import JoinedCurve

    lock = Lock()
    return tuple(curve if one.shared is None else JoinedCurve(curve, one, lock) for one in sessions)

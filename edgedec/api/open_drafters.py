"""Let the sessions of a loaded model draft: the drafters, the draft model, and the measured cost of forwards."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from edgedec.api.options import EngineOptions, Numerics
from edgedec.api.plan import draft_store
from edgedec.cost_curve import CostCurve
from edgedec.draft import TreeShape
from edgedec.drafter import DrafterFactory
from edgedec.drafter_traits import Opening, demands_of
from edgedec.errors import CancelledError, EdgedecError
from edgedec.load_plan import LoadPlan
from edgedec.memory.setting import with_drafters
from edgedec.model import Model, Session
from edgedec.progress import stage
from edgedec.scheduler.drafter_factories import promised_gains, with_draft_model
from edgedec.scheduler.drafter_set import Drafting, share_of
from edgedec.sessions.cost_probe import MOST_ROWS, cost_curve

if TYPE_CHECKING:
    from edgedec.drafters.suffix.store_file import DraftStore

logger = logging.getLogger("edgedec.api.load")


def open_drafters(
    model: Model, sessions: Sequence[Session], plan: LoadPlan, options: EngineOptions, undo: ExitStack
) -> tuple[LoadPlan, Sequence[CostCurve], Drafting | None]:
    """Open the drafters of the sessions, and measure what forwards cost where a decision needs it.

    Returns the plan, without the draft model where that can't pay; the cost of forwards for each of the sessions; and
    what all of them draft with, None where nothing is drafted. `undo` gets what closes the draft model, should the rest
    of the load fail.

    Raises:
        EdgedecError: The draft model can't be loaded, the draft store can't be read, or a forward failed.
    """
    first, notes = sessions[0], [*plan.notes]
    curves: Sequence[CostCurve] = [CostCurve() for _ in sessions]
    if not plan.drafters:
        return plan, curves, None
    max_rows = plan.options.max_rows if plan.memory.terms else None
    n_most = options.n_draft_max if max_rows is None else min(options.n_draft_max, max_rows - 1)
    with stage(options.on_progress, "checking how long drafts with the bits of single steps may be"):
        n_max = _draft_limit(model, n_most, options.drafting.numerics)
    if n_max >= 1 and (not plan.pinned or any(demands_of(factory).costs for factory in plan.drafters.values())):
        curves = _curves(sessions, cost_curve(first, plan.options, most_rows=max_rows or MOST_ROWS))
    if plan.draft_model is not None:
        plan, why = _with_draft_model(plan, model, curves[0], n_max, undo)
        notes += why
    budget_bytes = None
    if plan.memory.terms:
        from edgedec.memory.terms import drafter_terms

        budget_bytes = sum(term.n_bytes for term in drafter_terms(plan.with_options(n_ctx=first.n_ctx)))
    store, of_store = dict[str, Any](), list[str]()
    file = _opened_store(options, model, plan) if n_max >= 1 else None
    if file is not None:
        note = file.fill(store, share_of(budget_bytes, plan.store_bytes), plan.options)
        of_store += [] if note is None else [note]
    factories, why = _opened(plan, first) if n_max >= 1 else (plan.drafters, [])
    drafting = Drafting(
        factories,
        n_max,
        always=plan.pinned,
        budget_bytes=budget_bytes,
        store_bytes=plan.store_bytes,
        store=store,
        file=file,
        notes=of_store,
        promised={} if plan.pinned else promised_gains(model, plan.options.cache_dir),
        cache_dir=plan.options.cache_dir,
        strict=options.drafting.numerics != "loose",
        tree=_shape(options),
        reasons=(*notes, *why),
    )
    return plan, curves, drafting


def _opened(plan: LoadPlan, session: Session) -> tuple[Mapping[str, DrafterFactory], list[str]]:
    """Return the factories with what they make of the loaded target, and a sentence for each that can't draft."""
    opened, notes = dict[str, DrafterFactory](), list[str]()
    for name, factory in plan.drafters.items():
        try:
            made = factory.opened(session, plan) if isinstance(factory, Opening) else factory
        except CancelledError:
            raise
        except EdgedecError as error:
            made = None
            notes.append(f"{name} off: {error}")
        if made is not None:
            opened[name] = made
    return opened, notes


def _opened_store(options: EngineOptions, model: Model, plan: LoadPlan) -> "DraftStore | None":
    """Return the file of earlier texts that the options name, where a drafter keeps its texts there."""
    path = draft_store(options)
    if path is None or not any(demands_of(factory).store_file for factory in plan.drafters.values()):
        return None
    from edgedec.drafters.suffix.store_file import DraftStore

    return DraftStore(path, model, model.card.variant)


def _with_draft_model(
    plan: LoadPlan, model: Model, curve: CostCurve, n_max: int, undo: ExitStack
) -> tuple[LoadPlan, list[str]]:
    """Load and time the draft model; return the plan with its factories. One that is pinned is not timed.

    Where it can't pay, return the plan without it, and a sentence why.
    """
    from edgedec.loading.draft_worth import expected_time, file_bytes, measured_time, why_it_cannot_pay
    from edgedec.loading.second_model import draft_model_options, draft_token_s, open_draft_model

    path, options, overlap = plan.draft_model, plan.options, plan.draft_overlap
    assert path is not None, "asked for where a draft model is planned"

    def without(why: str) -> tuple[LoadPlan, list[str]]:
        size = file_bytes(path)
        note = f"the draft model {path.name}{f' ({size})' if size else ''} is not loaded: {why}"
        logger.warning("%s", note)
        others = {name: each for name, each in plan.drafters.items() if not demands_of(each).draft_model}
        return with_drafters(plan, others), [note]

    is_apart = overlap or bool(options.machines)  # the target's time is then that of another device
    expected = None if is_apart else expected_time(path, plan.path, curve, model.card.share)
    if not plan.pinned and (why := why_it_cannot_pay(expected, curve, n_max)) is not None:
        return without(why)
    most = options.n_parallel if plan.memory.terms else None
    with stage(options.on_progress, "load", path.name):
        source = open_draft_model(path, model, options, overlap=overlap, most=most)
    undo.callback(source.close)
    if not plan.pinned:
        source.source.token_s = draft_token_s(source, draft_model_options(options, overlap=overlap))
    token_s = source.source.token_s
    if token_s is not None and (why := why_it_cannot_pay(measured_time(token_s), curve, n_max, overlap=overlap)):
        source.close()
        return without(why)
    return replace(plan, drafters=with_draft_model(plan.drafters, source, pinned=plan.pinned)), []


def _shape(options: EngineOptions) -> TreeShape | None:
    """Return the shape of drafts that the options name (raises what parse_shape raises)."""
    if options.drafting.tree is None:
        return None
    from edgedec.drafters.drawn_trees import parse_shape

    return parse_shape(options.drafting.tree)


def _draft_limit(model: Model, n_draft_max: int, numerics: Numerics) -> int:
    """Return the most nodes of a draft: in strict numerics, those whose verification has the bits of single steps.

    The result is 0 where the model can't go back, as most recurrent ones: a rejected draft could not be forgotten.
    """
    limit = min(n_draft_max, model.capabilities.max_rows - 1) if model.capabilities.rollback else 0
    if numerics == "loose":
        return limit
    invariant = model.batch_invariant
    return limit if invariant is True else min(limit, invariant - 1)


def _curves(sessions: Sequence[Session], curve: CostCurve) -> tuple[CostCurve, ...]:
    """Return the measured curve for each session; sessions of one batcher measure joined forwards together."""
    if all(one.shared is None for one in sessions):
        return (curve,) * len(sessions)
    from edgedec.scheduler.shared_cost_curve import JoinedCurve

    lock = Lock()
    return tuple(curve if one.shared is None else JoinedCurve(curve, one, lock) for one in sessions)

"""From a model's name to an Engine: find the file, choose a runtime, plan the memory, load, open the sessions.

This is where the engine is composed: the one file of the core that imports packages above the core, within functions
and where an option asks for them (pictures, layers that are left out, padded steps).
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from edgedec.api.engine import Engine
from edgedec.api.options import LIBRARY, AdapterName, Application, DraftOptions, EngineOptions, Lossy, ModelName
from edgedec.api.plan import draft_store, find_model, plain_plan
from edgedec.callers import checks_arguments
from edgedec.companion import Companion, companion_of
from edgedec.control_tokens import SaidTemplate
from edgedec.cost_curve import CostCurve
from edgedec.decoding.session_pool import SessionSlot
from edgedec.drafter import DrafterFactory, Store
from edgedec.drafter_traits import Opening, demands_of
from edgedec.errors import CancelledError, EdgedecError, TemplateError
from edgedec.gguf.file import last_header_held
from edgedec.gguf.model_info import context_note, read_model_info
from edgedec.gguf.model_kinds import embeds_only
from edgedec.grammar import GRAMMAR_BYTES, LEAST_GRAMMAR_BYTES
from edgedec.load_options import N_DRAFT_MAX, LoadOptions, default_n_ctx
from edgedec.load_plan import LoadPlan
from edgedec.loading.runtime_choice import machines_of
from edgedec.memory.planner import plan_within
from edgedec.memory.setting import Cap, cap_beside_held, planning_bytes, with_drafters
from edgedec.memory.shedding import Watch, shedders
from edgedec.memory.system import held_reader, return_free_memory
from edgedec.memory_plan import HasDevices, MemoryPlan, Size, format_bytes
from edgedec.model import Model, RecallingSession, Session
from edgedec.model_card import ModelCard
from edgedec.progress import CancelToken, OnProgress, shown_progress, stage
from edgedec.runtime import processes_of
from edgedec.scheduler.drafter_factories import promised_gains, with_draft_model
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sessions.cost_probe import MOST_ROWS, cost_curve
from edgedec.sessions.text_pages import PAGE_TOKENS, ROWS_OF_TEXT, n_pages

_NO_PROMPTS = "no prompts are kept on the disk: the cpu runtime can, for lossless texts from left to right"

logger = logging.getLogger("edgedec.api.load")
logger.addHandler(logging.NullHandler())  # without a handler, `logging` would print warnings itself


# A parameter for each option, so that editors and type checkers complete them; a test holds them equal to the fields.
@checks_arguments
def load(
    model: ModelName,
    *,
    runtime: str = "auto",
    n_ctx: int | None = None,
    lossy: Lossy = Lossy(),  # noqa: B008  # it is frozen
    memory: Size | None = None,
    gpu_memory: Size | None = None,
    draft: str | DrafterFactory | None = "auto",
    draft_model: ModelName | None = None,
    draft_head: str | os.PathLike[str] | None = None,
    lora: Sequence[AdapterName] = (),
    n_draft_max: int = N_DRAFT_MAX,
    drafting: DraftOptions = DraftOptions(),  # noqa: B008  # it is frozen
    chat_template: str | None = None,
    projector: ModelName | None = "auto",
    image_max_tokens: int | None = None,
    grammars: bool = False,
    n_parallel: int = 1,
    n_texts: int = 1,
    n_threads: int | None = None,
    kv_type: str = "f16",
    prompt_cache: Size | None = None,
    n_gpu_layers: int | None = None,
    device: str | None = None,
    runtime_options: Mapping[str, object] | None = None,
    offline: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Engine:
    """Load a model; edgedec.api.options.EngineOptions explains each of the keywords, which are its fields.

    Args:
        model: A path, a catalogue name, hf:owner/repo[:quantization or file][@revision], or ollama:name. A model that
            is not on this machine is downloaded first, unless `offline`.

    Raises:
        EdgedecError: The model can't be loaded; edgedec/errors.py draws the tree of reasons.
    """
    with shown_progress(on_progress, os.path.basename(model)) as report:
        options = EngineOptions(
            runtime=runtime,
            n_ctx=n_ctx,
            lossy=lossy,
            memory=memory,
            gpu_memory=gpu_memory,
            draft=draft,
            draft_model=draft_model,
            draft_head=draft_head,
            lora=lora,
            n_draft_max=n_draft_max,
            drafting=drafting,
            chat_template=chat_template,
            projector=projector,
            image_max_tokens=image_max_tokens,
            grammars=grammars,
            n_parallel=n_parallel,
            n_texts=n_texts,
            n_threads=n_threads,
            kv_type=kv_type,
            prompt_cache=prompt_cache,
            n_gpu_layers=n_gpu_layers,
            device=device,
            runtime_options=runtime_options,
            offline=offline,
            cache_dir=cache_dir,
            on_progress=report,
            cancel=cancel,
        )
        return open_engine(model, options)


load.__doc__ = f"{load.__doc__}\n{EngineOptions.__doc__}"  # for help()


def open_engine(model: ModelName, options: EngineOptions, application: Application = LIBRARY) -> Engine:
    """Load a model for an application; load is the same for one that uses edgedec as a library.

    Raises:
        EdgedecError: As load.
    """
    return open_chosen(find_model(model, options, planning_bytes(_cap(options, application))), options, application)


@last_header_held()
def open_chosen(chosen: LoadPlan, options: EngineOptions, application: Application = LIBRARY) -> Engine:
    """Plan how a model is loaded on the runtime that was chosen for it, and load it.

    Raises:
        EdgedecError: As load.
    """
    wishes = asked_plan(chosen, options, application)
    with stage(options.on_progress, "planning the memory"):
        plan = plan_within(wishes, _cap(options, application))
    plan.memory.require()
    return open_plan(plan, options)


def asked_plan(
    chosen: LoadPlan, options: EngineOptions, application: Application, planning_bytes: int | None = None
) -> LoadPlan:
    """Return the plan that load's options ask for, with what other packages make of them; raises as load.

    `chosen` is as find_model returns it; making a memory plan may take `planning_bytes` bytes, or any for None.
    """
    plan = plain_plan(chosen, options, application, planning_bytes)
    if options.lossy.layer_skip is not None:
        from edgedec_runtimes.layer_skip.choose import layer_skip

        shortened = [name for name, factory in plan.drafters.items() if demands_of(factory).layers]
        speedup, force = options.lossy.layer_skip, options.lossy.layer_skip_force
        plan = replace(plan, change=layer_skip(plan.path, speedup, force=force, drafters=shortened))
    if embeds_only(plan.path):
        return plan
    from edgedec_runtimes.pictures.opened import picture_reader

    return replace(plan, pictures=picture_reader(plan.path, options))


def open_plan(plan: LoadPlan, options: EngineOptions) -> Engine:
    """Load a model as planned, with the models beside it, and return the engine.

    Raises:
        EdgedecError: As load.
    """
    is_planned = bool(plan.memory.terms)
    with ExitStack() as undo:
        model, of_model = _load_model(plan, options, undo)
        if is_planned:
            return_free_memory()  # before what is allocated next is put among the freed pages
        around = _around(options.lossy, model.card)
        sessions, of_sessions = _sessions(model, plan.options, around)
        sessions[0], companion = _with_companion(sessions[0], plan, undo)
        of_models = _notes(plan, sessions[0], model, options)
        for note in (*of_sessions, *of_models):
            logger.warning("%s", note)
        plan, curves, drafting = _open_drafters(model, sessions, plan, options, undo)
        notes = (*of_sessions, *of_model, *of_models, *(plan.notes if drafting is None else ()))
        processes = partial(processes_of, model, companion)
        slots = _slots(sessions, curves, drafting, plan, notes, processes, share=not around)
        if plan.memory.devices and isinstance(plan.runtime, HasDevices):  # what their own accounts say
            plan = replace(plan, memory=plan.runtime.account(plan.memory, plan.options))
        n_tokens = len(slots) * sessions[0].room(0)
        held = plan.memory if is_planned else MemoryPlan(model.memory(n_tokens, plan.options.max_rows))
        engine = Engine(
            model=model,
            slots=slots,
            template=_template(model, plan.path.name, options.chat_template),
            plan=plan,
            held=held,
            companion=companion,
            grammar_bytes=plan.grammar_bytes or (LEAST_GRAMMAR_BYTES if is_planned else GRAMMAR_BYTES),
        )
        undo.pop_all()
    if is_planned:
        return_free_memory()  # what probing and measuring left behind
    return engine


def _slots(
    sessions: Sequence[Session],
    curves: Sequence[CostCurve],
    drafting: Drafting | None,
    plan: LoadPlan,
    notes: tuple[str, ...],
    processes: Callable[[], Sequence[int]],
    *,
    share: bool,
) -> list[SessionSlot]:
    """Return the sessions, each with all that a generation on it must know.

    `processes` returns the further processes whose memory counts as this one's; `share` says whether texts may share
    what they have in common, where the runtime can.
    """
    first, n_texts = sessions[0], plan.n_texts
    elsewhere = machines_of(plan.runtime, plan.options.runtime_options)
    n_rows = plan.options.max_rows if plan.memory.terms else None
    # A few rows of a small vocabulary are within the working memory that is planned.
    row_bytes = 4 * first.model.card.n_vocab
    few_rows = 2_000_000 // row_bytes
    kv_bytes = sum(term.n_bytes for term in plan.memory.terms if term.name == "KV cache")
    n_pages_each = n_pages(0, first.room(0))
    cap_bytes, parts = plan.memory.process_cap_bytes, [] if drafting is None else shedders(drafting)
    prefixes = None
    if share and len(sessions) > 1 and first.model.capabilities.fork and first.model.capabilities.prefill_chunk == 1:
        from edgedec.decoding.shared_prefix import SharedPrefixes

        prefixes = SharedPrefixes()
    return [
        SessionSlot(
            session,
            curve=curve,
            drafting=drafting,
            runtime_reason=plan.reason,
            watch=Watch(cap_bytes, parts, held_reader(processes)) if parts or cap_bytes is not None else None,
            forward_rows=n_rows,
            text_rows=None if n_rows is None else max(n_texts, n_rows, few_rows),
            kept_rows=ROWS_OF_TEXT * n_texts,
            # How many tokens of the KV cache take the memory of a row of logits; 0 without a plan.
            row_tokens=row_bytes * len(sessions) * n_pages_each * PAGE_TOKENS / kv_bytes if kv_bytes else 0.0,
            # The prompt's last page is held once more.
            fork_tokens=None if n_rows is None else (n_texts * n_pages_each + 1) * PAGE_TOKENS,
            wait_s=0.0 if elsewhere is None else elsewhere.wait_s,
            notes=notes,
            prefixes=prefixes,
        )
        for session, curve in zip(sessions, curves, strict=True)
    ]


def _cap(options: EngineOptions, application: Application) -> Cap:
    """Return the cap that `memory` sets: for the application's whole process, or for the engines of this process."""
    cap = replace(
        cap_beside_held(options.cap_bytes, options.gpu_cap_bytes), earlier_peak_bytes=application.earlier_peak_bytes
    )
    if application.base_bytes is None:
        return cap
    return replace(cap, beside_bytes=application.base_bytes, whole_process=True)


def _load_model(plan: LoadPlan, options: EngineOptions, undo: ExitStack) -> tuple[Model, tuple[str, ...]]:
    """Load the model as the options want it, and return it with sentences for the statistics of every text."""
    load_options = plan.options
    with stage(options.on_progress, "load", plan.path.name):
        model = plan.runtime.load(plan.path, load_options)
    undo.callback(model.close)
    if plan.change is not None:
        model = plan.change(model, load_options.cache_dir)
    if options.drafting.numerics != "padded":
        return model, ()
    n_ctx = load_options.n_ctx or default_n_ctx(model.card.n_ctx_train)
    with stage(options.on_progress, "looking for numbers of rows that have the bits of each other"):
        from edgedec_methods.padded_steps import with_padded_steps

        model, note = with_padded_steps(model, n_ctx, load_options.cache_dir)
    return model, () if note is None else (note,)


def _around(lossy: Lossy, card: ModelCard) -> list[Companion]:
    """Return the methods without a further model, which stand around the session of each parallel request."""
    methods = {**{name: {} for name in card.methods}, **(lossy.methods or {})}
    companions = companion_of({"slide": {}} if lossy.slide else None), companion_of(methods)
    return [method for method in companions if method is not None and method.model is None]


def _sessions(model: Model, options: LoadOptions, around: Sequence[Companion]) -> tuple[list[Session], list[str]]:
    """Open the sessions of the requests that are generated at the same time; also return sentences that warn.

    There are several only where a row does not depend on what else is in its forward. Elsewhere a text would depend on
    the other requests, so the requests take turns on one session.
    """
    n_ctx = options.n_ctx or default_n_ctx(model.card.n_ctx_train)
    sessions: list[Session]
    if options.n_parallel == 1 or model.batch_invariant is not True:
        sessions = [model.session(n_ctx)]
    else:
        from edgedec.sessions.batching import Batcher

        batcher = Batcher(model)
        sessions = [batcher.session(n_ctx) for _ in range(options.n_parallel)]
    if any(scales := tuple(scale for _, scale in options.adapters)):
        for session in sessions:
            session.scales = scales
    for method in around:
        sessions = [method.session(session, None) for session in sessions]
    if len(sessions) == options.n_parallel:
        return sessions, []
    reason = f"on the {model.card.runtime} runtime a row depends on what else is in its forward"
    return sessions, [f"{options.n_parallel} parallel requests take turns: {reason}"]


def _notes(plan: LoadPlan, session: Session, model: Model, options: EngineOptions) -> list[str]:
    """Return sentences on models trained for a shorter context than a text's, other machines, and an unused option."""
    elsewhere, method = machines_of(plan.runtime, plan.options.runtime_options), plan.companion
    recalls, n_ctx = model.capabilities.keeps_prompts and isinstance(session, RecallingSession), session.room(0)
    beside = "" if method is None else f"the {method.role}"
    notes = [
        "" if recalls or options.prompt_cache in (None, "auto") else _NO_PROMPTS,
        "" if elsewhere is None else elsewhere.warning,
        context_note(plan.path, n_ctx),
        "" if plan.companion_path is None else context_note(plan.companion_path, n_ctx, beside),
    ]
    return [note for note in notes if note]


def _with_companion(session: Session, plan: LoadPlan, undo: ExitStack) -> tuple[Session, Model | None]:
    """Load the companion, where a method writes with one; return a session on which both write, and the companion."""
    path, method = plan.companion_path, plan.companion
    if path is None or method is None:
        return session, None
    from edgedec.loading.second_model import open_companion

    with stage(plan.options.on_progress, "load", path.name):
        companion = open_companion(path, session.model, plan.options, method)
    undo.callback(companion.close)
    return method.session(session, companion.session(session.room(0))), companion


def _template(model: Model, file: str, template_text: str | None) -> SaidTemplate | None:
    source = model.card.chat_template if template_text is None else template_text
    if source is None:
        return None
    template = SaidTemplate(source, model.tokenizer, file if template_text is None else "")
    if template.refusal and template_text is not None:
        raise TemplateError(template.refusal)
    if template.refusal:
        logger.warning("%s", TemplateError(template.refusal))
    return template


def _open_drafters(
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
    curves = [CostCurve() for _ in sessions]
    if not plan.drafters:
        return plan, curves, None
    max_rows = plan.options.max_rows if plan.memory.terms else None
    n_most = options.n_draft_max if max_rows is None else min(options.n_draft_max, max_rows - 1)
    with stage(options.on_progress, "checking how long drafts with the bits of single steps may be"):
        n_max = _draft_limit(model, n_most, loose=options.drafting.numerics == "loose")
    if n_max >= 1 and (not plan.pinned or any(demands_of(factory).costs for factory in plan.drafters.values())):
        curves = [cost_curve(first, plan.options, most_rows=max_rows or MOST_ROWS)]
        if len(sessions) > 1:  # sessions of one batcher measure joined forwards together
            from edgedec.scheduler.shared_cost_curve import curve_of_fork

            joined = curve_of_fork(curves[0])
            curves = [joined, *(joined.beside() for _ in sessions[1:])]
    if plan.draft_model is not None:
        plan, why = _with_draft_model(plan, model, curves[0], n_max, undo)
        notes += why
    budget_bytes, share_bytes = None, 2 * plan.store_bytes  # a store takes at most half of a drafter's share
    if plan.memory.terms:
        from edgedec.memory.terms import drafter_terms

        budget_bytes = sum(term.n_bytes for term in drafter_terms(plan.with_options(n_ctx=first.room(0))))
        share_bytes = min(budget_bytes, share_bytes)
    store, of_store, file = Store(share_bytes, plan.options.cache_dir), list[str](), None
    keeps_file = any(demands_of(factory).store_file for factory in plan.drafters.values())
    if n_max >= 1 and keeps_file and (path := draft_store(options)) is not None:
        from edgedec.drafters.suffix.store_file import DraftStore

        file = DraftStore(path, model, model.card.variant)
        note = file.fill(store, plan.options)
        of_store += [] if note is None else [note]
    factories, why = _opened(plan, first) if n_max >= 1 else (plan.drafters, [])
    drafting = Drafting(
        factories,
        n_max,
        always=plan.pinned,
        budget_bytes=budget_bytes,
        store=store,
        file=file,
        notes=of_store,
        promised={} if plan.pinned else promised_gains(model, plan.options.cache_dir),
        strict=options.drafting.numerics != "loose",
        tree=options.drafting.tree,
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


def _with_draft_model(
    plan: LoadPlan, model: Model, curve: CostCurve, n_max: int, undo: ExitStack
) -> tuple[LoadPlan, list[str]]:
    """Load and time the draft model; return the plan with its factories. One that is pinned is not timed.

    Where it can't pay, return the plan without it, and a sentence why.
    """
    from edgedec.loading.draft_worth import expected_time, measured_time, why_it_cannot_pay
    from edgedec.loading.second_model import draft_model_options, draft_token_s, open_draft_model

    path, options, overlap = plan.draft_model, plan.options, plan.draft_overlap
    assert path is not None, "asked for where a draft model is planned"

    def without(why: str) -> tuple[LoadPlan, list[str]]:
        info = read_model_info(path)
        size = "" if info is None else f" ({format_bytes(info.n_bytes)})"
        note = f"the draft model {path.name}{size} is not loaded: {why}"
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


def _draft_limit(model: Model, n_draft_max: int, *, loose: bool) -> int:
    """Return the most nodes of a draft: unless numerics are loose, those verified with the bits of single steps.

    The result is 0 where the model can't go back, as most recurrent ones: a rejected draft could not be forgotten.
    """
    limit = min(n_draft_max, model.capabilities.max_rows - 1) if model.capabilities.rollback else 0
    if loose or (invariant := model.batch_invariant) is True:
        return limit
    return min(limit, invariant - 1)

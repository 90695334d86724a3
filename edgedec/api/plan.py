"""From the options of load to a plan: files found, a runtime chosen, options checked, before anything is loaded.

The plan is what the options ask for; edgedec.memory.planner cuts it down where memory is short.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgedec.api.options import Application, EngineOptions, ModelName
from edgedec.companion import companion_of
from edgedec.drafter import DrafterFactory
from edgedec.drafter_traits import demands_of
from edgedec.errors import RequestError, argument
from edgedec.gguf.file import GGUF
from edgedec.gguf.model_kinds import denoises, embeds_only
from edgedec.grammar import GRAMMAR_BYTES
from edgedec.head_kinds import OFF, require_fit, usable_head
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import choose_runtime, machines_of, other_machines
from edgedec.memory.planner import with_kv_type
from edgedec.memory.setting import free_if_short
from edgedec.progress import stage
from edgedec.runtime import TakesHeads
from edgedec.scheduler.drafter_factories import drafter_factories, require_overlap
from edgedec.sessions.text_pages import require_count


def find_model(
    model: ModelName, options: EngineOptions, planning_bytes: int | None, *, measure: bool = True
) -> LoadPlan:
    """Return a plan of a model's file, downloaded where it has to be, and the runtime for it; the rest is open yet.

    Args:
        model: The model's name or path.
        options: The options of load.
        planning_bytes: Bytes that making a memory plan may take; None for any.
        measure: Whether two runtimes may be compared by their speed, as load's `runtime` describes.

    Raises:
        EdgedecError: The draft store can't be used, a drafter, the model or the draft head is not found, the head does
            not fit the model, or no runtime takes it.
    """
    load_options = options.load_options(planning_bytes)
    has_head = options.draft_head not in (None, OFF) and options.draft not in (None, OFF)
    if (elsewhere := other_machines(options.runtime, load_options.runtime_options)) is not None:
        elsewhere.require_no_layers_here(layer_skip=options.lossy.layer_skip is not None, draft_head=has_head)
        load_options = replace(load_options, machines=elsewhere.machines)
    draft_store(options)  # these two before a download
    drafter_factories(options.draft, with_model=True, with_head=True)
    path = resolve(model, options.resolving)
    if has_head:
        # Only some runtimes take a head. It is checked first, as the others' refusals would hide what is wrong with it.
        head = _named_head(options)
        require_fit(head, path)
        load_options = replace(load_options, draft_head=head)
    measure = measure and options.memory is None
    return choose(
        path, options.runtime, load_options, measure=measure, with_layers=options.lossy.layer_skip is not None
    )


def choose(path: Path, runtime: str, options: LoadOptions, *, measure: bool, with_layers: bool = False) -> LoadPlan:
    """Return a plan of a model file and its runtime. Speed is not measured where the model may not fit into memory.

    Args:
        path: The model file.
        runtime: Name of a runtime, or "auto".
        options: The runtime's options; `kv_type` may be "auto".
        measure: Whether two runtimes may be compared by their speed.
        with_layers: Ask for a runtime that can leave out layers, whatever an earlier comparison found.

    Raises:
        EdgedecError: As choose_runtime.
    """
    if with_layers:
        options, measure = replace(options, cache_dir=None), False
    if (free := free_if_short(path)) is not None:
        room = free if options.planning_bytes is None else min(free, options.planning_bytes)
        measure, options = False, replace(options, planning_bytes=room)
    with stage(options.on_progress, "choosing a runtime"):
        return choose_runtime(path, runtime, with_kv_type(options), measure=measure)


def plain_plan(
    chosen: LoadPlan, options: EngineOptions, application: Application, planning_bytes: int | None = None
) -> LoadPlan:
    """Return the plan that load's options ask for, without what other packages make; may download further models.

    Raises:
        EdgedecError: Options don't go together, or a drafter or a model is not found.
    """
    load_options, embeds = options.load_options(planning_bytes), embeds_only(chosen.path)
    if (elsewhere := machines_of(chosen.runtime, load_options.runtime_options)) is not None:
        load_options = replace(load_options, machines=elsewhere.machines)
    companion, companion_path = companion_of(options.lossy.methods), None
    denoising = isinstance(chosen.header, GGUF) and denoises(chosen.header)  # its forwards give several tokens anyway
    draft = None if embeds or denoising else options.draft
    if companion is not None and companion.model is not None:
        _require_alone(companion.what, options)
        from edgedec.loading.second_model import pair_options

        draft, load_options = None, pair_options(load_options)
        companion_path = resolve(companion.model, options.resolving, "small_model")
    second = None if options.draft_model is None else resolve(options.draft_model, options.resolving, "draft_model")
    head, head_note = _head(chosen, draft, options)
    drafters, pinned = drafter_factories(
        draft, with_model=second is not None, with_head=head is not None, cache_dir=load_options.cache_dir
    )
    if any(demands_of(factory).head for factory in drafters.values()):
        load_options = replace(load_options, draft_head=head)
    if options.drafting.overlap and drafters:
        require_overlap(drafters)
    uses_second = any(demands_of(factory).draft_model for factory in drafters.values())
    return replace(
        chosen,
        options=load_options,
        notes=(*filter(None, [head_note]), *_unused(options, drafters, None if uses_second else second)),
        drafters=drafters,
        pinned=pinned,
        draft_model=second if uses_second else None,
        draft_overlap=options.drafting.overlap,
        store_bytes=application.store_bytes,
        max_rows_pinned=options.drafting.max_rows is not None,
        companion=companion,
        companion_path=companion_path,
        pictures_pinned=options.projector != "auto",
        grammar_bytes=GRAMMAR_BYTES if options.grammars and not embeds else 0,
        request_bytes=application.request_bytes,
        n_texts=require_count(options.n_texts, "n_texts"),
        slides=options.lossy.slide,
    )


def draft_store(options: EngineOptions) -> Path | None:
    """Return the path of the draft store, where one is wanted (raises what require_draft_store raises)."""
    if options.drafting.store is None:
        return None
    from edgedec.drafters.suffix.store_file import require_draft_store

    return require_draft_store(Path(options.drafting.store))


def _unused(options: EngineOptions, drafters: Mapping[str, DrafterFactory], draft_model: Path | None) -> list[str]:
    """Return sentences on options of drafting, and on a draft model, that have no effect with these drafters."""
    notes, file, none = [], options.drafting.store, f"none of the drafters ({' + '.join(drafters) or 'none'})"
    if draft_model is not None:
        notes.append(f"the draft model {draft_model.name} is not loaded: {none} uses a smaller model")
    if options.drafting.tree is not None and not drafters:
        notes.append(f"the shape {options.drafting.tree} has no effect: nothing is drafted")
    if file is not None and not any(demands_of(factory).store_file for factory in drafters.values()):
        notes.append(f"the draft store {Path(file).name} is not used: {none} keeps what it learns")
    return notes


def _named_head(options: EngineOptions) -> Path:
    assert options.draft_head is not None, "it is named"
    return resolve(options.draft_head, replace(options.resolving, draft_head=True), "draft_head")


def _head(chosen: LoadPlan, draft: str | DrafterFactory | None, options: EngineOptions) -> tuple[Path | None, str]:
    """Return the draft head that may be used, and a note on one that is there but is not used.

    Raises:
        ModelNotFoundError, PullError, OfflineError: The head that `draft_head` names is not found.
    """
    is_named = options.draft_head not in (None, OFF)
    if options.draft_head == OFF:
        return None, ""
    if draft != "auto":
        factories, _ = drafter_factories(draft, with_model=True, with_head=True)
        if not any(demands_of(factory).head for factory in factories.values()):
            why = f"nothing in {draft} reads it" if factories else "nothing is drafted"
            return None, f"the draft head {options.draft_head} is not used, as {why}" if is_named else ""
    if is_named:
        return _named_head(options), ""
    kinds = chosen.runtime.draft_head_kinds(chosen.path) if isinstance(chosen.runtime, TakesHeads) else ()
    return usable_head(chosen.path, kinds, options.resolving.cache_dir)


def _require_alone(what: str, options: EngineOptions) -> None:
    """Raise RequestError if an option is given that a text of two models can't honour; `what` says what these are."""
    refused = {
        f"a draft model ({argument('draft_model')})": options.draft_model is not None,
        f"a draft head ({argument('draft_head')})": options.draft_head not in (None, OFF),
        f"the drafter {options.draft!r} ({argument('draft')})": options.draft not in ("auto", "off", None),
        f"a shape of drafts ({argument('draft_tree')})": options.drafting.tree is not None,
        f"a draft store ({argument('draft_store')})": options.drafting.store is not None,
        f"adapters ({argument('lora')})": bool(options.lora),
        f"a context that slides ({argument('slide')})": options.lossy.slide,
    }
    for option, is_given in refused.items():
        if is_given:
            raise RequestError(f"{what} don't go together with {option}: leave out one of them")

"""What an engine is to be: its files found, its runtime chosen and its options checked, before anything is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgedec.api.options import Application, EngineOptions, ModelName
from edgedec.companion import Companion, companion_of
from edgedec.drafter import DrafterFactory
from edgedec.errors import RequestError, argument
from edgedec.gguf.model_kinds import denoises, embeds_only
from edgedec.grammar import GRAMMAR_BYTES
from edgedec.head_kinds import OFF, require_fit, usable_head
from edgedec.load_options import LoadOptions
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import Choice, choose_runtime, machines_of, other_machines
from edgedec.memory.planner import with_kv_type
from edgedec.memory.setting import Setting, free_if_short
from edgedec.model import Model
from edgedec.pictures import PictureReader
from edgedec.progress import stage
from edgedec.scheduler.drafter_factories import (
    HEAD,
    LEARNED,
    SUFFIX,
    demands_of,
    drafter_factories,
    keeping_stores,
    require_overlap,
    used_draft_model,
)
from edgedec.sessions.text_pages import require_count
from edgedec.storage.cache_files import cache_folder

LossyChange = Callable[[Model, Path | None], Model]
"""(the loaded model, the cache folder) -> the model that takes its place, and closes it."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an engine is to be, where memory does not limit it.

    Attributes:
        setting: The setting that the memory plan begins with.
        factories: The drafters by name; a draft model's factory is filled in when the draft model is loaded.
        draft_store: The file that keeps what the suffix drafter learns, or None.
        change: Makes a lossy model of the loaded one, where `layer_skip` is given; else None.
        notes: Sentences for the statistics of every text.
        companion: The method that writes with a further model, or None.
        pictures: Reads pictures for the model; None without a projector.
    """

    setting: Setting
    factories: Mapping[str, DrafterFactory]
    draft_store: Path | None
    change: LossyChange | None = None
    notes: tuple[str, ...] = ()
    companion: Companion | None = None
    pictures: PictureReader | None = None


def find_model(model: ModelName, options: EngineOptions, planning_bytes: int | None, *, measure: bool = True) -> Choice:
    """Return a model's file, downloaded where it has to be, and the runtime for it.

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
    elsewhere = other_machines(options.runtime, load_options.runtime_options)
    if elsewhere is not None:
        elsewhere.require_no_layers_here(layer_skip=options.lossy.layer_skip is not None, draft_head=has_head)
        load_options = replace(load_options, machines=elsewhere.machines)
    _draft_store(options)  # these two before a download
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


def choose(path: Path, runtime: str, options: LoadOptions, *, measure: bool, with_layers: bool = False) -> Choice:
    """Return the runtime for a model file. Speed is not measured where the model may not fit into the free memory.

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
    free = free_if_short(path)
    if free is not None:
        room = free if options.planning_bytes is None else min(free, options.planning_bytes)
        measure, options = False, replace(options, planning_bytes=room)
    with stage(options.on_progress, "choosing a runtime"):
        return choose_runtime(path, runtime, with_kv_type(options), measure=measure)


def plain_wishes(
    choice: Choice, options: EngineOptions, application: Application, planning_bytes: int | None = None
) -> Wishes:
    """Return what load's options ask for, without what other packages make; downloads a draft model and a companion.

    Raises:
        EdgedecError: Options don't go together, or a drafter or a model is not found.
    """
    load_options, embeds = options.load_options(planning_bytes), embeds_only(choice.path)
    if (elsewhere := machines_of(choice.runtime, load_options.runtime_options)) is not None:
        load_options = replace(load_options, machines=elsewhere.machines)
    companion, companion_path = companion_of(options.lossy.methods), None
    denoising = choice.header is not None and denoises(choice.header)  # its forwards give several tokens anyway
    draft = None if embeds or denoising else options.draft
    if companion is not None and companion.model is not None:
        _require_alone(companion.what, options)
        from edgedec.loading.second_model import pair_options

        draft, load_options = None, pair_options(load_options)
        companion_path = resolve(companion.model, options.resolving, "small_model")
    found = None if options.draft_model is None else resolve(options.draft_model, options.resolving, "draft_model")
    head, head_note = _head(choice, draft, options)
    factories, pinned = drafter_factories(draft, with_model=found is not None, with_head=head is not None)
    if HEAD in factories:
        load_options = replace(load_options, draft_head=head)
    if options.drafting.overlap and factories:
        require_overlap(factories)
    draft_model, notes = used_draft_model(found, factories)
    setting = Setting(
        load_options,
        tuple(factories),
        pinned,
        draft_model,
        application.store_bytes,
        GRAMMAR_BYTES if options.grammars and not embeds else 0,
        companion=companion_path,
        companion_role="" if companion is None else companion.role,
        draft_overlap=options.drafting.overlap,
        max_rows_pinned=options.drafting.max_rows is not None,
        request_bytes=application.request_bytes,
        n_texts=require_count(options.n_texts, "n_texts"),
        learned_bytes=_learned_bytes(factories, options, pinned=pinned),
        slides=options.lossy.slide,
        stores=keeping_stores(factories),
        least_rows=max((demands_of(factory).rows for factory in factories.values()), default=1),
        pictures_pinned=options.projector != "auto",
    )
    notes = (*notes, *filter(None, [head_note]), *_unused(options, factories))
    return Wishes(setting, factories, _draft_store(options), notes=notes, companion=companion)


def _draft_store(options: EngineOptions) -> Path | None:
    """Return the path of the draft store, where one is wanted (raises what require_draft_store raises)."""
    if options.drafting.store is None:
        return None
    from edgedec.drafters.suffix.store_file import require_draft_store

    return require_draft_store(Path(options.drafting.store))


def _unused(options: EngineOptions, factories: Mapping[str, DrafterFactory]) -> list[str]:
    """Return sentences on options of drafting that have no effect with these drafters."""
    found = " + ".join(factories) or "none"
    notes = []
    if options.drafting.tree is not None and not factories:
        notes.append(f"the shape {options.drafting.tree} has no effect: nothing is drafted")
    if options.drafting.store is not None and SUFFIX not in factories:
        notes.append(
            f"the draft store {Path(options.drafting.store).name} is not used: it is for suffix, found {found}"
        )
    return notes


def _learned_bytes(factories: Mapping[str, DrafterFactory], options: EngineOptions, *, pinned: bool) -> int:
    """Return the bytes of the largest file of learned files where a drafter reads one; which one, the model decides."""
    reads = LEARNED in factories or (SUFFIX in factories and not pinned)
    root = cache_folder(options.resolving.cache_dir)
    if not reads or not (root / LEARNED).is_dir():
        return 0
    from edgedec.drafters.suffix.learned_file import largest_learned

    return largest_learned(root)


def _named_head(options: EngineOptions) -> Path:
    assert options.draft_head is not None, "it is named"
    return resolve(options.draft_head, replace(options.resolving, draft_head=True), "draft_head")


def _head(choice: Choice, draft: str | DrafterFactory | None, options: EngineOptions) -> tuple[Path | None, str]:
    """Return the draft head that may be used, and a note on one that is there but is not used.

    Raises:
        ModelNotFoundError, PullError, OfflineError: The head that `draft_head` names is not found.
    """
    is_named = options.draft_head not in (None, OFF)
    if options.draft_head == OFF or draft in (None, OFF):
        return None, ""
    if not isinstance(draft, str) or (draft != "auto" and HEAD not in draft.split("+")):
        return None, f"the draft head {options.draft_head} is not used, as nothing in {draft} reads it" * is_named
    if is_named:
        return _named_head(options), ""
    kinds = getattr(choice.runtime, "draft_head_kinds", lambda path: ())  # other packages' runtimes need not have it
    return usable_head(choice.path, kinds(choice.path), options.resolving.cache_dir)


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

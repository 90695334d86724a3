"""From a model's name to an Engine: resolve, choose a runtime, plan the memory, load, open a session."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from edgedec import plugins
from edgedec.api.engine import Engine
from edgedec.api.open_drafters import DraftWishes, Numerics, open_drafting
from edgedec.chat import ChatTemplate, ChatTemplateFactory
from edgedec.decoding.generate import SessionSlot
from edgedec.defaults import N_DRAFT_MAX
from edgedec.draft import STORE_BYTES, DrafterFactory
from edgedec.drafters.suffix.store_file import require_draft_store
from edgedec.errors import RequestError
from edgedec.gguf.trained_context import context_note
from edgedec.grammar import GRAMMAR_BYTES, LEAST_GRAMMAR_BYTES
from edgedec.layer_skip.choose import leave_out, require_layer_skip
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import Choice, choose_runtime
from edgedec.loading.small_model import open_small_model, pair_options, require_alone
from edgedec.memory.ladder import Setting
from edgedec.memory.planner import Cap, free_if_short, plan_within, planning_bytes, with_kv_type
from edgedec.memory.shedding import memory_watch
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryPlan, parse_size
from edgedec.model import LoadOptions, Model, Session, default_n_ctx
from edgedec.progress import CancelToken, OnProgress, stage
from edgedec.resolver import ResolveOptions
from edgedec.scheduler.drafter_factories import drafter_factories, require_overlap, used_draft_model
from edgedec.sessions.batching import Batcher
from edgedec.sessions.model_switching import Switching, SwitchingSession, require_pair
from edgedec.sessions.sliding_window import SlidingSession
from edgedec.storage.probe_cache import cache_folder

_MOST_DRAFTED = (1 << 16) - 1

# The engines of this process: the one global, as the cap of load(memory=...) is for all models of the process together.
_ENGINES: WeakSet[Engine] = WeakSet()

logger = logging.getLogger("edgedec.api.load")
logger.addHandler(logging.NullHandler())  # without one, `logging` would print warnings itself


def load(
    model: str | os.PathLike[str],
    *,
    runtime: str = "auto",
    n_ctx: int | None = None,
    slide: bool = False,
    layer_skip: float | None = None,
    layer_skip_force: bool = False,
    memory: int | str | None = None,
    draft: str | DrafterFactory | None = "auto",
    draft_model: str | os.PathLike[str] | None = None,
    draft_overlap: bool = False,
    n_draft_max: int = N_DRAFT_MAX,
    draft_numerics: Numerics = "strict",
    draft_store: str | os.PathLike[str] | None = None,
    small_model: str | os.PathLike[str] | None = None,
    entropy: float | None = None,
    entropy_force: bool = False,
    chat_template: str | None = None,
    grammars: bool = False,
    n_parallel: int = 1,
    max_rows: int | None = None,
    n_threads: int | None = None,
    kv_type: str = "f16",
    flash_attention: bool | None = None,
    mmap: bool = True,
    repack: bool = True,
    tile_cache: bool = True,
    n_gpu_layers: int | None = None,
    device: str | None = None,
    offline: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Engine:
    """Load a model.

    Args:
        model: A path, a catalogue name, hf:owner/repo[:quantization or file][@revision], or ollama:name. What is not
            on this machine is fetched first, unless `offline`.
        runtime: Name of a runtime, or "auto", which compares the two best at the first load of a model (at most 8 s,
            not under a memory cap, and not where memory is short).
        n_ctx: Tokens of the context; None for min(trained, 4,096).
        slide: Go on where the context is full, with its first tokens and its newest; lossy, as the others are
            forgotten (edgedec.sessions.sliding_window). Texts then end only at an end token, max_tokens or a stop.
        layer_skip: LOSSY: leave out evenly spaced layers, or what edgedec tune-skip --lossy found, in every forward,
            until a token reads 1 / layer_skip of the bytes of weights: about so many times as fast, and another text.
            Refused beyond what was measured for the model (edgedec.layer_skip.quality_table), unless
            `layer_skip_force`.
        memory: Most that edgedec may hold ("900MB", "1.5GiB", bytes), for all models of the process together, the
            rest of the process not counted. What was not asked for by name is cut down to fit, in the order of
            edgedec.memory.planner (engine.plan.given_up says what); what is over it even so is refused before anything
            is loaded. None for what the system has free, as far as that can be found out.
        draft: "auto" drafts where measured cost and acceptance say that it pays; the name of a drafter, several joined
            by "+", or a factory pins it: its drafts are verified whatever they cost. "off" and None decode plainly.
            The text is the same in every case.
        draft_model: A smaller model that may draft too, best of the same family; named as `model` is.
        draft_overlap: Let the draft model, on the CPU, go on while the target verifies
            (edgedec.drafters.draft_model.overlapped): for a target on another device, an NPU or a GPU. Without effect
            under another rule than "coupled".
        n_draft_max: Most nodes of a draft.
        draft_numerics: "strict" keeps to drafts whose rows are bit-equal to single steps on this runtime; "loose" goes
            beyond, and the text may then differ where two tokens are nearly as probable.
        draft_store: File in which what the suffix drafter keeps between requests, the token ids of earlier outputs,
            outlives the process: read now, written by Engine.close(). Only models of one vocabulary share a file.
        small_model: A smaller model of the same vocabulary that writes where the text is easy; named as `model` is.
            Lossy: nothing verifies what it writes (edgedec.sessions.model_switching). Nothing is drafted then, and
            requests take turns; to be given with `entropy`.
        entropy: Bits: the small model writes where the mean entropy of the last tokens is below. 0 is the large model
            alone.
        entropy_force: Take a threshold beyond those measured.
        chat_template: Jinja source to use instead of the model's own.
        grammars: Plan memory for texts that keep to a grammar (json_schema=..., grammar=...), too. Without it a grammar
            gets the least that one can do with where there is a plan, and is not part of it.
        kv_type: As in LoadOptions, or "auto": "f16", and smaller where memory is short, which may change the text.
        n_parallel: Requests that generate at the same time and share each forward; more of them take turns. Where the
            runtime's rows depend on what else is in a forward (llamacpp), all take turns.
        max_rows, n_threads, flash_attention, mmap, repack, tile_cache, n_gpu_layers, device: As in
            edgedec.model.LoadOptions.
        offline: Never touch the network.
        cache_dir: Root of edgedec's cache; None for EDGEDEC_CACHE or the platform's default.
        on_progress: Called with progress of fetching and loading.
        cancel: Stops fetching and loading.

    Raises:
        EdgedecError: edgedec/errors.py draws the tree.
    """
    require_draft_max(n_draft_max)
    n_held = sum(engine.held_bytes for engine in _ENGINES)
    cap = Cap(None if memory is None else parse_size(memory), n_held)
    options = LoadOptions(
        n_ctx=n_ctx,
        n_parallel=n_parallel,
        max_rows=max_rows if max_rows is not None else n_draft_max + 1,
        n_threads=n_threads,
        kv_type=kv_type,
        flash_attention=flash_attention,
        mmap=mmap,
        repack=repack,
        tile_cache=tile_cache,
        planning_bytes=planning_bytes(cap),
        n_gpu_layers=n_gpu_layers,
        device=device,
        cache_dir=cache_folder(Path(cache_dir) if cache_dir is not None else None),
        on_progress=on_progress,
        cancel=cancel,
    )
    require_pair(small_model, entropy, force=entropy_force)
    store = None if draft_store is None else require_draft_store(Path(draft_store))
    resolving = ResolveOptions(options.cache_dir, offline, on_progress, cancel)
    path = resolve(model, resolving)
    return open_engine(
        choose(path, runtime, options, measure=memory is None, with_layers=layer_skip is not None),
        options,
        cap,
        draft=draft,
        draft_model=None if draft_model is None else resolve(draft_model, resolving),
        draft_overlap=draft_overlap,
        n_draft_max=n_draft_max,
        draft_numerics=draft_numerics,
        draft_store=store,
        chat_template=chat_template,
        grammar_bytes=GRAMMAR_BYTES if grammars else 0,
        slide=slide,
        switching=resolve_pair(small_model, entropy, resolving),
        layer_skip=layer_skip,
        layer_skip_force=layer_skip_force,
        keep_rows=max_rows is not None,
    )


def require_draft_max(n_draft_max: int) -> None:
    """Raise RequestError unless it is a length that drafts may have."""
    if not 1 <= n_draft_max <= _MOST_DRAFTED:
        raise RequestError(f"n_draft_max is {n_draft_max}; it must be from 1 to {_MOST_DRAFTED}")


def resolve_pair(
    small_model: str | os.PathLike[str] | None, entropy: float | None, options: ResolveOptions
) -> Switching | None:
    """Return the small model of a pair and its threshold; None without (raises what resolve raises)."""
    if small_model is None or entropy is None:
        return None
    return Switching(resolve(small_model, options), entropy)


def choose(path: Path, runtime: str, options: LoadOptions, *, measure: bool, with_layers: bool = False) -> Choice:
    """Return the runtime for a model file: choose_runtime for options that may leave the KV cache's type open.

    `with_layers` asks for one that can leave out layers: ours, whatever a measurement said. Nothing is measured where
    the whole model may not fit into what the system has free: that loads it as it is.
    """
    if with_layers:
        options, measure = replace(options, cache_dir=None), False
    free = free_if_short(path)
    if free is not None:
        room = free if options.planning_bytes is None else min(free, options.planning_bytes)
        measure, options = False, replace(options, planning_bytes=room)
    with stage(options.on_progress, "choosing a runtime"):
        return choose_runtime(path, runtime, with_kv_type(options), measure=measure)


def open_engine(
    choice: Choice,
    options: LoadOptions,
    cap: Cap,
    *,
    draft: str | DrafterFactory | None = "auto",
    draft_model: Path | None = None,
    draft_overlap: bool = False,
    n_draft_max: int = N_DRAFT_MAX,
    draft_numerics: Numerics = "strict",
    draft_store: Path | None = None,
    chat_template: str | None = None,
    store_bytes: int = STORE_BYTES,
    prompt_cache: bool = False,
    grammar_bytes: int = 0,
    slide: bool = False,
    switching: Switching | None = None,
    layer_skip: float | None = None,
    layer_skip_force: bool = False,
    keep_rows: bool = False,
    request_bytes: int = 0,
) -> Engine:
    """Plan, and load what choose chose and the draft model where there is one (raises what load raises).

    `draft_store` is what require_draft_store returned; `keep_rows` says that options.max_rows was asked for by name;
    `request_bytes` is what a server keeps for requests.
    """
    require_draft_max(n_draft_max)
    if slide and prompt_cache:
        raise RequestError("a context that slides can't be saved or restored; leave slide or prompt_cache out")
    if switching is not None:
        require_alone(draft, draft_model, slide=slide, prompt_cache=prompt_cache)
        draft, options = None, pair_options(options)
    factories, pinned = drafter_factories(draft, with_model=draft_model is not None)
    if draft_overlap and factories:
        require_overlap(factories)
    sizes = None
    if layer_skip is not None:
        sizes = require_layer_skip(choice.path, layer_skip, force=layer_skip_force, drafters=factories)
    used, notes = used_draft_model(draft_model, factories)
    wishes = Setting(options, tuple(factories), pinned, used, store_bytes, prompt_cache, grammar_bytes)
    wishes = replace(wishes, small_model=None if switching is None else switching.small_model)
    wishes = replace(wishes, draft_overlap=draft_overlap, max_rows_pinned=keep_rows, request_bytes=request_bytes)
    with stage(options.on_progress, "planning the memory"):
        planned = plan_within(choice, wishes, cap)
    choice = planned.choice
    planned.plan.require()
    setting = planned.setting
    options = setting.options
    drafting = DraftWishes(factories, n_draft_max, draft_numerics, draft_store, notes)
    with ExitStack() as undo:
        with stage(options.on_progress, "load", choice.path.name):
            loaded = choice.runtime.load(choice.path, options)
        undo.callback(loaded.close)
        if planned.plan.terms:
            return_free_memory()  # before what comes now is put among it
        if layer_skip is not None and sizes is not None:
            loaded = leave_out(loaded, sizes, layer_skip, options.cache_dir)
        targets = _targets(loaded, options, choice.reason, slide=slide)
        small = None if switching is None else _pair(targets[0], switching, options, undo)
        _tell(targets, _context_notes(choice.path, targets[0].session.n_ctx, switching))
        planned = open_drafting(loaded, targets, planned, drafting, undo)
        for target in targets:
            target.max_rows = options.max_rows if planned.plan.terms else None
            target.watch = memory_watch(target.drafting, planned.plan.process_cap_bytes)
        least = LEAST_GRAMMAR_BYTES if planned.plan.terms else GRAMMAR_BYTES
        grammar_bytes = setting.grammar_bytes or least
        engine = Engine(loaded, targets, _template(loaded, chat_template), planned.plan, small, grammar_bytes)
        n_tokens = len(targets) * engine.n_ctx
        held = planned.plan if planned.plan.terms else MemoryPlan(loaded.memory(n_tokens, options.max_rows))
        engine.held_bytes = held.own_bytes
        _ENGINES.add(engine)
        undo.pop_all()
        if planned.plan.terms:
            return_free_memory()  # what probing and measuring left behind
        return engine


def _targets(model: Model, options: LoadOptions, runtime_reason: str, *, slide: bool) -> list[SessionSlot]:
    """Open the sessions of the requests that generate at the same time.

    They are several only where a row does not depend on what else is in its forward: elsewhere a text would depend on
    who else asks, so requests take turns.
    """
    n_ctx = options.n_ctx or default_n_ctx(model.card.n_ctx_train)
    if options.n_parallel == 1 or model.batch_invariant is not True:
        sessions: list[Session] = [model.session(n_ctx)]
    else:
        batcher = Batcher(model)
        sessions = [batcher.session(n_ctx) for _ in range(options.n_parallel)]
    if slide:
        sessions = [SlidingSession(session) for session in sessions]
    targets = [SessionSlot(session, runtime_reason=runtime_reason) for session in sessions]
    if len(targets) < options.n_parallel:
        row = f"on the {model.card.runtime} runtime a row depends on what else is in its forward"
        _tell(targets, [f"{options.n_parallel} parallel requests take turns: {row}"])
    return targets


def _context_notes(path: Path, n_ctx: int, switching: Switching | None) -> list[str]:
    """Return what to tell of a context that is longer than the models that write were trained for."""
    small = "" if switching is None else context_note(switching.small_model, n_ctx, "the small model")
    return [note for note in (context_note(path, n_ctx), small) if note]


def _tell(targets: Sequence[SessionSlot], notes: Sequence[str]) -> None:
    """Warn of something now, and with the statistics of each text."""
    for note in notes:
        logger.warning("%s", note)
    for target in targets:
        target.notes += tuple(notes)


def _pair(target: SessionSlot, switching: Switching, options: LoadOptions, undo: ExitStack) -> Model:
    """Load the small model, let it write in turn with the target's, and return it."""
    large = target.session
    with stage(options.on_progress, "load", switching.small_model.name):
        small = open_small_model(switching.small_model, large.model, options)
    undo.callback(small.close)
    target.session = SwitchingSession(large, small.session(large.n_ctx), switching.entropy)
    return small


def _template(model: Model, source: str | None) -> ChatTemplate | None:
    source = source if source is not None else model.card.chat_template
    if source is None:
        return None
    factory: ChatTemplateFactory = plugins.load_plugin(plugins.TEMPLATES, "jinja")
    tokenizer = model.tokenizer
    return factory(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

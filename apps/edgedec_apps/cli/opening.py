"""From the options of a command to a loaded engine."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgedec.api.base_memory import base_bytes
from edgedec.api.engine import Engine, require_rule
from edgedec.api.load import choose, open_engine, require_draft_max, resolve_pair
from edgedec.api.open_drafters import Numerics
from edgedec.api.prompt_cache import require_prompt_cache
from edgedec.draft import STORE_BYTES
from edgedec.drafters.suffix.store_file import require_draft_store
from edgedec.errors import EdgedecError, ModelFormatError, RequestError
from edgedec.grammar import GRAMMAR_BYTES
from edgedec.loading.resolve import resolve
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.planner import Cap, planning_bytes
from edgedec.memory_plan import format_bytes, parse_size
from edgedec.model import LoadOptions
from edgedec.progress import CancelToken, OnProgress
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec.sequence import COUPLED
from edgedec.sessions.model_switching import Switching, require_pair
from edgedec_apps.cli.log import show_log, warnings_of
from edgedec_apps.cli.options import LoadFlags, OutputFlags, SamplingFlags
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import say
from edgedec_apps.cli.wording import in_options
from edgedec_apps.server.settings import ROOM_BYTES
from edgedec_apps.texts import read_text
from edgedec_models.folders import cache_folder

_ONE_REQUEST_BYTES = 4_000_000  # most bytes that each drafter keeps where there is one request only


def open_model(
    name: str,
    flags: LoadFlags,
    output: OutputFlags,
    cancel: CancelToken,
    *,
    one_request: bool = False,
    n_parallel: int = 1,
    grammars: bool = False,
    request_bytes: int = 0,
) -> Engine:
    """Resolve, plan and load, for `n_parallel` requests at once; shows progress. Raises what edgedec.load raises.

    `grammars` says whether texts may be kept to grammars, which takes memory; `one_request` that there is only one;
    `request_bytes` what a server keeps for requests.
    """
    if output.verbose:
        show_log()
    cap = Cap() if flags.memory is None else Cap(parse_size(flags.memory), base_bytes(), whole_process=True)
    with warnings_of("edgedec.tiles", "edgedec.api.load") as warnings, ProgressLine(quiet=output.quiet) as on_progress:
        template = None if flags.chat_template is None else read_text(flags.chat_template)
        if flags.prompt_cache is not None:
            require_prompt_cache(flags.prompt_cache)
        draft_store = None if flags.draft_store is None else require_draft_store(flags.draft_store)
        options = load_options(flags, on_progress, cancel)
        options = replace(options, n_parallel=n_parallel, planning_bytes=planning_bytes(cap))
        switching = choose_pair(flags, options)
        choice, draft_model = choose_models(name, flags, options, measure=flags.memory is None)
        engine = open_engine(
            choice,
            options,
            cap,
            draft=flags.draft,
            draft_model=draft_model,
            draft_overlap=flags.draft_overlap,
            n_draft_max=flags.draft_max,
            draft_numerics=numerics(flags.draft_numerics),
            draft_store=draft_store,
            chat_template=template,
            prompt_cache=flags.prompt_cache is not None,
            grammar_bytes=GRAMMAR_BYTES if grammars else 0,
            slide=flags.slide,
            switching=switching,
            layer_skip=flags.layer_skip,
            layer_skip_force=flags.layer_skip_force,
            request_bytes=request_bytes,
            store_bytes=store_bytes_of(one_request, flags),
        )
    if not output.quiet and not output.verbose:
        for warning in warnings:
            say(f"edgedec: {warning}")
    if engine.plan.given_up and not output.quiet:
        say(f"edgedec: to keep within {format_bytes(engine.plan.cap_bytes or 0)}: {', '.join(engine.plan.given_up)}")
    return engine


def store_bytes_of(one_request: bool, flags: LoadFlags) -> int:
    """Return the most that each drafter keeps: less where there is only one request, and no file to keep it in."""
    return _ONE_REQUEST_BYTES if one_request and flags.draft_store is None else STORE_BYTES


def room_bytes_of(flags: LoadFlags) -> int:
    """Return what a server wishes for all its requests together: of a cap, a sixteenth at the most."""
    return ROOM_BYTES if flags.memory is None else min(ROOM_BYTES, parse_size(flags.memory) // 16)


def serves_grammars() -> bool:
    """Return whether a server must be ready to keep texts to grammars, which any request may ask for."""
    return find_spec("llguidance") is not None


def choose_pair(flags: LoadFlags, options: LoadOptions) -> Switching | None:
    """Find the small model that writes in turn; raises what require_pair and resolve raise."""
    require_pair(flags.small_model, flags.entropy, force=flags.entropy_force)
    resolving = ResolveOptions(options.cache_dir, flags.offline, options.on_progress, options.cancel)
    return resolve_pair(flags.small_model, flags.entropy, resolving)


def choose_models(name: str, flags: LoadFlags, options: LoadOptions, *, measure: bool) -> tuple[Choice, Path | None]:
    """Find the model and its runtime, and the draft model's file; raises what resolve and choose raise."""
    resolving = ResolveOptions(options.cache_dir, flags.offline, options.on_progress, options.cancel)
    path = resolve(name, resolving)
    draft_model = None if flags.draft_model is None else resolve(flags.draft_model, resolving)
    with_layers = flags.layer_skip is not None
    return choose(path, flags.runtime, options, measure=measure, with_layers=with_layers), draft_model


def load_options(flags: LoadFlags, on_progress: OnProgress | None, cancel: CancelToken | None) -> LoadOptions:
    """Return what the flags say to the runtime (RequestError where --draft-max is out of range)."""
    require_draft_max(flags.draft_max)
    return LoadOptions(
        n_ctx=flags.context,
        max_rows=flags.draft_max + 1 if flags.draft != "off" else 1,
        n_threads=flags.threads,
        kv_type=flags.kv_type,
        flash_attention=flags.flash_attention,
        mmap=flags.mmap,
        repack=flags.repack,
        tile_cache=flags.tile_cache,
        n_gpu_layers=flags.gpu_layers,
        device=flags.device,
        cache_dir=cache_folder(),
        on_progress=on_progress,
        cancel=cancel,
    )


def numerics(name: str) -> Numerics:
    """Return the mode of that name (RequestError where there is none)."""
    if name == "strict":
        return "strict"
    if name == "loose":
        return "loose"
    raise RequestError(f"--draft-numerics is {name!r}; it must be strict or loose")


def sampling_options(flags: SamplingFlags) -> dict[str, Any]:
    """Return the options of Engine.stream given (RequestError, before anything is loaded, when one is out of range)."""
    options = flags.as_options()
    SamplingParams(**{name: value for name, value in options.items() if name != "verify"})
    require_rule(options.get("verify", COUPLED))
    return options


def restore_prompt_cache(engine: Engine, path: Path | None) -> None:
    """Load the prompt cache where there is one; one that does not fit is said, and replaced later."""
    if path is None or not path.exists() or not path.stat().st_size:
        return
    try:
        engine.load_prompt_cache(path)
    except ModelFormatError as error:
        say(f"edgedec: {in_options(str(error))}; going on without it")


def store_prompt_cache(engine: Engine, path: Path | None) -> None:
    """Save the prompt cache, and the draft store; the reply is out already, so a failure is only said."""
    saves = [engine.save_draft_store]
    if path is not None:
        saves.append(partial(engine.save_prompt_cache, path))
    for save in saves:
        try:
            save()
        except EdgedecError as error:
            say(f"edgedec: {in_options(str(error))}")

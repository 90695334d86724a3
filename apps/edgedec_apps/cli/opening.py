"""From the options of a command to a loaded engine."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgedec.choosing import choose_runtime
from edgedec.engine import Engine, require_rule
from edgedec.errors import EdgedecError, ModelFormatError, RequestError
from edgedec.loading import Numerics, open_engine, plan_memory, resolve
from edgedec.memory import MemoryPlan, parse_size
from edgedec.model import LoadOptions
from edgedec.progress import CancelToken
from edgedec.prompt_cache import require_prompt_cache
from edgedec.resolver import ResolveOptions
from edgedec.sampling import SamplingParams
from edgedec.verify import COUPLED
from edgedec_apps.cli.options import LoadFlags, OutputFlags, SamplingFlags
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.prompt import read_text
from edgedec_apps.cli.terminal import say
from edgedec_models.folders import cache_folder


def open_model(name: str, flags: LoadFlags, output: OutputFlags, cancel: CancelToken) -> Engine:
    """Resolve, plan and load; shows progress. Raises what edgedec.load raises."""
    if output.verbose:
        _show_log()
    root = cache_folder()
    with ProgressLine(quiet=output.quiet) as on_progress:
        options = LoadOptions(
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
            cache_dir=root,
            on_progress=on_progress,
            cancel=cancel,
        )
        template = None if flags.chat_template is None else read_text(flags.chat_template)
        if flags.prompt_cache is not None:
            require_prompt_cache(flags.prompt_cache)
        resolving = ResolveOptions(root, flags.offline, on_progress, cancel)
        path = resolve(name, resolving)
        draft_model = None if flags.draft_model is None else resolve(flags.draft_model, resolving)
        choice = choose_runtime(path, flags.runtime, options, measure=flags.memory is None)
        plan = MemoryPlan(())
        if flags.memory is not None:
            plan = plan_memory(choice, replace(options, on_progress=None), parse_size(flags.memory))
            plan.require()
        return open_engine(
            choice,
            options,
            plan,
            draft=flags.draft,
            draft_model=draft_model,
            n_draft_max=flags.draft_max,
            draft_numerics=numerics(flags.draft_numerics),
            chat_template=template,
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
        say(f"edgedec: {error}; going on without it")


def store_prompt_cache(engine: Engine, path: Path | None) -> None:
    """Save the prompt cache; the reply is out already, so a failure is only said."""
    if path is None:
        return
    try:
        engine.save_prompt_cache(path)
    except EdgedecError as error:
        say(f"edgedec: {error}")


class _SayingHandler(logging.Handler):
    """Passes log records on to the person; a model's metadata among them can't reach the terminal as it is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        say(f"{record.name}: {record.getMessage()}")


def _show_log() -> None:
    logger = logging.getLogger("edgedec")
    logger.setLevel(logging.INFO)
    logger.handlers = [_SayingHandler()]
    logger.propagate = False

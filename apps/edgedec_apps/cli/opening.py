"""From the options of a command to a loaded engine."""

import logging
from dataclasses import replace
from pathlib import Path

from edgedec.engine import Engine
from edgedec.errors import EdgedecError, ModelFormatError, StorageError
from edgedec.loading import choose_runtime, open_engine, resolve, plan_memory
from edgedec.memory import MemoryPlan, parse_size
from edgedec.model import LoadOptions
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.options import LoadFlags, OutputFlags
from edgedec_apps.cli.terminal import ProgressLine, say
from edgedec_models.folders import models_folder


def open_model(name: str, flags: LoadFlags, output: OutputFlags, cancel: CancelToken) -> Engine:
    """Resolve, plan and load; shows progress. Raises what edgedec.load raises."""
    if output.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    root = models_folder().parent
    with ProgressLine(quiet=output.quiet) as on_progress:
        options = LoadOptions(
            n_ctx=flags.context,
            max_rows=flags.draft_max + 1 if flags.draft else 1,
            n_threads=flags.threads,
            kv_type=flags.kv_type,
            flash_attention=flags.flash_attention,
            mmap=flags.mmap,
            repack=flags.repack,
            n_gpu_layers=flags.gpu_layers,
            device=flags.device,
            cache_dir=root,
            on_progress=on_progress,
            cancel=cancel,
        )
        template = None if flags.chat_template is None else read_text(flags.chat_template)
        path = resolve(name, ResolveOptions(root, flags.offline, on_progress, cancel))
        choice = choose_runtime(path, flags.runtime)
        plan = MemoryPlan(())
        if flags.memory is not None:
            plan = plan_memory(choice, replace(options, on_progress=None), parse_size(flags.memory))
            plan.require()
        return open_engine(
            choice, options, plan, draft=flags.draft, n_draft_max=flags.draft_max, chat_template=template
        )


def restore_prompt_cache(engine: Engine, path: Path | None) -> None:
    """Load the prompt cache where there is one; one that does not fit is said and left behind."""
    if path is None or not path.exists():
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


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises:
        StorageError: It can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} can't be read as UTF-8 text: {error}") from error

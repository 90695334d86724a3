"""The commands and their options. What they do is imported when they are called: --help and completion stay fast."""

from pathlib import Path
from typing import Annotated

import typer

from edgedec_apps.cli.options import (
    AsJson,
    LoadFlags,
    ModelName,
    Offline,
    OutputFlags,
    Quiet,
    SamplingFlags,
    System,
    model_option,
    prompt_option,
    tiles_option,
)


def run(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The prompt; without one: --file, standard input, or a chat."),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        prompt_option("--file", "-f", help="Read the prompt from a file; - is standard input.", metavar="FILE"),
    ] = None,
    raw: Annotated[bool, prompt_option("--raw", help="Continue the text: no chat template.")] = False,
    system: System = None,
    load: LoadFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
) -> None:
    """Run a model on a prompt: text goes to standard output, all else to standard error.

    At a terminal without a prompt it becomes a chat.
    """
    from edgedec_apps.cli.chat import converse
    from edgedec_apps.cli.prompt import argument_text, find_prompt
    from edgedec_apps.cli.run import Job, run_prompt

    text, system = find_prompt(prompt, file), argument_text(system, "--system")
    if text is None:
        converse(model, raw, system, load, sampling, output)
    else:
        run_prompt(Job(model, text, raw, system, load, sampling, output))


def chat(
    model: ModelName,
    *,
    system: System = None,
    load: LoadFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
) -> None:
    """Talk with a model. From a pipe, each line is a message."""
    from edgedec_apps.cli.chat import converse
    from edgedec_apps.cli.prompt import argument_text

    converse(model, False, argument_text(system, "--system"), load, sampling, output)


def pull(
    model: ModelName,
    *,
    force: Annotated[bool, model_option("--force", help="Check the files again, and fetch what is damaged.")] = False,
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model, or resume fetching it, and check it."""
    from edgedec_apps.cli.models import pull_model

    pull_model(model, force=force, offline=offline, quiet=quiet, as_json=as_json)


def list_models(*, as_json: AsJson = False) -> None:
    """List the models on this machine, and those that the catalogue can fetch."""
    from edgedec_apps.cli.models import print_models

    print_models(as_json=as_json)


def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that edgedec list shows.")],
) -> None:
    """Delete a model and its tiles from the cache; files elsewhere are never touched."""
    from edgedec_apps.cli.models import delete_model

    delete_model(model)


def info(model: ModelName, *, as_json: AsJson = False) -> None:
    """Show a model's architecture, quantization, context, memory, defaults and runtimes.

    Nothing is fetched, and only the file's header is read.
    """
    from edgedec_apps.cli.info import print_info

    print_info(model, as_json=as_json)


def doctor(*, as_json: AsJson = False) -> None:
    """Show CPU features, memory, runtimes, devices, plug-ins and versions."""
    from edgedec_apps.cli.doctor import print_report

    print_report(as_json=as_json)


def cache_list(*, as_json: AsJson = False) -> None:
    """List the tile files: whose they are, what they take, and whether their model is still there."""
    from edgedec_apps.cli.cache import print_tiles

    print_tiles(as_json=as_json)


def cache_prune(
    *,
    everything: Annotated[bool, tiles_option("--all", help="Delete all tile files, the current ones, too.")] = False,
) -> None:
    """Delete the tile files whose model is gone or has changed, and what interrupted work left."""
    from edgedec_apps.cli.cache import delete_tiles

    delete_tiles(everything=everything)


def cache_verify(*, quiet: Quiet = False) -> None:
    """Read all tile files, and delete those that are damaged: the next start writes them anew."""
    from edgedec_apps.cli.cache import verify_tiles

    verify_tiles(quiet=quiet)

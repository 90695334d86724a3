"""The commands put together, and how one is run."""

from typing import Annotated

import typer

import edgedec
from edgedec_apps.cli import commands, commands_models
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.help_text import Command, Group
from edgedec_apps.cli.options import flattened

_TYPERS_INTERRUPTED = of_signal(2)

app = typer.Typer(
    name="edgedec",
    cls=Group,
    help="Run language models on your own machine: the same text, sooner, within the memory you allow.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Run language models on your own machine: the same text, sooner, within the memory you allow."""
    if version:
        print(edgedec.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command("run", cls=Command)(flattened(commands.run))
app.command("chat", cls=Command)(flattened(commands.chat))
app.command("serve", cls=Command)(flattened(commands.serve))
app.command("bench", cls=Command)(flattened(commands.bench))
app.command("simulate", cls=Command)(commands.simulate)
app.command("eval", cls=Command)(commands.evaluate)
app.command("tune-skip", cls=Command)(commands_models.tune_skip)
app.command("export", cls=Command)(commands_models.export)
app.command("plan", cls=Command)(flattened(commands.plan))
app.command("pull", cls=Command)(commands_models.pull)
app.command("list", cls=Command)(commands_models.list_models)
app.command("rm", cls=Command)(commands_models.rm)
app.command("info", cls=Command)(commands_models.info)
app.command("show", cls=Command, hidden=True, help="The same as info.")(commands_models.info)
app.command("doctor", cls=Command)(commands_models.doctor)

cache = typer.Typer(cls=Group, help="Look at the tile cache, and delete from it.", rich_markup_mode=None)
cache.command("list", cls=Command)(commands_models.cache_list)
cache.command("prune", cls=Command)(commands_models.cache_prune)
cache.command("verify", cls=Command)(commands_models.cache_verify)
app.add_typer(cache, name="cache")


def run_app() -> int:
    """Run what the command line asks for and return the exit code; errors come out as exceptions."""
    code = app(prog_name="edgedec", standalone_mode=False)
    if code == _TYPERS_INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0

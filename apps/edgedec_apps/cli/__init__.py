"""The command line: `edgedec`.

Generated text goes to standard output, all else to standard error; exit codes are those of edgedec.errors.
"""

import os
import sys
from typing import Annotated

import typer

import edgedec
from edgedec.errors import EdgedecError
from edgedec_apps.cli import commands
from edgedec_apps.cli.options import flattened
from edgedec_apps.cli.terminal import prepare_streams, say

_INTERNAL_ERROR = 70
_INTERRUPTED = 53

app = typer.Typer(
    name="edgedec",
    help="Run language models on your own machine: the same text, sooner, within the memory you allow.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


app.command("run")(flattened(commands.run))
app.command("chat")(flattened(commands.chat))
app.command("pull")(commands.pull)
app.command("list")(commands.list_models)
app.command("rm")(commands.rm)
app.command("info")(commands.info)
app.command("show", hidden=True, help="The same as info.")(commands.info)
app.command("doctor")(commands.doctor)


def main() -> None:
    """Run the command line; never lets a traceback out, unless EDGEDEC_DEBUG is set."""
    prepare_streams()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except EdgedecError as error:
        _fail(error, error.exit_code)
    except typer.Exit as error:
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        say("edgedec: interrupted")
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader has had enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        _fail_unexpected(error)


def _fail_unexpected(error: Exception) -> None:
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # a usage error, with its own way to say so
        error.show()
        sys.exit(error.exit_code)
    _fail(error, _INTERNAL_ERROR, f"internal error: {type(error).__name__}: ")


def _fail(error: Exception, code: int, prefix: str = "") -> None:
    if os.environ.get("EDGEDEC_DEBUG"):
        raise error
    say(f"edgedec: {prefix}{error}")
    sys.exit(code)

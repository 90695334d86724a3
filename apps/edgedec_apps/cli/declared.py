"""How options and arguments of commands are declared: option(), flag() and argument()."""

from dataclasses import field
from functools import partial
from typing import Any

import typer

from edgedec_apps.cli import completion
from edgedec_apps.cli.help_text import FURTHER, OPTION

_MODEL, _PROMPT, _OUTPUT = "Model and memory", "Prompt", "Output"

_WITH_VARIABLE = """
--runtime --draft --context --memory --threads --offline --max-tokens --temperature --quiet --host --port --api-key
"""
"""Options that an environment variable may set as well: EDGEDEC_MAX_TOKENS sets --max-tokens."""


def option(
    spelling: str,
    help: str,
    *,
    panel: str,
    complete: completion.Complete | None = None,
    further: bool = False,
    least: int | None = None,
    most: int | None = None,
) -> Any:
    """Declare an option.

    Args:
        spelling: How it is typed: its flags, and what stands for its value, as in "--context -c N".
        help: A sentence.
        panel: The group of options that it belongs to.
        complete: Returns the values that begin with a text, for tab completion; None for names of files.
        further: Whether only --help-all shows it, and --help does not.
        least: The least number that it takes, where one is refused before a model is loaded.
        most: The largest such number.
    """
    words = spelling.split(" ")
    flags = [word for word in words if word.startswith("-")]
    name = flags[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(
        *flags,
        help=help,
        rich_help_panel=f"{panel}{FURTHER}" if further else panel,
        envvar=f"EDGEDEC_{name}" if flags[0] in _WITH_VARIABLE.split() else None,
        show_envvar=False,
        metavar=" ".join(words[len(flags) :]) or None,
        autocompletion=complete,
        min=least,
        max=most,
        readable=False,  # a path that can't be read is a StorageError where it is read, not a usage error
    )


def flag(spelling: str, help: str, default: Any = None, **how: Any) -> Any:
    """Declare an option as a field of a dataclass, or as the default of a parameter of a command, with its default.

    The rest is as for option().
    """
    return field(default=default, metadata={OPTION: option(spelling, help, **how)})


def argument(name: str, help: str, *, complete: completion.Complete | None = None, **checks: Any) -> Any:
    """Declare an argument: its name in the help, a sentence, and what Tab offers; `checks` are typer's own."""
    return typer.Argument(metavar=name, help=help, show_default=False, autocompletion=complete, **checks)


model_option = partial(option, panel=_MODEL)
prompt_option = partial(option, panel=_PROMPT)
output_option = partial(option, panel=_OUTPUT)
model_flag = partial(flag, panel=_MODEL)
prompt_flag = partial(flag, panel=_PROMPT)
output_flag = partial(flag, panel=_OUTPUT)
sampling_flag = partial(flag, panel="Sampling")
server_flag = partial(flag, panel="Server")
export_flag = partial(flag, panel="Export")
training_flag = partial(flag, panel="Training")
bench_flag = partial(flag, panel="Benchmark")
eval_flag = partial(flag, panel="Evaluation")
tuning_flag = partial(flag, panel="Search")

"""The program `edgedec`: its commands put together, and how one of them runs."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, get_args, get_type_hints

import typer

import edgedec
from edgedec_apps.cli.commands import ALIASES, SUMMARIES
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.help_text import FURTHER, OPTION, Command, Group, show_all

_INTERRUPTED_BY_TYPER = of_signal(2)
_PURPOSE = "Run language models on your own machine: the same text, sooner, within the memory you allow."


@cache
def _build_command(name: str) -> Any:
    """Import the file of a command and return typer's command, or group of commands."""
    module = import_module(f"edgedec_apps.cli.commands.{ALIASES.get(name, name).replace('-', '_')}")
    functions = module.command if isinstance(module.command, dict) else {name: module.command}
    part = typer.Typer(name=name, cls=Group, help=SUMMARIES.get(name), rich_markup_mode=None, add_completion=False)
    for each, function in functions.items():
        text = f"The same as {ALIASES[each]}." if each in ALIASES else None
        part.command(each, cls=Command, hidden=each in ALIASES, help=text)(flattened(function))
    return typer.main.get_command(part)


class _Commands(Mapping[str, Any]):
    """All commands by name. A command is imported when it is asked for, so that `edgedec --help` imports none."""

    def __getitem__(self, name: str) -> Any:
        if name not in SUMMARIES | ALIASES:
            raise KeyError(name)
        return _build_command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES | ALIASES)

    def __len__(self) -> int:
        return len(SUMMARIES | ALIASES)


class _Program(Group):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]  # it is only read

    def summaries(self) -> list[tuple[str, str]]:
        """Return the name and the first line of help of each command, without importing it."""
        return list(SUMMARIES.items())


app = typer.Typer(
    name="edgedec",
    cls=_Program,
    help=_PURPOSE,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True, help=_PURPOSE)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Print the version or the help where no command is given."""
    if version:
        print(edgedec.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_app() -> int:
    """Run the command that the command line names, and return its exit code; errors are raised.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the command.
        EdgedecError: The command failed.
    """
    code = app(prog_name="edgedec", standalone_mode=False)
    if code == _INTERRUPTED_BY_TYPER:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all options and exit.")
    ],
)


def is_further(hint: Any) -> bool:
    """Return whether an option, by its annotation, is one that only --help-all shows."""
    return any(str(getattr(one, "rich_help_panel", "")).endswith(FURTHER) for one in get_args(hint)[1:])


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with each dataclass parameter replaced by the options that its fields declare, for typer."""

    def run(**values: Any) -> None:
        values.pop(_HELP_ALL.name, None)
        _build(command, values)

    parameters = list(_parameters(command))
    if any(is_further(parameter.annotation) for parameter in parameters):
        parameters.append(_HELP_ALL)
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function or dataclass; those of a dataclass in the place of a parameter of its type."""
    hints = get_type_hints(function, include_extras=True)
    declared = {each.name: each for each in fields(function)} if is_dataclass(function) else {}
    for parameter in inspect.signature(function).parameters.values():
        hint, default = hints[parameter.name], parameter.default
        flag = default if isinstance(default, Field) else declared.get(parameter.name)
        option = None if flag is None else flag.metadata.get(OPTION)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _parameters(hint)
        else:
            annotation = hint if option is None else Annotated[hint, option]
            default = default.default if isinstance(default, Field) else default
            yield parameter.replace(annotation=annotation, default=default, kind=inspect.Parameter.KEYWORD_ONLY)


def _build(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function or dataclass with the values that `_parameters` names."""
    hints, arguments = get_type_hints(function), dict[str, Any]()
    for name in inspect.signature(function).parameters:
        hint = hints[name]
        arguments[name] = _build(hint, values) if isinstance(hint, type) and is_dataclass(hint) else values[name]
    return function(**arguments)

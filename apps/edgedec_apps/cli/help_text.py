"""The text of --help: plain, with the options in groups. No library for styled text is imported, so that it is fast."""

import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

Rows = list[tuple[str, str]]
FURTHER = ", further"
"""What ends the title of a group of options that only --help-all shows."""
OPTION = "option"
"""The key of an option among the metadata of a dataclass's field."""
_OTHER = "Options"
_LEAST_COLUMNS = 52  # typer lays the help out for at least so many, and overruns a narrower terminal
_NAME_COLUMNS = 30
_ALL = "edgedec.help_all"
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # stands for "-" while lines are wrapped, so that no option is split


class _NarrowHelp:
    """Adapts the help to the terminal's width; mixed into commands and groups."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text, as wide as the terminal."""
        columns = shutil.get_terminal_size().columns
        if columns < _LEAST_COLUMNS:
            ctx.terminal_width = max(columns - 2, _NAME_COLUMNS)
        text: str = super().get_help(ctx)  # type: ignore[misc]  # typer's classes have it
        return text.replace(_HYPHEN, "-")


class Command(_NarrowHelp, TyperCommand):
    """A command whose help groups its options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name in its usage line."""
        return usage_pieces(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, group by group; further options only for --help-all."""
        shown = [(title, rows) for title, rows in groups(self, ctx) if _ALL in ctx.meta or not title.endswith(FURTHER)]
        _write_groups(formatter, shown)


class Group(_NarrowHelp, TyperGroup):
    """The whole program, or a group of commands such as `edgedec cache`; the help page lists the commands first."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the group's name in its usage line."""
        return ["COMMAND", "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        _write_groups(formatter, [("Commands", self.summaries()), *groups(self, ctx)])

    def summaries(self) -> Rows:
        """Return the name and the first line of help of each command that is not hidden."""
        return [(name, first_line(self.commands[name])) for name in visible_commands(self)]


def show_all(ctx: typer.Context, value: bool) -> None:
    """Print the help with all options, where --help-all is given, and end the command."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


def _write_groups(formatter: Any, groups: Iterable[tuple[str, Rows]]) -> None:
    """Write each group as two columns; a name that takes half of the width gets a line of its own."""
    for title, rows in groups:
        whole = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
        with formatter.section(title):
            formatter.write_dl(whole, col_max=min(_NAME_COLUMNS, formatter.width // 2 - 2))


def visible_commands(group: Any) -> list[str]:
    """Return the names of a group's commands, in their order, without hidden ones."""
    return [name for name, command in group.commands.items() if not command.hidden]


def first_line(command: Any) -> str:
    """Return the first line of a command's help."""
    return str(command.help or "").split("\n")[0].strip()


def usage_pieces(command: Any) -> list[str]:
    """Return the arguments of a command as its usage line shows them, such as MODEL [PROMPT] [OPTIONS]."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    return [*(name_of(param) if param.required else f"[{name_of(param)}]" for param in arguments), "[OPTIONS]"]


def groups(command: Any, ctx: Any) -> Iterator[tuple[str, Rows]]:
    """Yield the title of each group of a command's parameters, and its rows; the other options come last."""
    by_title: dict[str, Rows] = {}
    for param in command.get_params(ctx):
        is_argument = param.param_type_name == "argument"
        title = "Arguments" if is_argument else param_group(param)
        by_title.setdefault(title, []).append((name_of(param) if is_argument else flags_of(param), describe(param)))
    last = by_title.pop(_OTHER, None)
    yield from by_title.items()
    if last:
        yield _OTHER, last


def param_group(param: Any) -> str:
    """Return the title of the group that an option belongs to."""
    return str(getattr(param, "rich_help_panel", None) or _OTHER)


def name_of(param: Any) -> str:
    """Return the name of an argument."""
    return str(param.metavar or param.name).upper()


def flags_of(param: Any) -> str:
    """Return an option as it is typed, such as "-n, --max-tokens N" or "--[no-]mmap"."""
    flags = sorted(param.opts, key=len)
    if param.secondary_opts:
        flags = [flags[0].replace("--", "--[no-]", 1)]
    shown = ", ".join(flags)
    return shown if getattr(param, "is_flag", False) else f"{shown} {param.metavar or param.name.upper()}"


def describe(param: Any) -> str:
    """Return the help of an argument or option, with the default of an option that is a text or a number."""
    text = str(getattr(param, "help", None) or "")
    default = getattr(param, "default", None)
    shows_default = not getattr(param, "is_flag", False) and isinstance(default, str | int | float)
    return f"{text} (default: {default})" if shows_default and param.param_type_name == "option" else text

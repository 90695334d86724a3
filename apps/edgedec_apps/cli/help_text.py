"""--help: plain text, the options in groups. No library for styled text is loaded, so that it comes at once."""

import shutil
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

Rows = list[tuple[str, str]]
_OTHER = "Options"
_LEAST_COLUMNS = 52  # of typer's own layout, which writes over the edge of a terminal with fewer
_NAME_COLUMNS = 30
_HYPHEN = "\N{NON-BREAKING HYPHEN}"  # while lines are made, lest an option is broken in two


class Command(TyperCommand):
    """A command whose help groups its options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name in its usage line."""
        return usage_pieces(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, group by group."""
        for title, rows in groups(self, ctx):
            with formatter.section(title):
                write_rows(formatter, rows)

    def get_help(self, ctx: Any) -> str:
        """Return the help, as wide as the terminal."""
        return str(super().get_help(fitted(ctx))).replace(_HYPHEN, "-")


class Group(TyperGroup):
    """The program itself, whose help lists the commands first."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the program's name in its usage line."""
        return ["COMMAND", "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and the options."""
        rows = [(name, first_line(self.commands[name])) for name in visible_commands(self)]
        for title, content in [("Commands", rows), *groups(self, ctx)]:
            with formatter.section(title):
                write_rows(formatter, content)

    def get_help(self, ctx: Any) -> str:
        """Return the help, as wide as the terminal."""
        return str(super().get_help(fitted(ctx))).replace(_HYPHEN, "-")


def fitted(ctx: Any) -> Any:
    """Return the context, told of a terminal that is narrower than typer takes it to be."""
    columns = shutil.get_terminal_size().columns
    if columns < _LEAST_COLUMNS:
        ctx.terminal_width = max(columns - 2, _NAME_COLUMNS)
    return ctx


def write_rows(formatter: Any, rows: Rows) -> None:
    """Write names and what they mean in two columns; a name that takes half of the width has a line of its own."""
    whole = [(name, text.replace("-", _HYPHEN)) for name, text in rows]
    formatter.write_dl(whole, col_max=min(_NAME_COLUMNS, formatter.width // 2 - 2))


def visible_commands(group: Any) -> list[str]:
    """Return the names of the commands that are shown, in their order."""
    return [name for name, command in group.commands.items() if not command.hidden]


def first_line(command: Any) -> str:
    """Return a command's help in one line."""
    return str(command.help or "").split("\n")[0].strip()


def usage_pieces(command: Any) -> list[str]:
    """Return the usage of a command: MODEL [PROMPT] [OPTIONS]."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    return [*(name_of(param) if param.required else f"[{name_of(param)}]" for param in arguments), "[OPTIONS]"]


def groups(command: Any, ctx: Any) -> Iterator[tuple[str, Rows]]:
    """Yield the groups of a command's parameters: title, and a row for each."""
    found: dict[str, Rows] = {}
    for param in command.get_params(ctx):
        is_argument = param.param_type_name == "argument"
        title = "Arguments" if is_argument else param_group(param)
        found.setdefault(title, []).append((name_of(param) if is_argument else flags_of(param), describe(param)))
    last = found.pop(_OTHER, None)
    yield from found.items()
    if last:
        yield _OTHER, last


def param_group(param: Any) -> str:
    """Return the title of the group that an option belongs to."""
    return str(getattr(param, "rich_help_panel", None) or _OTHER)


def name_of(param: Any) -> str:
    """Return the name of an argument."""
    return str(param.metavar or param.name).upper()


def flags_of(param: Any) -> str:
    """Return an option as it is typed: "-n, --max-tokens N", "--[no-]mmap"."""
    flags = sorted(param.opts, key=len)
    if param.secondary_opts:
        flags = [flags[0].replace("--", "--[no-]", 1)]
    shown = ", ".join(flags)
    return shown if getattr(param, "is_flag", False) else f"{shown} {param.metavar or param.name.upper()}"


def describe(param: Any) -> str:
    """Return an option's help with its default, where it has one worth telling."""
    text = str(getattr(param, "help", None) or "")
    default = getattr(param, "default", None)
    told = not getattr(param, "is_flag", False) and isinstance(default, str | int | float)
    return f"{text} (default: {default})" if told and param.param_type_name == "option" else text

"""edgedec uninstall: list what edgedec keeps on this machine, delete it if asked to, say how to remove the program."""

import os
import shlex
import sys
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

import typer

from edgedec.errors import RequestError
from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.declared import flag
from edgedec_apps.cli.options import AsJson
from edgedec_apps.cli.shown.terminal import neutral, one_line, say, write_json, write_line

if TYPE_CHECKING:
    from edgedec_apps.leftovers import Leftover

_PROGRAM = "edgedec-llm"
_deleting = partial(flag, panel="Deleting")


def command(
    *,
    delete: bool = _deleting("--delete", "Delete what is listed, after a question.", False),
    keep_models: bool = _deleting("--keep-models", "Models and draft heads are not deleted.", False),
    yes: bool = _deleting("--yes -y", "Delete without a question.", False),
    as_json: AsJson = False,
) -> None:
    """Show what edgedec keeps on this machine, delete it if asked to, and say how to remove the program.

    The program itself is removed by the tool that installed it; the last line has the command. Files to which you gave
    a path yourself (exports, trained draft heads, saved chats), models in EDGEDEC_MODELS, and Ollama's always stay.
    """
    from edgedec_apps.leftovers import HEADS, MODEL, delete_leftovers, find_leftovers

    if not delete and (keep_models or yes):
        raise RequestError(f"{'--keep-models' if keep_models else '--yes'} belongs to --delete; give --delete, too")
    leftovers = find_leftovers()
    if as_json:
        _write_document(leftovers)
    else:
        _write_report(leftovers)
    if delete:
        doomed = [each for each in leftovers if not (keep_models and each.kind in (MODEL, HEADS))]
        if doomed and not yes:
            _ask(doomed)
        say(f"{format_bytes(delete_leftovers(doomed))} freed")
    if not as_json:
        _write_ending(deleted=delete)


def _write_report(leftovers: "list[Leftover]") -> None:
    """Write a line for each thing that is kept, and the sum."""
    if not leftovers:
        write_line("edgedec keeps nothing on this machine")
        return
    for path in (path for each in leftovers for path in each.others):
        write_line(f"not edgedec's, and stays: {one_line(path)}")
    for each in leftovers:
        what = f"{each.kind} {each.name}" if each.name else each.kind
        write_line(f"{format_bytes(each.n_bytes):>9}  {one_line(what)}  {one_line(each.path)}")
    write_line(f"{format_bytes(sum(each.n_bytes for each in leftovers)):>9}  in all")


def _write_document(leftovers: "list[Leftover]") -> None:
    remaining = [
        {"kind": each.kind, "name": each.name, "path": os.fspath(each.path), "size_bytes": each.n_bytes}
        | ({"stays": list(map(os.fspath, each.others))} if each.others else {})
        for each in leftovers
    ]
    write_json({"kept": remaining, "remove_program": removal_command()})


def _write_ending(*, deleted: bool) -> None:
    """Write what stays in any case, and how to go on."""
    from edgedec_apps.leftovers import completion_files
    from edgedec_models.folders import own_folder

    if folder := own_folder():
        write_line(f"your own folder of models stays: {one_line(folder)}")
    for path in completion_files():
        write_line(
            f"tab completion stays: {one_line(path)}; delete it, and the line of your shell's file that names it"
        )
    if not deleted:
        write_line("edgedec uninstall --delete deletes what is listed; --keep-models spares models and draft heads")
    write_line(f"to remove the program: {removal_command()}")


def _ask(doomed: "list[Leftover]") -> None:
    """Ask whether to delete.

    Raises:
        RequestError: Nobody is there to ask.
        typer.Exit: The answer is not yes.
    """
    n_bytes = format_bytes(sum(each.n_bytes for each in doomed))
    if not sys.stdin.isatty():
        raise RequestError(f"nobody can be asked whether to delete {n_bytes}; add --yes")
    print(neutral(f"Delete {n_bytes}? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        say("nothing was deleted")
        raise typer.Exit(0)


def removal_command() -> str:
    """Return the command that removes the program, for the tool that installed it."""
    if getattr(sys, "frozen", False):
        return f"delete {os.path.dirname(sys.executable)}"
    parts = sys.prefix.replace("\\", "/").split("/")
    if "pipx" in parts:
        return f"pipx uninstall {_PROGRAM}"
    if "uv" in parts and "tools" in parts:
        return f"uv tool uninstall {_PROGRAM}"
    if installer() == "uv":
        return shlex.join(["uv", "pip", "uninstall", "--python", sys.executable, _PROGRAM])
    return shlex.join([sys.executable, "-m", "pip", "uninstall", _PROGRAM])


def installer() -> str:
    """Return the name of the tool that installed the program; "" where that is unknown."""
    try:
        return (metadata.distribution(_PROGRAM).read_text("INSTALLER") or "").strip()
    except metadata.PackageNotFoundError:
        return ""

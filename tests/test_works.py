"""What works is still there: tests/works.toml is walked, and has each thing that a person or a program can ask for."""

import ast
import importlib
import os
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.routing import Route

from edgedec import plugins
from edgedec.errors import EdgedecError
from edgedec_apps.cli.app import app
from edgedec_apps.cli.commands import ALIASES, SUMMARIES
from edgedec_apps.server.app import build_app

ROOT = Path(__file__).parent.parent
METHODS = "edgedec_methods."

Row = dict[str, Any]


@cache
def works() -> dict[str, dict[str, Row]]:
    """Return the table: by kind and name the row of each thing."""
    table = tomllib.loads((ROOT / "tests" / "works.toml").read_text(encoding="utf-8"))
    return {
        kind: {name: row if isinstance(row, dict) else {"test": row} for name, row in rows.items()}
        for kind, rows in table.items()
    }


@cache
def installed() -> dict[str, list[plugins.Plugin]]:
    """Return edgedec's own plug-ins by name, those of all groups."""
    by_name: dict[str, list[plugins.Plugin]] = {}
    for kind in plugins.KINDS:
        for name, plugin in plugins.plugins(kind).items():
            if plugin.package == plugins.DISTRIBUTION:
                by_name.setdefault(name, []).append(plugin)
    return by_name


@cache
def endpoints() -> frozenset[str]:
    """Return what the server answers: the methods and the path of each, those apart that have no /v1, or it twice."""
    routes = [route for route in build_app(cast(Any, None)).routes if isinstance(route, Route)]
    paths = {route.path for route in routes}
    return frozenset(
        f"{method} {route.path}"
        for route in routes
        for method in (route.methods or {"GET"}) - {"HEAD"}
        if not route.path.startswith("/v1/v1/") and (route.path.startswith("/v1/") or f"/v1{route.path}" not in paths)
    )


def called(*arguments: str) -> None:
    """Run the command line in this process."""
    app(list(arguments), prog_name="edgedec", standalone_mode=False)


def guests() -> set[str]:
    """Return the modules that stand for a method: docs/methods.md has a row for each."""
    folder = ROOT / "methods" / "edgedec_methods"
    texts = {
        path.relative_to(folder).with_suffix(""): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")
    }
    return {".".join(path.parts) for path, text in texts.items() if path.name != "__init__" and "\nStatus: " in text}


def answers_help(name: str, row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """A command says how it is used."""
    called(name, "--help")
    assert f"edgedec {name}" in capsys.readouterr().out.splitlines()[0]


def is_answered(name: str, row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """The server has the endpoint."""
    assert name in endpoints()


def opens(name: str, row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """A plug-in of this name is imported."""
    for plugin in installed()[name]:
        plugin.load()


def is_chosen(name: str, row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """A method's module has a plug-in of each name by which it is chosen, or what a program imports of it."""
    module = importlib.import_module(row.get("module", METHODS + name))
    for chosen in row.get("plugins", ()):
        of_it = [each for each in installed()[chosen] if each.target.startswith(f"{METHODS}{name}:")]
        assert of_it, chosen
        assert all(each.load() is not None for each in of_it)
    assert all(callable(getattr(module, imported)) for imported in row.get("imports", ()))
    assert row.keys() & {"plugins", "imports"}


def lacks_only_its_model(name: str, row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    """The command takes the arguments, and looks for the model."""
    stands_for = {"MODEL": "./no-such-model.gguf", "PICTURE": str(ROOT / "docs" / "page.png")}
    arguments = [stands_for.get(each, each) for each in row["arguments"]]
    with Path(os.devnull).open(encoding="utf-8") as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", nothing)
        with pytest.raises(EdgedecError, match=r"no-such-model\.gguf"):
            called(*arguments)


WALKS: dict[str, Callable[[str, Row, pytest.CaptureFixture[str]], None]] = {
    "commands": answers_help,
    "endpoints": is_answered,
    "runtimes": opens,
    "drafters": opens,
    "architectures": opens,
    "methods": is_chosen,
    "other-plugins": opens,
    "arguments": lacks_only_its_model,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WALKS)
def test_what_worked_is_there(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each thing answers, opens or is taken, and the test that its row names is there."""
    for name, row in works()[kind].items():
        WALKS[kind](name, row, capsys)
        file, _, function = row["test"].partition("::")
        assert (ROOT / file).is_file(), f"{kind} {name}: {file}"
        assert not function or function in functions(file), f"{kind} {name}: {row['test']}"


@cache
def functions(file: str) -> frozenset[str]:
    """Return the names of a file's test functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.skipif(not (ROOT / "methods").is_dir(), reason="the sources are not beside the tests")
def test_the_table_has_everything() -> None:
    """Nothing that can be asked for is without a row, and no row is of a kind that is not walked."""
    table = works()
    assert list(table) == list(WALKS)
    assert set(table["commands"]) == {*SUMMARIES, *ALIASES}
    assert set(table["endpoints"]) == endpoints()
    assert {name for name, row in table["methods"].items() if "module" not in row} == guests()
    chosen = {name for row in table["methods"].values() for name in row.get("plugins", ())}
    listed = {name for kind, walk in WALKS.items() if walk is opens for name in table[kind]}
    assert chosen | listed == installed().keys()

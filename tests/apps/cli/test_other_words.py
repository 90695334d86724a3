"""Words of llama.cpp and ollama: the error names edgedec's, which exists."""

import json

import pytest
import typer
from support.processes.command_line import run_here

from edgedec_apps.cli.app import app
from edgedec_apps.cli.commands import SUMMARIES
from edgedec_apps.cli.other_words import COMMANDS, OPTIONS


def test_what_is_named_exists() -> None:
    """Each option is one of run or serve, and each command is one; none of their commands is one of ours."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    known = {flag for name in ("run", "serve") for each in commands[name].params for flag in each.opts}
    options = {own.split()[0] for own in OPTIONS.values() if own.startswith("--")}
    assert options - {flag for each in commands["run"].params for flag in each.secondary_opts} <= known
    assert {own.removeprefix("edgedec ") for own in OPTIONS.values() if own.startswith("edgedec ")} <= set(SUMMARIES)
    assert {own for own in COMMANDS.values() if not own.startswith("--")} <= set(SUMMARIES)
    assert set(COMMANDS).isdisjoint(SUMMARIES)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("run", "x", "hi", "--temp", "0"), "No such option: --temp; for --temp write --temperature"),
        (("run", "x", "hi", "--ctx-size=8"), "for --ctx-size write --context"),
        (("run", "-m", "x", "-p", "hi"), "for -m write the model's name as the first argument"),
        (("run", "x", "hi", "-ngl", "99"), "for -ngl write --gpu-layers"),
        (("serve", "x", "--n-predict", "9"), "for --n-predict write --max-tokens"),
        (("llama-server", "x"), "for llama-server write edgedec serve"),
        (("help",), "for help write edgedec --help"),
        (("run", "x", "--zzzzzz"), "No such option: --zzzzzz (see edgedec run --help)"),
        (("run", "x", "--temprature", "0"), "No such option: --temprature; did you mean --temperature or"),
        (("rnu",), "No such command 'rnu'; did you mean run? (see edgedec --help)"),
        (("cache", "verfy"), "No such command 'verfy'; did you mean verify? (see edgedec cache --help)"),
    ],
)
def test_the_error_names_our_word(args: tuple[str, ...], words: str) -> None:
    """A usage error, and nothing is loaded."""
    run_here(*args).failed(2, words)


@pytest.mark.slow
def test_ls_lists() -> None:
    """It is another name of list."""
    assert "The same as list." in run_here("ls", "--help").text
    found = [json.loads(run_here(name, "--json").out)["to_pull"] for name in ("ls", "list")]
    names, expected = ([each["name"] for each in models] for models in found)
    assert names == expected != []

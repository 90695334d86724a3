"""What holds for all commands: which options have a variable, --help and --help-all, and docs/cli.md is current."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec_apps.cli.app import app
from edgedec_apps.cli.commands import SUMMARIES
from edgedec_apps.cli.reference import reference

TESTS = Path(__file__).parents[2]
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
_ROOT: Any = typer.main.get_command(app)


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the object of every command, hidden ones and those of groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(_ROOT))


def options(command: Any) -> list[Any]:
    """Return the options of a command, without --help."""
    return [param for param in command.params if param.param_type_name == "option"]


def test_the_commands_are_found() -> None:
    """The walk below sees the commands, or it would pass for nothing."""
    found = {words[0] for words in COMMANDS}
    assert found >= {"run", "chat", "pull", "list", "rm", "info", "show", "doctor"}
    assert len(options(COMMANDS["run",])) > 30


def test_twelve_options_have_an_environment_variable() -> None:
    """The variable is EDGEDEC_ and the option's long name; docs/cli.md names each of them."""
    found = set()
    for option in (option for command in COMMANDS.values() for option in options(command)):
        assert option.help
        if option.envvar is not None:
            long_name = next(flag for flag in option.opts if flag.startswith("--"))
            assert option.envvar == "EDGEDEC_" + long_name.removeprefix("--").replace("-", "_").upper()
            found.add(option.envvar)
    assert len(found) == 12
    assert all(f"`{variable}`" in reference() for variable in found)


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_variable_is_read(words: tuple[str, ...]) -> None:
    """A variable that holds no value of an option's type is a usage error that names the option."""
    command = COMMANDS[words]
    arguments = ["x" for param in command.params if param.param_type_name == "argument" and param.required]
    for option in options(command):
        if option.envvar and (option.is_flag or option.metavar in ("N", "X")):  # those of numbers, whole and others
            run_here(*words, *arguments, env={option.envvar: "what?"}).failed(2, max(option.opts, key=len))


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_help_names_every_option(words: tuple[str, ...]) -> None:
    """-h and --help print the same to standard output; with --help-all, every option is in it."""
    result = run_here(*words, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.text == run_here(*words, "-h").text
    all_options = options(COMMANDS[words]) if words else []
    if "--help-all" in result.text:
        result = run_here(*words, "--help-all")
        assert (result.code, result.err) == (0, "")
    shown = result.text.replace("--[no-]", "--")
    for option in all_options:
        assert max(option.opts, key=len) in shown


def test_the_help_of_run_is_short() -> None:
    """It has at most 20 options, and with --help-all at most 40; those that it leaves out work as all others do."""
    shown = run_here("run", "--help").text.replace("--[no-]", "--")
    found = [option for option in options(COMMANDS["run",]) if f" {max(option.opts, key=len)} " in shown]
    assert len([option for option in found if option.name != "help_all"]) <= 20
    assert len(options(COMMANDS["run",])) <= 40
    assert "--temperature" in shown
    assert "--min-p" not in shown
    run_here("run", "m", "x", "--min-p", "high").failed(2, "--min-p")


def test_the_summaries_are_the_commands_own() -> None:
    """The program's help imports no command, and shows the first line of each command's own help."""
    shown = {name: str(_ROOT.commands[name].help).split("\n")[0] for name in SUMMARIES}
    assert shown == SUMMARIES


@pytest.mark.slow
def test_help_is_fast() -> None:
    """Neither numpy nor the engine is imported for --help; for that of the program, no command either."""
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.processes.command_line import run_here
for words in {[(), *COMMANDS]!r}:
    slow = {{"numpy", "edgedec.api.engine", "edgedec.model"}} | (set() if words else {{"edgedec_apps.cli.options"}})
    result = run_here(*words, "--help")
    print(words, result.code, "edgedec_apps.cli.app" in sys.modules, *(slow & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{words} 0 True" for words in ((), *COMMANDS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("plan",), ("info",), ("run", "Hi", "-n", "1", "-q"), ("chat",)], ids=lambda it: it[0]
)
def test_a_start_imports_nothing_that_it_does_not_need(words: tuple[str, ...], tmp_path: Path) -> None:
    """A command with a model that is here fetches nothing, draws nothing and edits no line where no terminal is."""
    model = tiny_llama(tmp_path / "tiny.gguf", chat_template="{{ messages[0].content }}")
    heavy = {"httpx", "rich", "prompt_toolkit", "onnx", "torch"}
    code = f"""
import sys
from edgedec_apps.cli import main
try:
    main()
finally:
    print("heavy:", *({heavy} & sys.modules.keys()), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, words[0], str(model), *words[1:]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "heavy:"


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside the tests")
def test_the_command_reference_is_up_to_date() -> None:
    """docs/cli.md equals what `python -m edgedec_apps.cli.reference` prints."""
    assert PAGE.read_text(encoding="utf-8") == reference()

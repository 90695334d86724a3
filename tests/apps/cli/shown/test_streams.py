"""Real pipes: readers that go away, streams that are closed or full, and encodings that lack characters."""

import json
import os
from pathlib import Path

import pytest
from support.processes.command_line import ENDLESS, SAY_WORD, finish, run_process, run_shell, start, teach_word

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="sh and POSIX pipes")]

WORD = "🙂é▒"


@pytest.fixture(scope="module")
def smiling(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says nothing but 🙂é▒."""
    return teach_word(tmp_path_factory.mktemp("words") / "smiling.gguf", model, WORD)


def test_a_reader_that_goes_away_ends_the_generation_quietly(model: Path) -> None:
    """An endless text shows its beginning; when its reader closes the pipe, the command ends with 0, without a word."""
    process = start("run", model, "Hello", *ENDLESS, "-q")
    assert process.stdout is not None
    assert len(os.read(process.stdout.fileno(), 5)) > 0
    process.stdout.close()
    process.stdout = None
    result = finish(process)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("args", [("--help",), ("list",), ("run", "--help")])
def test_a_reader_that_never_reads(args: tuple[str, ...]) -> None:
    """Commands whose reader is gone before they write end with 0 and say nothing."""
    result = run_shell('{ exec 3>&2; { "$@" 2>&3 3>&-; echo "code $?" >&3; } | true; } 2>&1 >/dev/null', *args)
    assert result.text == "code 0\n"


@pytest.mark.parametrize(
    ("redirection", "code", "out", "err"),
    [
        (">&-", 0, "", "2 tokens"),
        ("2>&-", 0, f"{WORD * 2}\n", ""),
        (">&- 2>&-", 0, "", ""),
        ("2>/dev/full", 0, f"{WORD * 2}\n", ""),
        (">/dev/full", 60, "", "standard output: No space left"),
    ],
)
def test_closed_and_full_streams(smiling: Path, redirection: str, code: int, out: str, err: str) -> None:
    """A stream closed from the start takes nothing and hurts nobody; a full one is a StorageError."""
    if "/dev/full" in redirection and not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    result = run_shell(f'"$@" {redirection}', "run", smiling, "Hello", "-n", "2", *SAY_WORD)
    assert (result.code, result.text) == (code, out), result
    assert err in result.err
    assert bool(result.err) == bool(err)
    assert "Traceback" not in result.err
    assert "Exception ignored" not in result.err


def test_closed_standard_input_is_an_empty_prompt(model: Path) -> None:
    """A standard input closed from the start holds no prompt."""
    run_shell('"$@" <&-', "run", model).failed(40, "empty")


def test_files_do_not_take_the_place_of_closed_streams(smiling: Path, tmp_path: Path) -> None:
    """With standard output closed, no file that is opened gets its number: the JSON file holds the object only."""
    file = tmp_path / "a.json"
    result = run_shell('"$@" >&- <&-', "run", smiling, "Hello", "-n", "2", "--json-out", file, *SAY_WORD)
    assert result.code == 0
    assert json.loads(file.read_text())["text"] == WORD * 2


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"PYTHONIOENCODING": "cp1252"}, f"{WORD * 2}\n".encode("cp1252", "replace")),
        ({"PYTHONIOENCODING": "ascii"}, b"??????\n"),
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, f"{WORD * 2}\n".encode()),
    ],
)
def test_encodings_that_lack_characters(smiling: Path, env: dict[str, str], expected: bytes) -> None:
    """cp1252 and ASCII get replacements for what they lack; without a say in it, pipes get UTF-8 in any locale."""
    result = run_process("run", smiling, "Grüße 🙂", "-n", "2", *SAY_WORD, env=env)
    assert (result.code, result.out) == (0, expected), result
    assert "Traceback" not in result.err


def test_json_is_whole_in_every_encoding(smiling: Path) -> None:
    """The JSON object is ASCII, so that a console's encoding takes nothing away."""
    env = {"PYTHONIOENCODING": "cp1252"}
    result = run_process("run", smiling, "Grüße 🙂", "-n", "2", "--json", *SAY_WORD, env=env)
    assert json.loads(result.out)["text"] == WORD * 2


@pytest.mark.parametrize("word", ["\x1b[2J[b]\x07\r", "\u202eabc\u2066", "[bold]x[/"])
def test_pipes_get_the_text_as_it_is(model: Path, tmp_path: Path, word: str) -> None:
    """Escape sequences, direction overrides and markup reach a pipe unchanged, and a file too."""
    speaker = teach_word(tmp_path / "m.gguf", model, word)
    assert run_process("run", speaker, "Hello", "-n", "2", "-q", *SAY_WORD).out == f"{word * 2}\n".encode()

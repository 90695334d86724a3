"""At a terminal: nothing that a model or a file says moves the cursor, and Ctrl-C leaves everything as it was."""

import os
import signal
from pathlib import Path

import pytest
from support.processes.command_line import (
    ENDLESS,
    SAY_WORD,
    TOO_LONG,
    Terminal,
    rename_model,
    run_here,
    teach_word,
    wait_for_reader,
)

pytest.importorskip("termios", reason="no terminals of POSIX here")

pytestmark = pytest.mark.slow

# Its threads wait for each other in a loop: on a busy machine for seconds.
LLAMACPP = ("--runtime", "llamacpp", "--threads", "1")


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("\x1b[2J[b]\x07\r", "␛[2J[b]␇␍"),
        ("\u202eabc\u2066", "\ufffdabc\ufffd"),
        ("[bold]x[/", "[bold]x[/"),
        ("a\x9b31m\x7fbc", "a\ufffd31m␡bc"),
    ],
)
def test_text_of_a_model_cannot_control_the_terminal(model: Path, tmp_path: Path, word: str, shown: str) -> None:
    """Escape sequences, C1 controls and direction overrides are made visible; markup is text."""
    speaker = teach_word(tmp_path / "m.gguf", model, word)
    with Terminal("run", speaker, "Hello", "-n", "2", *SAY_WORD, in_no_time=True) as person:
        assert person.end() == 0
    assert person.shown.decode().startswith(f"{shown * 2}\r\n\r\nfirst token ")
    assert b"\x1b[2J" not in person.shown


def test_names_in_files_cannot_control_the_terminal(model: Path, tmp_path: Path) -> None:
    """The name in a model's metadata and a file's own name are shown without their control characters."""
    odd = tmp_path / "a\x1b[2Jb\nc[bold].gguf"
    try:
        rename_model(odd, model, "x\x1b[31m[b]\u202e")
    except OSError as error:
        pytest.skip(f"this file system has no such names: {error}")
    with Terminal("info", odd) as person:
        assert person.end() == 0
    assert b"\x1b[31m[b]" not in person.shown
    assert "a␛[2Jb␊c[bold].gguf" in "".join(person.shown.decode().split())  # a long path takes two lines
    with Terminal("run", odd, "x" * 3000) as person:
        assert person.end() == 41
    with Terminal("list", env={"EDGEDEC_MODELS": str(tmp_path)}) as person:
        assert person.end() == 0
    assert "a␛[2Jb␊c[bold]" in person.shown.decode()
    with Terminal("run", tmp_path / "no\x1b[2J", "hi") as person:
        assert person.end() == 11
    with Terminal("chat", odd, "-n", "1") as person:
        person.expect(">>>")
        person.send("\x04")
        assert person.end() == 0
    assert "c[bold].gguf · 2048 tokens" in person.shown.decode()


def test_the_runtimes_log_cannot_control_the_terminal(model: Path, tmp_path: Path) -> None:
    """llama.cpp logs a model's metadata; with -v it is shown without control characters."""
    odd = rename_model(tmp_path / "m.gguf", model, "x\x1b[31m[b]\u202e")
    with Terminal("run", odd, "Hello", "-n", "1", "-t", "0", "-v", *LLAMACPP) as person:
        assert person.end() == 0
    assert "x␛[31m[b]\ufffd" in person.shown.decode()
    assert b"\x1b[31m" not in person.shown


def test_ctrl_c_leaves_the_terminal_as_it_was(model: Path) -> None:
    """Ctrl-C typed during the generation ends it with a summary; the terminal's settings are as before."""
    with Terminal("run", model, "Hello", *ENDLESS) as person:
        person.expect("\r\n")
        person.send("\x03")
        assert (person.end(), person.settings()) == (130, person.before)
    assert person.cursor_shown
    assert "(cancelled)" in person.shown.decode()
    assert person.shown.endswith(b"edgedec: interrupted\r\n")


def test_a_second_ctrl_c_leaves_the_terminal_as_it_was(model: Path, tmp_path: Path) -> None:
    """Ctrl-C typed again, where the work hangs, ends at once; the terminal's settings are as before."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with Terminal("run", model, "Hello", "--chat-template", fifo) as person:
        other_end = wait_for_reader(fifo)
        person.send("\x03", "edgedec: stopping; Ctrl-C again ends at once")
        person.send("\x03")
        assert person.end() == 130
        os.close(other_end)
        assert person.settings() == person.before
    assert person.cursor_shown


def test_a_long_prefill_shows_progress_that_ctrl_c_clears(model: Path) -> None:
    """While a long prompt is evaluated a bar tells how far it is; Ctrl-C takes it away and shows the cursor again."""
    with Terminal("run", model, "-f", "-", *ENDLESS, *LLAMACPP, "--draft", "off") as person:
        for _ in range(800):
            person.send("x" * 70 + "\n")
        person.send("\x04", "prefill", "tokens")
        person.send("\x03")
        assert (person.end(), person.settings()) == (130, person.before)
    assert person.cursor_shown
    summary = f"0 tokens (cancelled) · {TOO_LONG}"
    assert person.shown.endswith(f"{summary}\r\nedgedec: interrupted\r\n".encode())


def test_a_quick_load_shows_no_progress(model: Path) -> None:
    """What is loaded in no time flickers no bar: the text is the first thing that is shown."""
    with Terminal("run", model, "Hello", "-n", "1", "-t", "0", *LLAMACPP, in_no_time=True) as person:
        assert person.end() == 0
    assert b"\x1b[" not in person.shown


def test_help_and_reports_fit_a_narrow_terminal(model: Path) -> None:
    """At 60 columns no line of a report is longer, but for single words that are."""
    for args in (("info", model), ("doctor", "--all")):
        with Terminal(*args, env={"COLUMNS": "60"}) as person:
            assert person.end() == 0
        lines = person.shown.decode().splitlines()
        assert len(lines) > 10
        for line in lines:
            assert len(line) <= 60 or max(len(word) for word in line.split()) > 30, line


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_fits_the_terminal(columns: int) -> None:
    """No line is longer, and no option or address is cut in two."""
    for command in ((), ("run",), ("bench",), ("serve",), ("export",), ("cache", "list")):
        text = run_here(*command, "--help", env={"COLUMNS": str(columns)}).text
        lines = text.splitlines()
        assert len(lines) > 5
        assert max(map(len, lines)) <= min(columns, 100) - 2
        assert not [line for line in lines if line.endswith("-")]
        assert text.isascii()


def test_a_plan_fits_80_columns(model: Path) -> None:
    """The table of its terms and all below, in a process of its own, whose memory the plan counts."""
    with Terminal("plan", model, "--memory", "1GB", *("--runtime", "cpu"), env={"COLUMNS": "80"}) as person:
        assert person.end() == 0
    lines = person.shown.decode().splitlines()
    assert len(lines) > 15
    assert max(map(len, lines)) <= 80


def test_chat_at_a_terminal(model: Path) -> None:
    """A conversation: answers, every command, lines held together, Ctrl-C at the prompt, Ctrl-D."""
    with Terminal("chat", model, "-n", "4", "-t", "0", "--method=ignore-end", "--system", "Be kind.") as person:
        person.expect("2048 tokens of context", ">>>")
        person.send("Hello\n", "4 tokens (length)", ">>>")
        person.send("/regen\n", "4 tokens (length)")
        person.send('"""one\n', "...")
        person.send('two"""\n', "reused", ">>>")
        person.send("/stats\n", "prompt: ", ">>>")
        person.send("/system Be a pirate.\n", "system message: Be a pirate.")
        person.send("/regen\n", "nothing to answer again")
        person.send("/clear\n", "forgotten")
        person.send("/help\n", "/bye")
        person.send("/nonsense\n", "no such command: /nonsense", ">>>")
        person.send("half a line", "half a line")
        person.settle()
        person.send("\x03", "Ctrl-D or /bye leaves", ">>>")
        person.send("x" * 3000 + "\n", "horten it", ">>>")
        person.send("Hello again\n", "4 tokens (length)", ">>>")
        person.send("\x04")
        assert (person.end(), person.settings()) == (0, person.before)


def test_a_paste_of_several_lines_is_one_message(model: Path) -> None:
    """What the terminal brackets as a paste is sent as a whole, with Enter; so are lines that Alt-Enter begins."""
    with Terminal("chat", model, *ENDLESS[2:], "-n", "2") as person:
        for keys in ("\x1b[200~one\r\n\r\ntwo\x1b[201~\r", "one\x1b\r\x1b\rtwo\r"):
            person.expect(">>>")
            person.send(keys, "2 tokens (length)", ">>>")
            person.send("/stats\r", f"prompt: {1 + len('<user>one__two</><assistant>')} tokens", ">>>")
            person.send("/clear\r", "forgotten")
        person.send("/bye\r")
        assert (person.end(), person.settings()) == (0, person.before)


def test_what_was_typed_comes_back_at_the_next_start(model: Path, cache: Path) -> None:
    """The arrow up finds a message of an earlier chat; --no-history keeps nothing, and the file is its owner's."""
    chat = ("chat", model, "-n", "2", "-t", "0", "--method=ignore-end")
    with Terminal(*chat) as person:
        person.expect(">>>")
        person.send("an earlier message\r", "2 tokens (length)", ">>>")
        person.send("\x04")
        assert person.end() == 0
    kept = cache / "chat-history"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.read_text() == '"an earlier message"\n'
    with Terminal(*chat, "--no-history") as person:
        person.expect(">>>")
        person.send("a secret\r", "2 tokens (length)", ">>>")
        person.send("/bye\r")
        assert person.end() == 0
    assert kept.read_text() == '"an earlier message"\n'
    with Terminal(*chat) as person:
        person.expect(">>>")
        person.send("\x1b[A", "an earlier message")
        person.send("\r", "2 tokens (length)", ">>>")
        person.send("/se\ttem\t0.25\r", "(temperature: 0.25)")
        person.send("/set temperature hot\r", "--temperature is 'hot'", ">>>")
        person.send("/bye\r")
        assert person.end() == 0


def test_answers_are_shown_as_markdown(model: Path, tmp_path: Path) -> None:
    """In colours; NO_COLOR leaves them out, /set markdown off the rest, and so does a terminal that knows nothing."""
    speaker = teach_word(tmp_path / "m.gguf", model, "a **b** c")
    for env, shown, plain in (
        ({"NO_COLOR": ""}, "a \x1b[1mb\x1b[0m c", "a **b** c"),
        ({"NO_COLOR": "1"}, "a \x1b[1mb\x1b[0m c", "a **b** c"),
        ({"TERM": "dumb"}, "a **b** c", "a **b** c"),
    ):
        with Terminal("chat", speaker, "-n", "1", *SAY_WORD, env=env) as person:
            person.expect(">>>")
            person.send("Hello\n", shown, ">>>")
            person.send("/set markdown off\n", "(markdown: off)", ">>>")
            person.send("/regen\n", plain, ">>>")
            person.send("/bye\n")
            assert person.end() == 0
            assert (b"\x1b[" in person.shown) == ("TERM" not in env)


def test_ctrl_c_in_a_chat_stops_the_answer_only(model: Path, tmp_path: Path) -> None:
    """Ctrl-C during an answer stops it; the conversation goes on with what was said, and /bye leaves."""
    speaker = teach_word(tmp_path / "m.gguf", model, "and so on")
    with Terminal("chat", speaker, *ENDLESS, *SAY_WORD) as person:
        for message in ("Hello", "And then?", "/regen"):
            person.expect(">>>")
            person.send(f"{message}\n", "and so on")
            person.send("\x03", "(cancelled)")
        person.expect(">>>")
        assert b"reused" in person.shown
        person.send("/bye\n")
        assert (person.end(), person.settings()) == (0, person.before)


def test_sigterm_at_the_prompt_restores_the_terminal(model: Path) -> None:
    """SIGTERM while a person types ends the chat with 143 and the terminal's settings from before."""
    with Terminal("chat", model) as person:
        person.expect(">>>")
        person.send("half a li", "half a li")
        person.settle()
        person.process.terminate()
        assert (person.end(), person.settings()) == (143, person.before)


def test_run_without_a_prompt_becomes_a_chat(model: Path) -> None:
    """At a terminal, run without a prompt talks; --raw, which needs one, is refused."""
    with Terminal("run", model, "-n", "2") as person:
        person.expect(">>>")
        person.send("/exit\n")
        assert person.end() == 0
    with Terminal("run", model, "--raw") as person:
        assert person.end() == 40
    assert b"--raw needs a prompt" in person.shown


def test_a_chat_into_a_file_writes_answers_only(model: Path, tmp_path: Path) -> None:
    """With standard output in a file, the prompt is shown at the terminal and the file gets the answers."""
    file = tmp_path / "answers.txt"
    with (
        file.open("wb") as out,
        Terminal("chat", model, "-n", "3", "-t", "0", "--method=ignore-end", stdout=out) as person,
    ):
        person.expect(">>>")
        person.send("Hello\n", "3 tokens", ">>>")
        person.send("\x04")
        assert person.end() == 0
    assert file.read_bytes().endswith(b"\n")
    assert b">>>" not in file.read_bytes()
    assert os.path.getsize(file) > 3


def test_typing_ahead_is_not_shown_in_an_answer(model: Path, tmp_path: Path) -> None:
    """What is typed while an answer comes stands behind the next prompt, and Enter sends it."""
    speaker = teach_word(tmp_path / "m.gguf", model, "say-this-")
    with Terminal("chat", speaker, *ENDLESS[2:], *SAY_WORD, "-n", "300") as person:
        person.expect(">>>")
        person.send("Hello\r", "say-this-")
        person.send("typed ahead")
        assert b"typed" not in person.expect("300 tokens (length)")
        person.expect(">>>", "typed ahead")
        person.send("\r", "say-this-")
        person.send("\x03")
        assert b"^C" not in person.expect("(cancelled)")
        person.expect(">>>")
        person.send("/bye\r")
        assert (person.end(), person.settings()) == (0, person.before)


def test_the_terminal_shows_again_what_is_typed_after_two_interrupts(model: Path, tmp_path: Path) -> None:
    """A second Ctrl-C ends the process at once, and the settings are as before."""
    speaker = teach_word(tmp_path / "m.gguf", model, "say-this-")
    with Terminal("run", speaker, "Hello", *ENDLESS, *SAY_WORD) as person:
        person.expect("say-this-" * 3)
        assert person.settings() != person.before
        person.process.send_signal(signal.SIGINT)
        person.process.send_signal(signal.SIGINT)
        assert (person.end(), person.settings()) == (130, person.before)

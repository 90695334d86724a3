"""Tools in edgedec chat: what a person sees and is asked, and what the model gets, with a real server of tools."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.models.saying_model import saying_model
from support.processes import plain_tool_server
from support.processes.command_line import Terminal, run_here

pytest.importorskip("mcp", reason="MCP's SDK is not installed")

pytestmark = pytest.mark.slow

# The prompt ends with a "?" behind a person's message, with a "=" behind what a tool answered.
TEMPLATE = (
    "{# %s #}{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}={% else %}?{% endif %}"
)
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def call(name: str, **arguments: str) -> str:
    """Return what a model writes of a call, between its marks."""
    return json.dumps({"name": name, "arguments": arguments})


def caller(path: Path, *pieces: str, then: Sequence[str] = ("Done", "."), n_ctx: int = 4096) -> Path:
    """Write a model that answers every message with these pieces, and what a tool answered with `then`."""
    template = TEMPLATE.replace("%s #", "<think> #")
    return saying_model(path, {"?": pieces, "=": then}, chat_template=template, n_ctx_train=n_ctx)


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A file that names one server of tools."""
    path = tmp_path / "mcp.json"
    entry = {"command": sys.executable, "args": [str(plain_tool_server.PATH)], "env": {"STARTED": str(tmp_path / "s")}}
    path.write_text(json.dumps({"mcpServers": {"plain": entry}}), encoding="utf-8")
    return path


def test_a_tool_runs_and_the_model_goes_on(tmp_path: Path, servers: Path) -> None:
    """Its call is no part of what is shown; /tools lists the tools, and /save and /load keep calls and answers."""
    path = caller(tmp_path / "m.gguf", "I look", OPEN, call("echo", text="x"), CLOSE)
    saved = tmp_path / "saved.json"
    lines = f"hi\n/tools\n/save {saved}\n/load {saved}\n/regen\n"
    result = run_here("chat", path, "--mcp", servers, "--allow-tools", "ec*,zz", stdin=lines.encode())
    assert (result.code, result.text) == (0, "I look\nDone.\n" * 2)
    assert result.err.count('(echo answered: echo: {"text": "x"})\n') == 2
    assert "edgedec: --allow-tools: no tool is named zz\n(9 tools; /tools lists them)\n" in result.err
    assert (
        "\necho                plain, allowed: The tool echo.\nhang                plain: The tool hang.\n"
        in result.err
    )
    asked, called, told, said = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert asked == {"role": "user", "content": "hi"}
    assert (called["content"], called["tool_calls"][0]["function"]) == (
        "I look",
        {"name": "echo", "arguments": {"text": "x"}},
    )
    assert told["tool_call_id"] == called["tool_calls"][0]["id"]
    assert (told["role"], told["content"], said["content"]) == ("tool", 'echo: {"text": "x"}', "Done.")


def test_nothing_runs_from_a_pipe_that_is_not_allowed(tmp_path: Path, servers: Path) -> None:
    """It is said, and the model is told; a tool that there is not is no question."""
    path = caller(tmp_path / "m.gguf", OPEN, f"[{call('die')}, {call('rm', path='/')}]", CLOSE)
    result = run_here("chat", path, "--mcp", servers, "-q", stdin=b"hi\n")
    assert (result.code, result.text) == (0, "Done.\n")
    assert result.err == (
        "edgedec: die needs a person's consent, and there is nobody to ask; --allow-tools allows it\n"
        "(die did not run)\n"
    )


@pytest.mark.parametrize(
    ("pieces", "options", "shown", "words"),
    [
        (("<think>so", OPEN, call("echo"), CLOSE, "</think>", "x"), (), "<think>\nso\nx\nDone.\n", "(echo answered"),
        ((OPEN, call("die"), CLOSE), (), "Done.\n", "(die failed: The call failed: the tool server plain"),
        ((OPEN, call("escape"), CLOSE), (), "Done.\n", "(escape answered: \\x1b[2Ja\\u202eb)"),
        ((OPEN, '{"name": "ec', 'ho"}', CLOSE), ("--stop", 'ho"}'), f'{OPEN}{{"name": "ec\n', ""),
        ((OPEN, call("echo"), CLOSE, " and", " more"), ("-n", "4"), " and\n", "(the answer was cut, so its calls"),
    ],
    ids=["in-a-thought", "a-server-that-ends", "escape-sequences", "a-stop-string", "cut"],
)
def test_calls_meet_other_ends(
    tmp_path: Path, servers: Path, pieces: Sequence[str], options: Sequence[str], shown: str, words: str
) -> None:
    """A call in a thought counts; one that a stop string cuts is text; of an answer that was cut none runs."""
    path = caller(tmp_path / "m.gguf", *pieces)
    result = run_here("chat", path, "--mcp", servers, "--allow-tools", "*", *options, stdin=b"hi\n")
    assert (result.code, result.text.replace("\n</think>\n\n", "\n")) == (0, shown)
    assert words in result.err
    assert ("answered" in words or "failed" in words) or "(echo " not in result.err


def test_a_model_that_calls_for_ever_is_stopped(tmp_path: Path, servers: Path) -> None:
    """After ten answers with calls; the oldest turns make room, and a person may go on."""
    path = caller(tmp_path / "m.gguf", OPEN, call("echo"), CLOSE, then=(OPEN,), n_ctx=512)
    result = run_here("chat", path, "--mcp", servers, "--allow-tools", "*", stdin=b"hi\n")
    assert result.code == 0
    assert result.err.count("(echo answered: ") == 10
    assert "(the model called tools 10 times in a row; write a message to let it go on)\n" in result.err


def test_a_model_that_knows_no_tools_gets_none(model: Path, servers: Path) -> None:
    """It is said at the start; a file that is malformed, or not there, ends the command before the model is loaded."""
    result = run_here("chat", model, "--mcp", servers, "-n", "2", "-t", "0", stdin=b"hi\n")
    assert "edgedec: the model's chat template knows no tools, so the model gets none\n" in result.err
    assert result.text == run_here("chat", model, "-n", "2", "-t", "0", stdin=b"hi\n").text
    run_here("chat", model, "--mcp", servers.parent / "none").failed(60, "none can't be read")
    servers.write_text("{}", encoding="utf-8")
    run_here("chat", model, "--mcp", servers).failed(40, "names no tool servers")


def test_a_person_is_asked_before_a_call(tmp_path: Path, servers: Path) -> None:
    """What was typed before the question is no answer; the arguments are shown, "a" is for the rest of the chat."""
    pytest.importorskip("termios", reason="no terminals of POSIX here")
    text = "a\u202eb" + "".join(map(chr, range(0x4E00, 0x4E00 + 450))) + "end"
    words = call("echo", text="TEXT").replace("TEXT", text)  # characters as they are: a grammar allows no others
    parts = [words[at : at + 80] for at in range(0, len(words), 80)]  # nor tokens of over 255 bytes
    path = caller(tmp_path / "m.gguf", "Well", OPEN, *parts, CLOSE)
    with Terminal("chat", path, "--mcp", servers, "--no-history", "--runtime", "cpu") as person:
        person.expect(">>>")
        person.send("hi\r", "echo of the tool server plain wants to run:\r\n")
        assert 'text: "a\\u202eb\u4e00'.encode() in person.expect("characters left out")
        person.expect('end"\r\nRun it? ')
        person.send("maybe\n", "Run it? ")
        person.send("s\n")
        assert b"left out" not in person.expect("Run it? ")
        person.send("n\n", "(echo did not run)", "Done.", ">>>")
        person.send("hi\r", "Run it? ")
        person.send("a\n", "(echo answered: ", ">>>")
        person.send("hi\r", "(echo answered: ", ">>>")
        person.send("\x04")
        assert (person.end(), person.settings()) == (0, person.before)


def test_ctrl_c_stops_the_question_and_the_call(tmp_path: Path, servers: Path) -> None:
    """The chat goes on, and the next message is answered; the program behind the tool is gone at the end."""
    pytest.importorskip("termios", reason="no terminals of POSIX here")
    path = caller(tmp_path / "m.gguf", OPEN, call("hang"), CLOSE)
    with Terminal("chat", path, "--mcp", servers, "--no-history", "--runtime", "cpu") as person:
        person.expect(">>>")
        person.send("hi\r", "Run it? ")
        person.send("\x03", ">>>")
        person.send("hi\r", "Run it? ")
        person.send("y\n")
        for _ in range(200):
            if (tmp_path / "s").exists():
                break
            person.settle()
        person.send("\x03", "(hang was stopped)", ">>>")
        person.send("/bye\r")
        assert person.end() == 0

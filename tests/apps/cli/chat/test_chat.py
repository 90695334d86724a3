"""edgedec chat from a pipe: each line is a message of one conversation, and commands work there too."""

import json
import os
import re
from pathlib import Path
from random import Random

import pytest
from support.processes.command_line import rename_model, run_here
from support.texts.pdf_files import pdf_of

from edgedec.errors import ModelFormatError, PromptTooLongError, RequestError, StorageError
from edgedec_apps.cli.chat.files import load_messages, save_messages
from edgedec_apps.cli.chat.line_editor import MOST_BYTES, TypedHistory

SHORT = ("-t", "0", "-n", "3", "--method=ignore-end")
KIND = ("--system", "Be kind.")


@pytest.mark.slow
def test_each_line_is_answered(model: Path) -> None:
    """Every line that says something gets an answer, and a later one goes on from what was said before."""
    first = run_here("chat", model, *SHORT, stdin=b"one\n")
    both = run_here("chat", model, *SHORT, stdin="\ufeffone\n\n  \ntwo\r\n".encode())
    assert (first.code, both.code) == (0, 0)
    assert both.out.startswith(first.out)
    assert len(both.out) > len(first.out)
    summaries = both.err.splitlines()
    assert ["3 tokens (length)" in line for line in summaries] == [True, True]
    assert ["reused" in line for line in summaries] == [False, True]


@pytest.mark.slow
def test_commands_work_from_a_pipe(model: Path) -> None:
    """/clear and /system forget what was said, /regen answers again, and nothing behind /bye is read."""
    lines = ["one", "/system Be kind.", "one", "/clear", "/regen", "one", "/regen", "/stats", "/help", "/bye", "two"]
    result = run_here("chat", model, *SHORT, stdin="\n".join(lines).encode())
    assert result.code == 0
    told = [line for line in result.err.splitlines() if line.startswith("(") or "tokens (" in line]
    assert told[1] == "(forgotten; system message: Be kind.)"
    assert told[3:5] == ["(forgotten; system message: Be kind.)", "(nothing to answer again)"]
    assert len(told) == 8
    assert "prompt: 43 tokens, 42 of them known from before\n" in result.err
    assert "/bye                leave" in result.err
    without, *with_system = (run_here("run", model, "one", *SHORT, *args, "-q").out for args in ((), KIND, KIND, KIND))
    assert result.out == b"".join([without, *with_system])


def test_the_system_message_can_be_taken_back(model: Path) -> None:
    """/system without a text leaves none."""
    result = run_here("chat", model, *SHORT, *KIND, stdin=b"/system\none\n")
    assert result.out == run_here("run", model, "one", *SHORT, "-q").out
    assert result.err.startswith("(forgotten; no system message)\n")


def test_a_mistyped_command_never_reaches_the_model(model: Path) -> None:
    """From a pipe it is refused with those there are, and ends the conversation; earlier answers stand."""
    result = run_here("chat", model, *SHORT, "-q", stdin=b"one\n/hlep\nhi\n")
    assert (result.code, result.out) == (40, run_here("run", model, "one", *SHORT, "-q").out)
    assert result.err == (
        "edgedec: no such command: /hlep; known: /help, /clear, /system, /set, /save, /load, /file, /image, /model, "
        "/tools, /show, /stats, /regen, /bye (write // to begin a text with a slash)\n"
    )


def test_two_slashes_begin_a_text_with_one(model: Path) -> None:
    """What a script sends may begin with a slash, and may hold more of them."""
    result = run_here("chat", model, *SHORT, stdin=b"//etc//passwd\n")
    assert result.code == 0
    assert result.out == run_here("run", model, "/etc//passwd", *SHORT, "-q").out


def test_leaving_takes_no_more_words_than_the_command(model: Path) -> None:
    """Words behind /bye change nothing, as behind the other commands."""
    result = run_here("chat", model, *SHORT, stdin=b"/bye now\none\n")
    assert (result.code, result.out, result.err) == (0, b"", "")


@pytest.mark.slow
def test_a_message_that_cannot_be_answered_ends_a_script(model: Path) -> None:
    """From a pipe, a message that is no UTF-8 or too long ends the conversation; earlier answers stand."""
    for line, code, words in ((b"a\xff", 40, "standard input, line 2"), (b"x" * 300, 41, "Shorten it")):
        result = run_here("chat", model, *SHORT, "-c", "200", stdin=b"one\n" + line + b"\ntwo\n")
        assert result.code == code
        assert result.out == run_here("run", model, "one", *SHORT, "-c", "200", "-q").out
        assert words in result.err


@pytest.mark.slow
def test_the_oldest_turns_make_room(model: Path) -> None:
    """A conversation that fills the context goes on without its oldest messages, and says how many those are."""
    lines = b"".join(b"%d %s\n" % (i, b"x" * 40) for i in range(4))
    result = run_here("chat", model, *SHORT, "-c", "200", stdin=lines)
    assert result.code == 0
    assert "(the context of 200 tokens is full: the oldest " in result.err
    assert result.err.count("3 tokens (length)") == 4


@pytest.mark.slow
def test_options_are_set_from_a_pipe(model: Path) -> None:
    """/set changes what an option of the command line sets, for the answers that follow; without a value it undoes it.

    The conversation stays, with another system message too.
    """
    chat = ("chat", model, "--method=ignore-end", "-q")
    options = ("-n", "4", "-t", "0.9", "--seed", "5", "--top-k", "9", "--stop", "no such text")
    lines = ["max-tokens 4", "temperature 0.9", "seed 5", "top_k 9", "stop no such text", "ignore-end true"]
    by_lines = "".join(f"/set {line}\n" for line in lines)
    expected = run_here(*chat, *options, stdin=b"one\ntwo\n")
    assert expected.code == 0
    assert run_here("chat", model, "-q", stdin=f"{by_lines}one\ntwo\n".encode()).out == expected.out
    undone = run_here(*chat, *options, stdin=b"/set seed 6\n/set seed 5\n/set min-p 0.5\n/set min-p\none\ntwo\n")
    assert undone.out == expected.out
    greedy = run_here(*chat, *SHORT, *KIND, stdin=b"one\n").out
    assert run_here(*chat, *SHORT, stdin=b"/set system Be kind.\none\n").out == greedy
    kept = run_here("chat", model, *SHORT, stdin=b"one\n/set system Be kind.\ntwo\n/set system\n")
    assert "(system: Be kind.)\n" in kept.err
    assert "(system: none)\n" in kept.err
    assert kept.out.startswith(run_here("chat", model, *SHORT, stdin=b"one\n").out)


def test_what_is_set_is_listed(model: Path) -> None:
    """/set alone lists every name with its value: what was given, and else the default."""
    result = run_here("chat", model, "-t", "0.25", "--stop", "END", stdin=b"/set top-p 0.5\n/set\n")
    listed = dict(line.split(maxsplit=1) for line in result.err.splitlines()[1:])
    assert (result.code, result.out) == (0, b"")
    found = {name: listed[name] for name in ("system", "temperature", "top-p", "top-k", "stop", "seed", "markdown")}
    expected = {"system": "none", "temperature": "0.25", "top-p": "0.5", "top-k": "0", "stop": "END", "seed": "none"}
    assert found == expected | {"markdown": "off"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature -1", "--temperature is -1"),
        ("/set temperature hot", "--temperature is 'hot'"),
        ("/set max-tokens 2.5", "--max-tokens is 2.5"),
        ("/set ignore-end maybe", "--method ignore-end is 'maybe'"),
        ("/set colour red", "/set knows no 'colour'; known: system, max-tokens, temperature"),
        ("/set logprobs 3", "/set knows no 'logprobs'"),
        ("/set markdown on", "markdown is for a terminal"),
        ("/set markdown maybe", "it must be on or off"),
        ("/save", "/save needs the name of a file"),
        ("/load ~no-such-user/x", "/load: "),
    ],
)
def test_what_cannot_be_set_ends_a_script(model: Path, line: str, words: str) -> None:
    """A name that is not known, and a value out of range, are refused with what would do."""
    run_here("chat", model, stdin=f"{line}\none\n".encode()).failed(40, words)


@pytest.mark.slow
def test_a_chat_is_saved_and_goes_on_later(model: Path, tmp_path: Path) -> None:
    """/load in another process gives the answer that the saved conversation would have gone on with."""
    file = tmp_path / "a chat.json"
    whole = run_here("chat", model, *SHORT, *KIND, stdin=f"one\n/save {file}\ntwo\n".encode())
    first = run_here("chat", model, *SHORT, *KIND, stdin=b"one\n").out
    later = run_here("chat", model, *SHORT, stdin=f"/load {file}\ntwo\n".encode())
    assert (whole.code, later.code) == (0, 0)
    assert first + later.out == whole.out
    assert "(loaded: 3 messages)" in later.err
    assert f"(saved in {file})" in whole.err
    if os.name == "posix":
        assert file.stat().st_mode & 0o777 == 0o600
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant"]
    assert run_here("chat", model, stdin=f"/load {file}\n/save {file}\n".encode()).code == 0


@pytest.mark.slow
def test_saving_replaces_only_chats(model: Path, tmp_path: Path) -> None:
    """/save leaves any other file, and a link to one, as it is; what is not there can't be loaded."""
    notes, link = tmp_path / "notes.txt", tmp_path / "link"
    notes.write_text("mine")
    link.symlink_to(notes)
    for path in (notes, link):
        run_here("chat", model, stdin=f"/save {path}\n".encode()).failed(40, "is no saved chat; give another name")
        run_here("chat", model, stdin=f"/load {path}\n".encode()).failed(12, "is no chat that /save wrote")
    run_here("chat", model, stdin=f"/save {tmp_path}\n".encode()).failed(60, "directory")
    run_here("chat", model, stdin=f"/save {tmp_path}/no/a.json\n".encode()).failed(60, "No such file")
    run_here("chat", model, stdin=f"/load {tmp_path}/no.json\n".encode()).failed(60, "No such file")
    assert notes.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["link", "notes.txt"]


@pytest.mark.slow
def test_damaged_chats_are_refused(tmp_path: Path) -> None:
    """A saved chat with other bytes in it is read as one, or is a ModelFormatError; nothing else happens."""
    file, random = tmp_path / "a.json", Random(3)
    save_messages(file, "m", [{"role": "user", "content": "Grüße \n"}, {"role": "assistant", "content": "a"}])
    data, n_refused = file.read_bytes(), 0
    for content in ("[" * 100_000, "{}", "[]", '{"format": "edgedec chat 1", "messages": [{"role": "tool"}]}'):
        file.write_text(content)
        with pytest.raises(ModelFormatError, match=r"is no chat that|is damaged"):
            load_messages(file)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random.randrange(len(data))] = random.randrange(32, 127)
        file.write_bytes(bytes(damaged))
        try:
            assert all(set(message) == {"role", "content"} for message in load_messages(file))
        except (ModelFormatError, RequestError):
            n_refused += 1
    assert n_refused > 50


def test_what_is_typed_is_kept_for_its_owner(tmp_path: Path) -> None:
    """Lines come back in their order, of several lines and any characters; the file is for its owner alone."""
    history = TypedHistory(tmp_path / "new" / "history")
    lines = ["one", "two\nlines", "grüße 🙂 \ud800", "\x1b[2J"]
    for line in lines:
        history.store_string(line)
    assert TypedHistory(tmp_path / "new" / "history").load_history_strings() == lines[::-1]
    if os.name == "posix":
        assert (tmp_path / "new" / "history").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_damaged_or_long_history_is_no_obstacle(tmp_path: Path) -> None:
    """Lines that are no JSON strings are left out, the older half of a long file too, and a folder keeps nothing."""
    file = tmp_path / "history"
    file.write_bytes(b'"one"\n{\n\xff\n3\n' + b"[" * 100_000 + b'\n"two"\n"thr')
    assert TypedHistory(file).load_history_strings() == ["two", "one"]
    file.write_bytes(b"".join(b'"%07d"\n' % i for i in range(MOST_BYTES // 10 + 1)))
    newer = [f"{i:07}" for i in range(MOST_BYTES // 20 + 2, MOST_BYTES // 10 + 1)][::-1]
    assert TypedHistory(file).load_history_strings() == TypedHistory(file).load_history_strings() == newer
    assert len(newer) * 10 == file.stat().st_size
    TypedHistory(tmp_path).store_string("one")
    assert TypedHistory(tmp_path).load_history_strings() == []


def test_a_model_without_a_template_is_refused_before_it_is_loaded(
    plain_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header says so; nothing is opened. With a template of one's own it chats."""
    template = plain_model.with_name("own.jinja")
    template.write_text("{{ messages[-1].content }}", encoding="utf-8")
    assert run_here("chat", plain_model, *SHORT, "--chat-template", template, stdin=b"one\n").code == 0
    monkeypatch.setattr("edgedec_apps.cli.opening.open_model", lambda *_, **__: pytest.fail("it was loaded"))
    run_here("chat", plain_model, stdin=b"one\n").failed(43, "has no chat template", "--chat-template FILE")


@pytest.mark.slow
def test_files_come_before_the_next_message(model: Path, tmp_path: Path) -> None:
    """Texts and PDFs, each once; the prompt is that of a message that holds them."""
    note, paper = tmp_path / "a note.txt", tmp_path / "paper.pdf"
    note.write_text("\ufeffone\n", encoding="utf-8")
    paper.write_bytes(pdf_of("two"))
    asked = f"/file {note}\n/file {paper}\nthree\n/clear\nthree\n"
    found = run_here("chat", model, *SHORT, stdin=asked.encode())
    assert found.code == 0, found.err
    assert f"({note}: 4 tokens; its text comes before your next message)" in found.err
    given = "one\n\ntwo\n\nthree"
    assert found.out == b"".join(run_here("run", model, text, *SHORT, "-q").out for text in (given, "three"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "missing can't be read: No such file"),
        ("empty", b"\n \n", "holds no text"),
        ("picture", b"\x89PNG\r\n", "is not UTF-8"),
        ("zeros", b"a\0b", "holds zero bytes"),
        ("bad.pdf", b"%PDF-1.4 nothing", "it is no PDF, or damaged"),
        ("", None, "is no file"),
    ],
)
def test_files_that_are_refused(model: Path, tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    """The reason is said, and from a pipe it ends the chat."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    found = run_here("chat", model, *SHORT, stdin=f"/file {path}\n".encode())
    assert found.code in (RequestError.exit_code, PromptTooLongError.exit_code, StorageError.exit_code), found.err
    assert words in found.err


@pytest.mark.slow
def test_a_message_that_is_too_long_says_what_context_would_do(model: Path) -> None:
    """As a prompt of `run` does."""
    run_here("chat", model, *SHORT, "-c", "256", stdin=b"x" * 300).failed(41, "longer context (--context 1024)")


@pytest.mark.slow
def test_a_file_that_is_too_long_is_searched_for_each_message(model: Path, tmp_path: Path) -> None:
    """The answer is that to the passages that match, behind their place; another message has others, until /clear."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {i} tells of thing {i * 7}.\n" for i in range(100)), encoding="utf-8")
    context = ("-c", "400", "--runtime", "cpu")
    asked = f"/file {book}\nthing 441\n/clear\nthing 441\n"
    found = run_here("chat", model, *SHORT, *context, stdin=asked.encode())
    assert found.code == 0, found.err
    said = f"({book}: longer than the context of 400 tokens; for each message it is searched (until /clear))"
    assert said in found.err
    (place,) = re.findall(r"book.txt: longer .* read: \d of \d+ passages \(lines (\d+-\d+)\)", found.err)
    first, last = map(int, place.split("-"))
    assert first <= 64 <= last, "the line with thing 441"
    passages = "\n".join(book.read_text(encoding="utf-8").splitlines()[first - 1 : last])
    given = f"[book.txt, lines {place}]\n{passages}\n\nthing 441"
    expected = (run_here("run", model, text, *SHORT, *context, "-q").out for text in (given, "thing 441"))
    assert found.out == b"".join(expected)


@pytest.mark.slow
def test_another_model_goes_on_with_the_conversation(model: Path, tmp_path: Path) -> None:
    """It answers as if it had been there from the first message, and /show names it."""
    other = rename_model(tmp_path / "other.gguf", model, "another tiny")
    asked = f"one\n/model {other}\ntwo\n/show\n"
    found = run_here("chat", model, *SHORT, *KIND, stdin=asked.encode())
    assert found.code == 0, found.err
    assert found.out == run_here("chat", model, *SHORT, *KIND, stdin=b"one\ntwo\n").out, "the weights are the same"
    shown = dict(line.split(maxsplit=1) for line in found.err.splitlines() if line[:1].islower() and "  " in line)
    assert shown["model"] == str(other)
    assert (shown["messages"], shown["system"], shown["context"]) == ("5", "Be kind.", "2048 tokens, trained for 2048")
    assert "temperature 0.0 (options)" in shown["sampling"]


@pytest.mark.slow
def test_a_model_that_can_not_answer_leaves_the_one_that_does(model: Path, plain_model: Path, tmp_path: Path) -> None:
    """No such model, one without a template, and no name: from a pipe the chat ends with the reason."""
    for name, words in (("no-such-model", "no-such-model"), (plain_model, "no chat template"), ("", "needs the name")):
        found = run_here("chat", model, *SHORT, stdin=f"one\n/model {name}\n".encode())
        assert found.code != 0
        assert words in found.err

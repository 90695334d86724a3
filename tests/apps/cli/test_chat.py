"""edgedec chat from a pipe: each line is a message of one conversation, and commands work there too."""

from pathlib import Path

from support.command_line import run_here

SHORT = ("-t", "0", "-n", "3", "--ignore-end")
KIND = ("--system", "Be kind.")


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


def test_commands_work_from_a_pipe(model: Path) -> None:
    """/clear and /system forget what was said, /regen answers again, and nothing behind /bye is read."""
    lines = ["one", "/system Be kind.", "one", "/clear", "/regen", "one", "/regen", "/stats", "/help", "/bye", "two"]
    result = run_here("chat", model, *SHORT, stdin="\n".join(lines).encode())
    assert result.code == 0
    told = [line for line in result.err.splitlines() if line.startswith("(") or "tokens (" in line]
    assert told[1] == "(forgotten; system message: Be kind.)"
    assert told[3:5] == ["(forgotten; system message: Be kind.)", "(nothing to answer again)"]
    assert len(told) == 7
    assert "n_prompt_tokens" in result.err
    assert "/bye            leave" in result.err
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
        "edgedec: no such command: /hlep; known: /help, /clear, /system, /stats, /regen, /bye "
        "(write // to begin a text with a slash)\n"
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


def test_a_message_that_cannot_be_answered_ends_a_script(model: Path) -> None:
    """From a pipe, a message that is no UTF-8 or too long ends the conversation; earlier answers stand."""
    for line, code, words in ((b"a\xff", 40, "standard input, line 2"), (b"x" * 300, 41, "shorten it")):
        result = run_here("chat", model, *SHORT, "-c", "200", stdin=b"one\n" + line + b"\ntwo\n")
        assert result.code == code
        assert result.out == run_here("run", model, "one", *SHORT, "-c", "200", "-q").out
        assert words in result.err


def test_the_oldest_turns_make_room(model: Path) -> None:
    """A conversation that fills the context goes on without its oldest messages, and says how many those are."""
    lines = b"".join(b"%d %s\n" % (i, b"x" * 40) for i in range(4))
    result = run_here("chat", model, *SHORT, "-c", "200", stdin=lines)
    assert result.code == 0
    assert "(the context of 200 tokens is full: the oldest " in result.err
    assert result.err.count("3 tokens (length)") == 4


def test_a_model_without_a_template_cannot_chat(plain_model: Path) -> None:
    """It is a TemplateError that says what to do."""
    run_here("chat", plain_model, stdin=b"one\n").failed(43, "no chat template", "--chat-template FILE")

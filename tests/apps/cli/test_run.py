"""edgedec run: where the prompt comes from, and what is printed where."""

import os
from pathlib import Path

import pytest
from support.processes.command_line import run_here

GREEDY = ("-t", "0", "-n", "8", "--method=ignore-end")


def test_text_goes_to_standard_output_and_the_summary_to_standard_error(model: Path) -> None:
    """Standard output holds the generated text and a line end; the summary is one line on standard error."""
    result = run_here("run", model, "Hello", *GREEDY, "--draft", "off", "--json")
    text = result.document()["text"]
    shown = run_here("run", model, "Hello", *GREEDY, "--draft", "off")
    assert (shown.code, shown.text) == (0, f"{text}\n")
    (line,) = shown.err.splitlines()
    assert line.startswith("first token ")
    assert line.endswith("8 tokens (length)")


@pytest.mark.slow
def test_the_prompt_is_the_same_by_argument_file_and_pipe(model: Path, tmp_path: Path) -> None:
    """Argument, --file, --file - and standard input give one text, with or without a BOM and a last line end."""
    expected = run_here("run", model, "Grüße\nan alle", *GREEDY, "--json").document()["token_ids"]
    file = tmp_path / "prompt ü.txt"
    for data in ("Grüße\nan alle", "Grüße\nan alle\n", "\ufeffGrüße\nan alle\r\n"):
        file.write_bytes(data.encode())
        for args in (("-f", str(file)), ("-f", "-"), ()):
            result = run_here("run", model, *args, *GREEDY, "--json", stdin=data.encode())
            assert result.document()["token_ids"] == expected


def test_raw_continues_the_text_without_the_template(model: Path) -> None:
    """--raw evaluates the prompt and the BOS only; the template adds its own tokens, and --system more."""

    def n_prompt_tokens(*args: str) -> int:
        return int(run_here("run", model, "abc", *args, *GREEDY, "--json").document()["stats"]["n_prompt_tokens"])

    assert n_prompt_tokens("--raw") == 1 + 3
    assert n_prompt_tokens() == 1 + len("<user>abc</><assistant>")
    assert n_prompt_tokens("--system", "Be kind.") == 1 + len("<system>Be kind.</><user>abc</><assistant>")


def test_without_a_template_the_text_is_continued_and_that_is_said(plain_model: Path) -> None:
    """A model without a chat template continues the prompt, and says so unless quiet; --system is refused."""
    result = run_here("run", plain_model, "abc", *GREEDY)
    assert result.code == 0
    assert "no chat template" in result.err
    assert result.out == run_here("run", plain_model, "abc", *GREEDY, "--raw", "-q").out
    run_here("run", plain_model, "abc", "--system", "x").failed(40, "--system")


def test_json_is_one_object_and_nothing_else(model: Path) -> None:
    """--json prints one object with text, tokens, reason and counts; the text itself is not printed besides."""
    found = run_here("run", model, "Hello", *GREEDY, "--json", "--seed", "7", "--logprobs", "2").document()
    assert list(found) == ["model", "text", "token_ids", "finish_reason", "logprob_sum", "stats", "logprobs", "memory"]
    assert (found["model"], found["finish_reason"]) == (str(model), "length")
    assert found["stats"]["seed"] == 7
    assert len(found["token_ids"]) == len(found["logprobs"]) == 8


def test_a_text_ends_where_the_model_is_unsure(model: Path) -> None:
    """stop-unsure says in the JSON object and in the summary why the text ended; a value out of range is refused."""
    result = run_here("run", model, "Hello", *GREEDY, "--json", "--method", "stop-unsure:0.99")
    found = result.document()
    assert (found["finish_reason"], found["token_ids"]) == ("unsure", [])
    assert 0 < found["stats"]["chance_right"] < 0.99
    assert "the model was unsure" in result.err
    run_here("run", model, "Hello", *GREEDY, "--method", "stop-unsure:1.5").failed(40, "--method stop-unsure is 1.5")
    refused = run_here("run", model, "Hello", "-n", "8", "--method", "stop-unsure:0.5", "--grammar", "regex:a+")
    refused.failed(40, "--method stop-unsure")


def test_quiet_says_nothing(model: Path) -> None:
    """-q leaves standard error empty."""
    result = run_here("run", model, "Hello", *GREEDY, "-q")
    assert (result.code, result.err) == (0, "")
    assert result.out


@pytest.mark.slow
def test_verbose_shows_the_runtimes_log(model: Path) -> None:
    """-v shows llama.cpp's log on standard error, and not on standard output."""
    result = run_here("run", model, "Hello", *GREEDY, "-v", "--runtime", "llamacpp")
    assert result.code == 0
    assert "edgedec.llamacpp: " in result.err
    assert b"llama" not in result.out


@pytest.mark.slow
def test_options_by_environment(model: Path) -> None:
    """Options and flags come from the environment; the command line wins, and has the repeated options."""
    env = {"EDGEDEC_MAX_TOKENS": "3", "EDGEDEC_TEMPERATURE": "0", "EDGEDEC_QUIET": "1"}
    run = ("run", model, "Hello", "--method=ignore-end", "--json")
    result = run_here(*run, env=env)
    found = result.document()
    assert (len(found["token_ids"]), result.err) == (3, "")
    assert len(run_here(*run, "-n", "5", env=env).document()["token_ids"]) == 5
    first, second, *_ = found["token_ids"]
    bias = [word for token in (first, second) for word in ("--logit-bias", f"{token}=-inf")]
    banned = run_here(*run, *bias, env=env).document()
    assert not {first, second} & set(banned["token_ids"])


def test_an_empty_variable_is_no_option(model: Path) -> None:
    """EDGEDEC_TEMPERATURE set to nothing leaves the default."""
    assert run_here("run", model, "Hello", "-n", "2", env={"EDGEDEC_TEMPERATURE": ""}).code == 0


@pytest.mark.slow
def test_an_argument_with_content_is_one_prompt(model: Path, tmp_path: Path) -> None:
    """A file or a pipe, and then the argument, behind an empty line; a blank one leaves the argument as it is."""
    expected = run_here("run", model, "x = 1\n\nExplain this", *GREEDY, "--json").document()["token_ids"]
    alone = run_here("run", model, "Explain this", *GREEDY, "--json").document()["token_ids"]
    file = tmp_path / "a.py"
    for content, token_ids in ((b"x = 1\r\n", expected), (b"x = 1", expected), (b"", alone), (b" \n", alone)):
        file.write_bytes(content)
        for args, stdin in ((("-f", file), b"not read"), (("-f", "-"), content), ((), content)):
            result = run_here("run", model, "Explain this", *args, *GREEDY, "--json", stdin=stdin)
            assert result.document()["token_ids"] == token_ids
    run_here("run", model, "Explain this", stdin=b"a\xff").failed(40, "standard input is not UTF-8")
    run_here("run", model, "", stdin=b"\n").failed(40, "empty")


@pytest.mark.slow
def test_a_system_message_comes_from_a_file(model: Path, tmp_path: Path) -> None:
    """As a shell puts it there, in run and in chat; without a template it is refused."""
    file = tmp_path / "system.txt"
    file.write_text("Sei nett.\n", encoding="utf-8")
    said = ("--system", file.read_text(encoding="utf-8").rstrip("\n"))  # "$(cat FILE)"
    expected = run_here("run", model, "Hello", "--system", "Sei nett.", *GREEDY, "-q").out
    assert expected != run_here("run", model, "Hello", *GREEDY, "-q").out
    assert run_here("run", model, "Hello", *said, *GREEDY, "-q").out == expected
    assert run_here("chat", model, *said, *GREEDY, "-q", stdin=b"Hello\n").out == expected
    run_here("run", model, "Hello", *said, "--raw").failed(40, "--raw")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["with space ü 🙂.gguf", "-dash.gguf", "no extension", "[bold]x.gguf", b"caf\xe9.gguf"]
)
def test_any_path_is_a_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | bytes) -> None:
    """Spaces, Unicode, a leading dash, markup and bytes that are not UTF-8 in a path are a path like any other."""
    try:
        os.link(model, os.path.join(os.fsencode(tmp_path), os.fsencode(name)))
    except OSError as error:
        pytest.skip(f"this file system has no such names: {error}")
    monkeypatch.chdir(tmp_path)
    for runtime in ("reference", "llamacpp"):
        result = run_here("run", "--runtime", runtime, *GREEDY, "--json", "--", name, "Hello")
        assert os.fsencode(str(result.document()["model"])) == os.fsencode(name)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("drafting")
def test_the_real_model_answers(smollm_path: Path) -> None:
    """The 135M model answers a question through its own chat template; how it goes on depends on the processor."""
    result = run_here("run", smollm_path, "Why is the sky blue?", "-t", "0", "-n", "12", "-q", "--runtime", "llamacpp")
    assert result.text.startswith("The ")


@pytest.mark.slow
def test_several_texts_are_those_of_the_seeds_after(model: Path) -> None:
    """-k 3 prints three texts, each below its number, and in JSON as a list; text k is that of the seed plus k."""
    warm = ("-t", "1", "-n", "8", "--method=ignore-end", "--draft", "off")
    alone = [run_here("run", model, "Hello", *warm, "--seed", str(5 + k), "--json").document() for k in range(3)]
    found = run_here("run", model, "Hello", *warm, "--seed", "5", "-k", "3", "--json").document()
    assert [text["token_ids"] for text in found["texts"]] == [text["token_ids"] for text in alone]
    assert all(text["logprob_sum"] < 0 for text in found["texts"])
    shown = run_here("run", model, "Hello", *warm, "--seed", "5", "--texts", "3")
    assert shown.code == 0
    assert shown.text == "".join(f"--- text {k} of 3 ---\n{text['text']}\n" for k, text in enumerate(alone, 1))
    assert len(shown.err.splitlines()) == 3
    for wrong in ("0", "257", "1000000"):
        refused = run_here("run", model, "Hello", "-k", wrong)
        assert refused.code != 0
        assert "it must be from 1 to 256" in refused.err

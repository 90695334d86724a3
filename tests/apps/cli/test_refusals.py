"""What can't be done: one clear line on standard error, an exit code of edgedec.errors, and no traceback."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.models.gguf_writer import tiny_text_model, write_gguf
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here, run_process
from support.processes.rights import as_anybody

from edgedec_apps.cli.exit_codes import INTERNAL


@pytest.mark.parametrize("command", [("run", "MODEL", "hi"), ("chat", "MODEL"), ("info", "MODEL")])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty file"),
        (b"just some text\n", "text file"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "damaged"),
        (b"\0" * 5000, "zeros"),
        (b"<!doctype html><p>Sign in</p>", "web page"),
    ],
)
def test_a_file_that_is_no_model(command: tuple[str, ...], content: bytes, words: str, tmp_path: Path) -> None:
    """A file that is no GGUF is a ModelFormatError that says what it is."""
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    args = [file if arg == "MODEL" else arg for arg in command]
    run_here(*args, env={"EDGEDEC_RUNTIME": "auto"}).failed(12, str(file), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option", "value", "content", "words"),
    [
        ("run", "--json-schema", "x.json", "[1]", "is a list"),
        ("run", "--json-schema", "x.json", '{"type":', "no JSON"),
        ("run", "--json-schema", "x.json", '{"type": "objet"}', "objet"),
        ("run", "--json-schema", "x.json", None, "x.json can't be read"),
        ("run", "--grammar", "x.gbnf", 'root ::= "a', "(GBNF), line 1"),
        ("chat", "--grammar", "x.gbnf", "root ::= other", "other"),
        ("run", "--grammar", "x.lark", "start: other", "other"),
        ("run", "--grammar", "x.lark", None, "x.lark can't be read"),
        ("run", "--grammar", "regex:a(", None, "unclosed"),
        ("run", "--image", "x.png", None, "x.png can't be read"),
        ("run", "--method", "passages:0", None, "--method passages:n is 0"),
        ("extract", "--passages", "0", None, "'--passages'"),
        ("extract", "--count", "101", None, "'--count'"),
        ("embed", "--pooling", "max", None, "--pooling is 'max'; it must be mean, cls or last"),
        ("embed", "--dimensions", "0", None, "'--dimensions'"),
        ("extract", "--span-tokens", "0", None, "'--span-tokens'"),
    ],
)
def test_an_option_is_refused_before_the_model_is_loaded(
    command: str, option: str, value: str, content: str | None, words: str, tmp_path: Path
) -> None:
    """So the error is that of the option, where there is no such model either."""
    file = tmp_path / value
    if content is not None:
        file.write_text(content, encoding="utf-8")
    asked = ("hi",) * (command != "chat")
    refused = run_here(command, tmp_path / "none.gguf", *asked, option, file if "x." in value else value, stdin=b"text")
    assert (refused.code != 0, words in refused.err, "none.gguf" in refused.err) == (True, True, False), refused


@pytest.mark.parametrize("runtime", ["auto", "llamacpp", "reference"])
def test_a_truncated_model(model: Path, tmp_path: Path, runtime: str) -> None:
    """A model cut in its header or in its tensors is a ModelFormatError with every runtime."""
    data = model.read_bytes()
    for n_bytes in (100, 3000, len(data) - 1000):
        file = tmp_path / "cut.gguf"
        file.write_bytes(data[:n_bytes])
        run_here("run", file, "hi", "--runtime", runtime).failed(12, "cut.gguf")


@pytest.mark.slow
def test_a_template_that_does_not_compile(tmp_path: Path) -> None:
    """It refuses chats; --raw, embed and info work, and the error names the file and the option."""
    source = "{% trans %}{{ messages }}{% endtrans %}"
    model, other = tiny_llama(tmp_path / "m.gguf", chat_template=source), tmp_path / "other.jinja"
    run_here("run", model, "hi").failed(43, "m.gguf: chat template, line 1: ", "(--chat-template)")
    run_here("chat", model, stdin=b"hi\n").failed(43, "m.gguf: chat template, line 1: ", "(--chat-template)")
    for command in (
        ("run", model, "hi", "--raw", "-n", "1"),
        ("info", model),
        ("embed", model, "hi", "--pooling", "mean"),
    ):
        assert run_here(*command, env={"EDGEDEC_RUNTIME": "cpu"}).code == 0, command
    other.write_text("{{ messages[0].content }}")
    assert run_here("run", model, "hi", "--chat-template", other, "-n", "1").code == 0
    other.write_text(source)
    run_here("run", model, "hi", "--chat-template", other).failed(43, "chat template, line 1: ", "(--chat-template)")


@pytest.mark.slow
def test_what_is_no_file(tmp_path: Path) -> None:
    """A directory, an absent path, an unknown name, an empty name and an overlong one are refused."""
    run_here("run", tmp_path, "hi").failed(12, "directory")
    run_here("run", tmp_path / "no.gguf", "hi").failed(11, "no.gguf", "does not exist")
    run_here("run", "no-such-model", "hi").failed(11, "no-such-model", "edgedec list")
    run_here("run", "", "hi").failed(11)
    run_here("run", "x" * 5000, "hi").failed(11)
    run_here("run", "a\0b", "hi").failed(11)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_that_may_not_be_read(model: Path, tmp_path: Path) -> None:
    """A model, a prompt and a template without permission are StorageErrors that name the file."""
    with TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        secret, sound = folder / "secret", folder / "sound.gguf"
        for file in (secret, sound):
            file.write_bytes(model.read_bytes())
        secret.chmod(0)
        assert run_here("run", sound, "hi", "-n", "1").code == 0  # what it imports may be closed to others, too
        assert run_here("info", sound).code == 0
        uses = [("run", secret, "hi"), ("run", secret, "hi", "--runtime", "llamacpp"), ("info", secret)]
        uses += [("run", sound, *args) for args in (("-f", secret), ("hi", "--chat-template", secret))]
        with as_anybody():
            results = [run_here(*args) for args in uses]
    for result in results:
        result.failed(60, str(secret), "ermission")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"general.type": "mmproj"}, "mmproj"),
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "nomic-bert"}, "embedding"),
        ({"general.type": "adapter"}, "LoRA adapter"),
        ({"general.architecture": "modern-bert"}, "reranker"),
    ],
)
def test_what_is_no_text_decoder_is_refused_by_name(metadata: dict[str, object], kind: str, tmp_path: Path) -> None:
    """A vision encoder, an embedding model or an adapter is an UnsupportedModelError that names it."""
    base, tensors = tiny_text_model()
    file = write_gguf(tmp_path / "other.gguf", base | metadata, tensors)
    for runtime in ("auto", "llamacpp"):
        run_here("run", file, "hi", "--runtime", runtime).failed(13, "other.gguf", kind)


@pytest.mark.slow
def test_prompts_that_cannot_be_served(model: Path, tmp_path: Path) -> None:
    """An empty prompt, one that is not UTF-8 and one longer than the context are refused."""
    for stdin in (b"", b"\n", b"  \r\n"):
        run_here("run", model, stdin=stdin).failed(40, "empty")
    run_here("run", model, "").failed(40, "empty")
    run_here("run", model, stdin=b"a\xffb").failed(40, "standard input is not UTF-8", "0xff")
    file = tmp_path / "latin1.txt"
    file.write_bytes("é".encode("latin-1"))
    run_here("run", model, "-f", file).failed(40, "latin1.txt is not UTF-8", "0xe9")
    run_here("run", model, "-f", tmp_path / "no.txt").failed(60, "no.txt", "No such file")
    run_here("run", model, "-f", tmp_path).failed(60, "directory")
    run_here("run", model, "x" * 300, "-c", "200").failed(41, "200", "context")


@pytest.mark.slow
def test_a_text_without_an_end(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and pipes are read up to a bound: a device or an endless pipe does not fill the memory."""
    monkeypatch.setattr("edgedec_apps.texts.MOST_BYTES", 100)
    long = tmp_path / "long.txt"
    long.write_bytes(b"a" * 101)
    for option in ("--file", "--json-schema", "--grammar", "--chat-template"):
        run_here("run", model, option, long, stdin=b"hi").failed(40, f"{long} holds more than 100 bytes")
    run_here("run", model, stdin=b"a" * 101).failed(40, "standard input holds more than 100 bytes")
    run_here("chat", model, stdin=b"a" * 101).failed(40, "standard input, line 1 holds more than 100 bytes")
    assert run_here("chat", model, "-n", "1", stdin=b"a" * 100).code == 0


def test_zero_bytes_in_a_prompt_are_text(model: Path) -> None:
    """A NUL byte is a character like another: it is a token, and nothing is cut off behind it."""
    result = run_here("run", model, "-n", "1", "--raw", "-v", "--json", stdin=b"a\0bc")
    assert result.code == 0
    assert b'"n_prompt_tokens": 5' in result.out


def test_arguments_that_are_not_utf8(model: Path) -> None:
    """A prompt or system message of bytes that are no UTF-8 is refused by name."""
    run_here("run", model, b"caf\xe9").failed(40, "the prompt is not UTF-8")
    run_here("run", model, "hi", "--system", b"caf\xe9").failed(40, "--system is not UTF-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-t", "-1"), "--temperature is"),
        (("-t", "nan"), "--temperature is"),
        (("--top-p", "0"), "--top-p is"),
        (("--top-k", "-1"), "--top-k is"),
        (("--logit-bias", "five"), "TOKEN_ID=BIAS"),
        (("--logit-bias", "5=nan"), "--logit-bias must"),
        (("--memory", "much"), "900MB"),
        (("--memory", "0"), "above zero"),
        (("-c", "0"), "--context is"),
        (("--threads", "0"), "--threads is"),
        (("--kv-type", "q1_0"), "--kv-type is"),
    ],
)
def test_values_out_of_range(model: Path, args: tuple[str, ...], words: str) -> None:
    """A value out of range is a RequestError that names the option."""
    run_here("run", model, "hi", *args, "--runtime", "llamacpp").failed(40, words)


def test_a_bad_sampling_value_is_found_before_the_model_is_looked_for() -> None:
    """Nobody waits for a pull or a load to read that the temperature is wrong."""
    run_here("run", "no-such-model", "hi", "-t", "-1").failed(40, "temperature")


@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("rn", "m"),
        ("run", "m", "hi", "--no-such-option"),
        ("run", "m", "hi", "-n", "many"),
        ("run", "m", "hi", "-n"),
        ("run", "m", "hi", "--ignore-end=1"),
        ("list", "m"),
    ],
)
def test_usage_errors(args: tuple[str, ...]) -> None:
    """A command line that can't be understood is exit code 2 and one line that says where the help is."""
    result = run_here(*args)
    result.failed(2, "--help")
    assert len(result.err.splitlines()) == 1


def test_a_bad_value_in_the_environment_is_a_usage_error(model: Path) -> None:
    """A variable that does not hold a number is refused like the option."""
    run_here("run", model, "hi", env={"EDGEDEC_TEMPERATURE": "hot"}).failed(2, "--temperature")


@pytest.mark.slow
def test_unknown_plug_ins_are_refused_with_those_there_are(model: Path) -> None:
    """An unknown runtime, drafter or device is refused, and the known ones are named."""
    run_here("run", model, "hi", "--runtime", "warp").failed(31, "warp", "llamacpp")
    run_here("run", model, "hi", "--draft", "crystal-ball").failed(31, "crystal-ball")
    run_here("run", model, "hi", "--runtime", "llamacpp", "--device", "Quantum0").failed(30, "Quantum0", "CPU")


@pytest.mark.parametrize(("runtime", "term"), [("reference", "KV cache"), ("llamacpp", "vocabulary")])
def test_too_little_memory_is_refused_with_the_table(model: Path, runtime: str, term: str) -> None:
    """A plan over --memory is exit code 50, with a table of what would be held, as far as that was asked."""
    result = run_here("run", model, "hi", "--memory", "1MB", "--runtime", runtime)
    assert (result.code, result.out) == (50, b"")
    for words in (term, "weights", "total", "allowed", "1.0 MB", "over by"):
        assert words in result.err
    assert run_here("run", model, "hi", "-n", "1", "--memory", "4GB", "--runtime", runtime).code == 0


def test_a_chat_template_file_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    """An absent template file is a StorageError, one that is not UTF-8 a RequestError."""
    run_here("run", model, "hi", "--chat-template", tmp_path / "no.jinja").failed(60, "no.jinja")
    file = tmp_path / "bad.jinja"
    file.write_bytes(b"\xff")
    run_here("run", model, "hi", "--chat-template", file).failed(40, "bad.jinja is not UTF-8")


def test_contradictions_are_refused(model: Path) -> None:
    """--raw with --system, and --json for a chat, contradict themselves."""
    run_here("run", model, "hi", "--raw", "--system", "x").failed(40, "--raw")
    run_here("chat", model, "--json").failed(40, "--json")


@pytest.mark.slow
def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw is one line and exit code 70, and a traceback with EDGEDEC_DEBUG."""

    def fail() -> None:
        raise ZeroDivisionError("the bug")

    monkeypatch.setattr("edgedec_apps.cli.commands.list.list_models", fail)
    run_here("list").failed(INTERNAL, "internal error", "ZeroDivisionError: the bug", "EDGEDEC_DEBUG")
    with pytest.raises(ZeroDivisionError):
        run_here("list", env={"EDGEDEC_DEBUG": "1"})


@pytest.mark.slow
def test_running_the_module_is_running_the_command(model: Path) -> None:
    """python -m edgedec_apps.cli is edgedec, as a process of its own."""
    run_process("run", model, "hi", "-n", "0").failed(40, "--max-tokens")

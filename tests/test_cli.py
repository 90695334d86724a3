"""The command line as a person and a script use it: streams, exit codes, bad input, interrupts."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "edgedec_apps.cli"]
SHORT = ["--context", "256", "--temperature", "0", "--max-tokens", "8", "--ignore-end"]


def edgedec(
    *arguments: str | Path, stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command with `stdin` piped in."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, check=False, timeout=120, env=os.environ | (env or {})
    )


def refused(result: subprocess.CompletedProcess[bytes], code: int, *words: str) -> None:
    """Assert the exit code, one clear message, and no traceback."""
    message = result.stderr.decode("utf-8", "replace")
    assert result.returncode == code, message
    assert "Traceback" not in message
    assert message.startswith("edgedec: ")
    for word in words:
        assert word in message


def test_text_on_stdout_and_all_else_on_stderr(tiny_path: Path) -> None:
    """The text alone is on standard output; the summary is on standard error, and -q leaves it out."""
    loud = edgedec("run", tiny_path, "hello", *SHORT)
    quiet = edgedec("run", tiny_path, "hello", *SHORT, "-q")
    assert loud.returncode == quiet.returncode == 0
    assert loud.stdout == quiet.stdout
    assert b"tokens/s" in loud.stderr
    assert quiet.stderr == b""


def test_prompt_from_argument_file_and_pipe(tiny_path: Path, tmp_path: Path) -> None:
    """A prompt gives the same text however it comes in."""
    file = tmp_path / "prompt with späces.txt"
    file.write_text("hello", encoding="utf-8")
    outputs = {
        edgedec("run", tiny_path, "hello", *SHORT, "-q").stdout,
        edgedec("run", tiny_path, "-f", file, *SHORT, "-q").stdout,
        edgedec("run", tiny_path, *SHORT, "-q", stdin=b"hello").stdout,
    }
    assert len(outputs) == 1


def test_json_is_one_object(tiny_path: Path, tmp_path: Path) -> None:
    """--json prints one JSON object and nothing else; --json-out writes the same."""
    out = tmp_path / "out.json"
    result = edgedec("run", tiny_path, "hello", *SHORT, "--json", "--json-out", out, "--logprobs", "2")
    document = json.loads(result.stdout)
    assert document == json.loads(out.read_text(encoding="utf-8"))
    assert document["finish_reason"] == "length"
    assert len(document["token_ids"]) == len(document["logprobs"]) == 8
    assert document["stats"]["n_generated_tokens"] == 8


def test_options_by_environment(tiny_path: Path) -> None:
    """An option can come from an environment variable."""
    env = {"EDGEDEC_MAX_TOKENS": "3", "EDGEDEC_TEMPERATURE": "0", "EDGEDEC_IGNORE_END": "1", "EDGEDEC_CONTEXT": "128"}
    document = json.loads(edgedec("run", tiny_path, "hello", "--json", env=env).stdout)
    assert len(document["token_ids"]) == 3


def test_temperature_zero_is_not_dropped(tiny_path: Path) -> None:
    """-t 0 is greedy: two runs without a seed give one text."""
    first, second = (edgedec("run", tiny_path, "hello", *SHORT, "-q").stdout for _ in range(2))
    assert first == second != b""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--temperature", "-1"], 40, ["temperature is -1.0"]),
        (["--logit-bias", "x"], 40, ["TOKEN_ID=BIAS"]),
        (["--runtime", "nope"], 31, ["llamacpp"]),
        (["--draft", "nope"], 31, ["nope"]),
        (["--memory", "lots"], 40, ["900MB"]),
        (["--memory", "5MB"], 50, ["KV cache", "over by"]),
        (["--kv-type", "q9"], 40, ["q9"]),
        (["--chat-template", "/no/such/file"], 60, ["/no/such/file"]),
    ],
)
def test_bad_options(tiny_path: Path, arguments: list[str], code: int, words: list[str]) -> None:
    """Bad values end with the error's exit code and a message that names them."""
    refused(edgedec("run", tiny_path, "hello", "--context", "128", *arguments), code, *words)


def test_bad_models(tiny_path: Path, tmp_path: Path) -> None:
    """What is no model is told as what it is."""
    text, empty, cut = tmp_path / "text.gguf", tmp_path / "empty.gguf", tmp_path / "cut.gguf"
    text.write_text("just text", encoding="utf-8")
    empty.write_bytes(b"")
    cut.write_bytes(tiny_path.read_bytes()[:-5000])
    for path in (text, empty, cut, tmp_path):
        refused(edgedec("run", path, "hello"), 12)
        refused(edgedec("info", path), 12)
    refused(edgedec("run", tmp_path / "absent.gguf", "hello"), 11, "absent.gguf")
    refused(edgedec("run", "no-such-model-name", "hello", "--offline"), 11, "no-such-model-name")


def test_bad_prompts(tiny_path: Path, tmp_path: Path) -> None:
    """Invalid UTF-8, an empty prompt file and a prompt over the context are refused."""
    refused(edgedec("run", tiny_path, "--context", "128", stdin=b"a\xff"), 40, "UTF-8")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\xff")
    assert edgedec("run", tiny_path, "-f", bad, "--context", "128").returncode in (40, 60)
    refused(edgedec("run", tiny_path, "x" * 500, "--context", "128"), 41, "128")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ 'a' * 10 ** 12 }}",
    ],
)
def test_hostile_chat_templates(tiny_path: Path, tmp_path: Path, source: str) -> None:
    """A template that loops, reaches for attributes, is malformed or grows without end is an error."""
    template = tmp_path / "template.jinja"
    template.write_text(source, encoding="utf-8")
    refused(edgedec("run", tiny_path, "hello", "--context", "128", "--chat-template", template), 43)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX pipe")
def test_a_closed_pipe_ends_quietly(tiny_path: Path) -> None:
    """A reader that has had enough ends the command without a word."""
    arguments = ["run", str(tiny_path), "hello", "--context", "2048", "-t", "0", "--ignore-end", "-q"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(3)
    process.stdout.close()
    message = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert message == b""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_interrupt_keeps_the_text_so_far(tiny_path: Path) -> None:
    """Ctrl-C ends the generation; text and summary so far are printed, and the exit code says so."""
    arguments = ["run", str(tiny_path), "hello", "--context", "2048", "-t", "0", "--ignore-end"]
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 53
    assert b"tokens/s" in message
    assert b"Traceback" not in message


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_consoles_that_lack_characters(tiny_path: Path, env: dict[str, str]) -> None:
    """Text that the console's encoding lacks is replaced, not a crash."""
    result = edgedec("run", tiny_path, "héllo ☃", *SHORT, env=env)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr


def test_chat_from_a_pipe_answers_each_line(tiny_path: Path) -> None:
    """Each line is a message of one conversation."""
    result = edgedec("chat", tiny_path, *SHORT, stdin=b"one\ntwo\n")
    assert result.returncode == 0
    assert len(re.findall(rb"tokens/s", result.stderr)) == 2


def test_prompt_cache_is_made_and_reused(tiny_path: Path, tmp_path: Path) -> None:
    """The second run starts from the first one's KV; a foreign file is never overwritten."""
    cache = tmp_path / "cache"
    first = json.loads(edgedec("run", tiny_path, "hello", *SHORT, "--prompt-cache", cache, "--json").stdout)
    second = json.loads(edgedec("run", tiny_path, "hello", *SHORT, "--prompt-cache", cache, "--json").stdout)
    assert first["stats"]["n_reused_tokens"] == 0
    assert second["stats"]["n_reused_tokens"] > 0
    assert second["text"] == first["text"]
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    edgedec("run", tiny_path, "hello", *SHORT, "--prompt-cache", notes)
    assert notes.read_text(encoding="utf-8") == "mine"


def test_info_doctor_list_and_version(tiny_path: Path, tmp_path: Path) -> None:
    """The commands that only tell answer in text and in JSON."""
    env = {"EDGEDEC_CACHE": str(tmp_path), "EDGEDEC_MODELS": str(tiny_path.parent)}
    for command in (["info", str(tiny_path)], ["doctor"], ["list"], ["show", tiny_path.stem]):
        assert edgedec(*command, env=env).returncode == 0
        assert json.loads(edgedec(*command, "--json", env=env).stdout)
    assert b"tiny" in edgedec("list", env=env).stdout
    assert re.fullmatch(rb"[\d.]+\s*", edgedec("--version").stdout)
    refused(edgedec("rm", "tiny", env=env), 11)
    assert tiny_path.exists()


def test_a_broken_plug_in_is_a_line_in_doctor(tmp_path: Path) -> None:
    """A plug-in that fails to import is listed with its reason, and nothing else suffers."""
    package = tmp_path / "broken-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    (package / "entry_points.txt").write_text("[edgedec.drafters]\nbad = no_such_module:X\n", encoding="utf-8")
    result = edgedec("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0
    assert b"no_such_module" in result.stdout
    assert b"broken 1.0" in result.stdout


@pytest.mark.model
def test_the_real_model_answers(smollm_path: Path) -> None:
    """The 135M model answers a question through its own chat template."""
    result = edgedec("run", smollm_path, "Why is the sky blue?", "-t", "0", "-n", "12", "-q")
    assert result.stdout.decode().startswith("The sky is blue because of")

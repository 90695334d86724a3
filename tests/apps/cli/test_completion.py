"""Tab completion by the protocols of bash, zsh and fish: values, speed, and what is installed for a shell."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.processes.command_line import run_here, run_process

from edgedec.plugins import DRAFTERS, RUNTIMES, plugins
from edgedec.verification.rules import rule_names
from edgedec_apps.cli import completion
from edgedec_apps.cli.commands import SUMMARIES

pytestmark = pytest.mark.slow

REPOSITORY = "hf:someone/tiny-GGUF"
INSTALLED = {
    "bash": ".bash_completions/edgedec.sh",
    "zsh": ".zfunc/_edgedec",
    "fish": ".config/fish/completions/edgedec.fish",
}


@pytest.fixture(autouse=True)
def _stored(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one's own, one in the cache, one of a hub, and a preset; what bash is told stays in this test."""
    own, hub = tmp_path / "mine", cache / "models" / "hf" / "someone" / "tiny-GGUF" / "main"
    for folder in (own, hub, tmp_path / "config" / "presets"):
        folder.mkdir(parents=True)
    for file in (own / "my-own.gguf", cache / "models" / "my-model.gguf", hub / "tiny-Q4_K_M.gguf"):
        file.write_bytes(b"GGUF")
    (tmp_path / "config" / "presets" / "my-preset.toml").write_text('model = "my-own"\n')
    monkeypatch.setenv("EDGEDEC_MODELS", str(own))
    for name in ("_EDGEDEC_BEGINNING", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.setenv(name, "")


def bash(*words: str) -> Mapping[str, str]:
    """Return what bash's script puts into the environment when the last of these words is to be completed."""
    return {"_EDGEDEC_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}


def completed(*words: str) -> list[str]:
    """Return the completions of the last word of a line, by bash's protocol."""
    result = run_here(env=bash("edgedec", *words))
    assert (result.code, result.err) == (0, "")
    return result.text.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ru",), ["run"]),
        (("run", "my-"), ["my-model", "my-own", "my-preset"]),
        (("run", "smollm2-13"), ["smollm2-135m"]),
        (("rm", "smollm2-13"), []),
        (("rm", "my-p"), ["my-preset"]),
        (("serve", "my-own", "my-m"), ["my-model"]),
        (("run", "x", "--draft-option", "model=my-o"), ["my-own"]),
        (("run", "x", "--draft-option", "head=o"), ["off"]),
        (("run", "x", "--draft-option", "model", "=", "my-o"), ["my-own"]),
        (("run", "x", "--draft-option", "ma"), ["max="]),
        (("run", "x", "--method", "sl"), ["slide"]),
        (("run", "x", "--method", "diffusion", ":", "thr"), ["threshold"]),
        (("run", "x", "--draft", "re"), ["recycling"]),
        (("run", "x", "--draft", "suffix+re"), ["suffix+recycling"]),
        (("run", "x", "--draft", "recycling+re"), []),
        (("run", "x", "--draft", "=", "a"), ["auto"]),
        (("run", "x", "--draft", "="), ["auto", "off", *plugins(DRAFTERS)]),
        (("run", "x", "--runtime", ""), ["auto", *plugins(RUNTIMES)]),
        (("run", "x", "--kv-type", "q"), ["q8_0", "q8_0/q4_0", "q4_0"]),
        (("run", "x", "--kv-t"), ["--kv-type"]),
        (("run", "x", "--draft-option", "rule="), rule_names()),
        (("export", "x", "--type", "q4_k"), ["q4_k_M", "q4_k_S"]),
        (("run", "h"), [f"{REPOSITORY}:tiny-Q4_K_M.gguf"]),
        (("run", "hf", ":"), ["someone/tiny-GGUF:tiny-Q4_K_M.gguf"]),
        (("run", "hf", ":", "some"), ["someone/tiny-GGUF:tiny-Q4_K_M.gguf"]),
        (("run", "hf", ":", "a/b", ":", "Q4"), ["Q4_K_M", "Q4_0", "Q4_K_S"]),
        (("run", "hf", ":", "someone/tiny-GGUF", ":", "t"), ["tiny-Q4_K_M.gguf"]),
        (("run", "hf", ":", "a/b", "--kv-type", "g"), ["gear"]),
        (("run", "./m"), []),
        (("run", "x", "a prompt"), []),
    ],
)
def test_words_are_completed(words: tuple[str, ...], expected: list[str]) -> None:
    """Names and values that begin so; nothing, so that the shell completes files, where none does."""
    assert completed(*words) == expected


def test_types_of_exports_are_those_that_there_are() -> None:
    """The list of completion is the list of the export."""
    from edgedec_export.requantize import TYPES

    assert set(completion.EXPORTED_TYPES.split()) == set(TYPES)


@pytest.mark.parametrize(
    ("shell", "variables", "expected"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "edgedec run my-"}, '"my-model"\n"my-own"\n"my-preset"'),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "edgedec run hf:some"}, r'"hf\\:someone/tiny-GGUF\\:tiny-Q4_K_M.gguf"'),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "edgedec run hf:a/b:Q8"}, r'"hf\\:a/b\\:Q8_0"'),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "edgedec run x --draft suffix+tri"}, '"suffix+trigram"'),
        ("fish", {"_TYPER_COMPLETE_ARGS": "edgedec run my-"}, "my-model\nmy-own\nmy-preset\n"),
        ("fish", {"_TYPER_COMPLETE_ARGS": "edgedec run hf:a/b:Q8"}, "hf:a/b:Q8_0\n"),
    ],
)
def test_zsh_and_fish(shell: str, variables: dict[str, str], expected: str) -> None:
    """The same names in the forms of these shells, which don't end words at colons."""
    env = {"_EDGEDEC_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"} | variables
    result = run_here(env=env)
    assert (result.code, result.err) == (0, "")
    assert expected in result.text


def test_a_damaged_catalogue_is_no_obstacle(tmp_path: Path) -> None:
    """What can't be found out is left out, without a word in the person's line."""
    (tmp_path / "config" / "catalogue.toml").write_text("[[")
    assert completed("run", "my-") == ["my-model", "my-own", "my-preset"]
    assert completed("run", "smollm2") == []


@pytest.mark.parametrize("words", [("run", "my-"), ("run", "x", "--draft", "s"), ("export", "x", "--type", "Q")])
def test_completion_is_fast(words: tuple[str, ...]) -> None:
    """A press of Tab imports neither numpy nor the engine, and no library for terminals."""
    result = run_process(env={**bash("edgedec", *words), "PYTHONVERBOSE": "1"})
    imported = {line.split("'")[1] for line in result.err.splitlines() if line.startswith("import '")}
    assert result.out
    assert "edgedec_apps.cli.completion" in imported
    assert not imported & {"numpy", "rich", "prompt_toolkit", "huggingface_hub", "httpx", "edgedec.api.engine"}


@pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")
@pytest.mark.parametrize("shell", INSTALLED)
def test_completion_is_installed(tmp_path: Path, shell: str) -> None:
    """--install-completion writes the script of the shell below the home folder, and keeps what is in its settings."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("mine")
    (home / ".zshrc").write_text("mine")
    env = {"HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    result = run_process("--install-completion", shell, env=env)
    assert (result.code, result.err) == (0, "")
    script = (home / INSTALLED[shell]).read_text()
    assert f"_EDGEDEC_COMPLETE=complete_{shell}" in script
    assert (home / ".bashrc").read_text().startswith("mine")
    assert (home / ".zshrc").read_text().startswith("mine")
    if shutil.which(shell) is not None and shell != "zsh":  # zsh completes in a terminal only
        assert _in_shell(shell, home, tmp_path) == ["my-model", "my-own", "my-preset"]


def _in_shell(shell: str, home: Path, tmp_path: Path) -> list[str]:
    """Return what a shell itself completes, with a command `edgedec` on its path."""
    program = tmp_path / "edgedec"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m edgedec_apps.cli "$@"\n')
    program.chmod(0o755)
    asks = {
        "bash": f". '{home}/.bash_completions/edgedec.sh'; COMP_WORDS=(edgedec run my-); COMP_CWORD=2; "
        '_edgedec_completion edgedec; printf "%s\\n" "${COMPREPLY[@]}"',
        "fish": 'complete -C "edgedec run my-"',
    }
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([shell, "-c", asks[shell]], env=os.environ | own, capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_every_command_can_be_completed() -> None:
    """The first word completes to all commands."""
    assert [word for word in completed("") if not word.startswith("-")] == list(SUMMARIES)

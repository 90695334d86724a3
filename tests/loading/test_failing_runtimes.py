"""Runtimes of other packages that fail while a runtime is chosen."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.models.gguf_writer import tiny_text_model, write_gguf
from support.models.tiny_models import N_VOCAB, tiny_llama

import edgedec
from edgedec import plugins
from edgedec.errors import ModelFormatError, ModelNotFoundError, RuntimeUnavailableError, UnsupportedModelError
from edgedec.gguf import file as gguf_file
from edgedec.gguf.header import read_header
from edgedec.load_options import LoadOptions
from edgedec.loading import runtime_choice as choosing
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.cpu.runtime import Cpu


class Broken:
    """A runtime of somebody else, with a fault."""

    name = "broken"

    def accepts(self, path: Path) -> str | None:
        raise ZeroDivisionError("division by zero")


class Unready:
    """A runtime that can't even be made."""

    def __init__(self) -> None:
        raise OSError("no such device")


class Willing:
    """A runtime that takes everything."""

    name = "willing"

    def accepts(self, path: Path) -> str | None:
        return None


def runtimes(monkeypatch: pytest.MonkeyPatch, **found: type) -> None:
    """Install these runtimes and no others."""
    listed = {
        name: plugins.Plugin(plugins.RUNTIMES, name, f"somewhere:{name}", f"package-of-{name} 1") for name in found
    }
    every, load = plugins.plugins, plugins.Plugin.load
    monkeypatch.setattr(plugins, "plugins", lambda group: listed if group == plugins.RUNTIMES else every(group))
    monkeypatch.setattr(plugins.Plugin, "load", lambda plugin: found.get(plugin.name) or load(plugin))
    monkeypatch.setattr(choosing, "_PREFERRED", ())


def test_a_runtime_that_fails_to_judge_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plug-in's accepts() raises is its refusal, with the exception's name and whom to tell."""
    model = write_gguf(tmp_path / "m.gguf", *tiny_text_model())
    reason = "ZeroDivisionError: division by zero (report it to package-of-broken 1)"
    runtimes(monkeypatch, broken=Broken, unready=Unready, willing=Willing)
    choice = choosing.choose_runtime(model, "auto")
    assert choice.runtime.name == "willing"
    assert choosing.other_machines("auto", {"mmap": False}) is None
    runtimes(monkeypatch, broken=Broken, unready=Unready)
    with pytest.raises(UnsupportedModelError) as refused:
        choosing.choose_runtime(model, "auto")
    unready = "OSError: no such device (report it to package-of-unready 1)"
    assert str(refused.value).endswith(f"broken: {reason}; unready: {unready}")


class Unable(Willing):
    """A runtime that takes everything, and can't be used on this machine, as its plan says."""

    name = "unable"

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        raise RuntimeUnavailableError("no GPU can be used")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        ({"tokenizer.ggml.tokens": ["a"] * N_VOCAB}, ModelFormatError, "^{path}: tokens 0 and 1 are both 'a'; the "),
        ({"llama.block_count": 3}, ModelFormatError, "^{path}: it has no tensor 'blk.2.*; download"),
        ({"llama.feed_forward_length": 64}, ModelFormatError, "^{path}: .*has the shape .64, 128., expected .64, 64."),
        ({"general.architecture": "falcon"}, UnsupportedModelError, "cpu: .*'falcon'.*; unable: no GPU can be used$"),
    ],
)
def test_the_fault_of_a_file_is_told_not_what_the_last_runtime_lacks(
    damage: dict[str, Any], error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file is called damaged; for another reason each refusal is told, the first runtime's first."""
    runtimes(monkeypatch, cpu=Cpu, unable=Unable)
    monkeypatch.setattr(choosing, "_PREFERRED", ("cpu",))
    path = tiny_llama(tmp_path / "m.gguf", more=damage)
    with pytest.raises(error, match=words.format(path=re.escape(str(path)))):
        choosing.choose_runtime(path, "auto", LoadOptions())


@pytest.mark.slow
def test_without_llama_cpp_the_refusal_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only llama.cpp runs is refused, where that is not installed, with what to install."""
    metadata, tensors = tiny_text_model()
    model = write_gguf(tmp_path / "m.gguf", metadata | {"general.architecture": "falcon"}, tensors)
    monkeypatch.setattr("edgedec_runtimes.llamacpp.runtime.installed", lambda: False)
    with pytest.raises(
        UnsupportedModelError, match=r"cpu: .*'falcon'.*; llamacpp: .*pip install \"llama-cpp-python<0.3.37,>=0.3.36\""
    ):
        choosing.choose_runtime(model, "auto")


@pytest.mark.slow
def test_a_load_parses_the_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing a runtime, planning and loading share one header, which is freed when the model is open."""
    model, parsed = tiny_llama(tmp_path / "m.gguf"), []

    def counting(*args: Any, **keywords: Any) -> Any:
        if args[0].name == str(model):  # draft heads that are found have headers, too
            parsed.append(args)
        return read_header(*args, **keywords)

    monkeypatch.setattr(gguf_file, "read_header", counting)
    for n_expected in (1, 2):
        with edgedec.load(model, memory="1GB", cache_dir=tmp_path / "cache"):
            assert len(parsed) == n_expected
    assert len(gguf_file.read_gguf(model).tensors) > 0
    assert len(parsed) == 3


def test_a_changed_file_is_parsed_again(tmp_path: Path) -> None:
    """As long as a header is referenced it is shared, unless the file was replaced or a part of it is gone."""
    path = tiny_llama(tmp_path / "m.gguf")
    first = gguf_file.read_gguf(path)
    assert gguf_file.read_gguf(str(path)) is first
    os.utime(path, ns=(1, 1))
    second = gguf_file.read_gguf(path)
    assert second is not first
    assert second.header_hash == first.header_hash
    path.unlink()
    with pytest.raises(ModelNotFoundError):
        gguf_file.read_gguf(path)


class Wordless(Broken):
    """A runtime that refuses a file without a word."""

    def accepts(self, path: Path) -> str | None:
        """Raise an error that has no message."""
        raise UnsupportedModelError


def test_a_refusal_without_words_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime whose error has no message is named among those that refuse."""
    runtimes(monkeypatch, wordless=Wordless, unready=Unready)
    metadata, tensors = tiny_text_model()
    with pytest.raises(UnsupportedModelError, match="wordless: ; unready: OSError"):
        choosing.choose_runtime(write_gguf(tmp_path / "m.gguf", metadata, tensors), "auto")

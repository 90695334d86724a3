"""Runtimes of other packages that fail while a runtime is chosen."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.models.gguf_writer import tiny_text_model, write_gguf
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec import plugins
from edgedec.errors import ModelNotFoundError, UnsupportedModelError
from edgedec.gguf import file as gguf_file
from edgedec.gguf.header import read_header
from edgedec.loading import runtime_choice as choosing


class Broken:
    """A runtime of somebody else, with a fault."""

    name = "broken"

    def accepts(self, path: Path) -> str | None:
        """Fail."""
        raise ZeroDivisionError("division by zero")


class Unready:
    """A runtime that can't even be made."""

    def __init__(self) -> None:
        raise OSError("no such device")


class Willing:
    """A runtime that takes everything."""

    name = "willing"

    def accepts(self, path: Path) -> str | None:
        """Take it."""
        return None


def runtimes(monkeypatch: pytest.MonkeyPatch, **found: type) -> None:
    """Install these runtimes and no others."""
    listed = {
        name: plugins.Plugin(plugins.RUNTIMES, name, f"somewhere:{name}", f"package-of-{name} 1") for name in found
    }
    monkeypatch.setattr(plugins, "plugins", lambda group: listed)
    monkeypatch.setattr(plugins.Plugin, "load", lambda plugin: found[plugin.name])
    monkeypatch.setattr(choosing, "_PREFERRED", ())


def test_a_runtime_that_fails_to_judge_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plug-in's accepts() raises is its refusal, with the exception's name and whom to tell."""
    model = write_gguf(tmp_path / "m.gguf", *tiny_text_model())
    reason = "ZeroDivisionError: division by zero (report it to package-of-broken 1)"
    runtimes(monkeypatch, broken=Broken, unready=Unready, willing=Willing)
    choice = choosing.choose_runtime(model, "auto")
    assert choice.runtime.name == "willing"
    runtimes(monkeypatch, broken=Broken, unready=Unready)
    with pytest.raises(UnsupportedModelError) as refused:
        choosing.choose_runtime(model, "auto")
    unready = "OSError: no such device (report it to package-of-unready 1)"
    assert str(refused.value).endswith(f"broken: {reason}; unready: {unready}")


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

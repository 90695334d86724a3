"""Options that one runtime has: what is given is read by the types that the runtime declares, and refused otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import OptionError, RequestError
from edgedec.load_options import LoadOptions, NoOptions, known_to, own_options, read_options
from edgedec.loading.runtime_choice import choose_runtime
from edgedec_runtimes.cpu.options import CpuOptions
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.onnx.runtime import Onnx


@dataclass(frozen=True, slots=True)
class Options:
    """Options of each type that there may be."""

    flag: bool = True
    wish: bool | None = None
    size: int = 4
    seconds: float = 0.0
    name: str | None = None
    mode: Literal["auto", "off"] = "auto"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Options()),
        ({"flag": "no", "wish": "on", "size": "8", "seconds": "0.5"}, Options(False, True, 8, 0.5)),
        ({"name": "x", "mode": "off"}, Options(name="x", mode="off")),
        ({"flag": False, "wish": None, "size": 8, "seconds": 2, "name": None}, Options(False, None, 8, 2, None)),
    ],
)
def test_values_are_read_by_their_types(given: Mapping[str, object], expected: Options) -> None:
    """Numbers and truth values may be texts, as the command line gives them; what is not given has its default."""
    assert read_options(Options, given, "the runtime") == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flag": "maybe"}, "flag is 'maybe'; it must be yes or no"),
        ({"size": "many"}, "size is 'many'; it must be a whole number"),
        ({"size": True}, "size is True; it must be a whole number"),
        ({"seconds": "soon"}, "seconds is 'soon'; it must be a number"),
        ({"name": 5}, "name is 5; it must be a text"),
        ({"mode": "on"}, "mode is 'on'; it must be auto or off"),
    ],
)
def test_other_values_are_refused(given: Mapping[str, object], words: str) -> None:
    """The error says what the option takes."""
    with pytest.raises(OptionError, match=words):
        read_options(Options, given, "the runtime")


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    """The error lists those that there are; of a runtime without options of its own it says that."""
    with pytest.raises(RequestError, match=r"'flags'; did you mean flag\?; its own are flag, wish, size, seconds"):
        read_options(Options, {"flags": True}, "the runtime")
    with pytest.raises(RequestError, match=r"^the runtime has no option 'flags'; leave it out"):
        read_options(NoOptions, {"flags": True}, "the runtime")
    model = tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(RequestError, match="the cpu runtime has no option 'repack'; its own are mmap, tile_cache, hug"):
        edgedec.load(model, runtime="cpu", runtime_options={"repack": False})


def test_auto_takes_a_runtime_that_has_the_option(tmp_path: Path) -> None:
    """The cpu runtime comes first, and does not know how llama.cpp rearranges weights."""
    pytest.importorskip("llama_cpp")
    model = tiny_llama(tmp_path / "tiny.gguf")
    for given, name in (({}, "cpu"), ({"huge_pages": "off"}, "cpu"), ({"repack": False}, "llamacpp")):
        assert choose_runtime(model, "auto", LoadOptions(runtime_options=given)).runtime.name == name


def test_another_model_gets_the_options_that_its_runtime_has() -> None:
    """A draft model may run on another runtime than its target."""
    assert own_options(Cpu()) is CpuOptions
    assert own_options(object()) is own_options(Onnx()) is NoOptions
    assert known_to(Cpu(), {"mmap": False, "repack": False}) == {"mmap": False}
    assert known_to(LlamaCpp(), {"mmap": False, "rpc": "a:1", "rpc_wait": 5.0}) == {"mmap": False}  # it stays here

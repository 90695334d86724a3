"""Where no GPU can be used, one sentence says what to install; and what a plan says of a GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.loading import comparison as comparing
from edgedec.loading.comparison import Measured
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory.planner import plan_within
from edgedec.memory.setting import Cap
from edgedec_export.cached import graph_bytes, make_graph
from edgedec_export.webgpu import finding
from edgedec_export.webgpu import runtime as webgpu
from edgedec_export.webgpu.finding import Found, VulkanDevice

_INLINE_BYTES = 20_000  # of vectors and scales that are small enough to lie in the graph itself
CARD = Found("1.32", devices=[VulkanDevice("A Card", "discrete", 8_000_000_000, 7_000_000_000)])


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Look for a GPU in each test."""
    finding.gpu_report.cache_clear()


def card(monkeypatch: pytest.MonkeyPatch, told: Found = CARD) -> None:
    """Let a GPU be found."""
    monkeypatch.setattr(webgpu, "gpu_report", lambda: told)
    monkeypatch.setattr(webgpu, "require", lambda: told)


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime is the last that is asked for `gpu`, so that its sentence is the one that a person sees."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError) as caught:
        choose_runtime(path, "webgpu", LoadOptions()).runtime.plan(path, LoadOptions(device="gpu"))
    assert str(caught.value).startswith(
        "no GPU can be used: the package onnxruntime-ep-webgpu is not installed; pip install "
    )


def test_a_driver_that_ends_the_process_that_looks_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that asked goes on."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n", encoding="utf-8")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    assert finding.look().refusal == (
        "the card's driver can't be used: it ended the process that tried it (SIGSEGV); update the driver"
    )


def test_an_answer_that_is_none_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a driver's words in place of the answer."""
    python = tmp_path / "python"
    for answer in ("", "no device", '{"devices": 3}', "[]"):
        python.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        assert "ended with status 0; update the driver" in finding.look().refusal


def test_a_plan_has_the_gpus_memory_and_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, keys and values are the GPU's; where they do not fit there, nothing else is tried."""
    card(monkeypatch)
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"])
    options = LoadOptions(n_ctx=64, device="gpu", cache_dir=tmp_path / "cache")
    wishes = LoadPlan(path, webgpu.WebGpu(), options=options)
    plan = plan_within(wishes, Cap(2_000_000_000, gpu_bytes=1_000_000_000)).memory
    held = {term.name: term.n_bytes for term in plan.terms if term.device == "WebGPU"}
    assert held.keys() == {"weights", "KV cache", "activations", "driver"}
    assert plan.fits
    assert "the first load makes it in the cache" in plan.table()
    assert not plan_within(wishes, Cap(2_000_000_000, gpu_bytes=200_100_000)).memory.fits


@pytest.mark.slow
@pytest.mark.parametrize("types", [("F16",), ("Q8_0",), ("Q4_K", "Q6_K"), ("Q5_K", "Q4_0")])
def test_the_size_of_a_graph_is_known_before(tmp_path: Path, types: tuple[str, ...]) -> None:
    """Within the gaps between tensors in the file, and never below what the weights take."""
    pytest.importorskip("onnx")
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["qwen2"], types=types))
    data = make_graph(path, LoadOptions(cache_dir=tmp_path)) / "model.onnx.data"
    gaps = data.stat().st_size - graph_bytes(path)
    assert 0 <= gaps + _INLINE_BYTES <= _INLINE_BYTES + 6 * 4096 * len(read_gguf(path).tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(device="CUDA0"), "device is 'CUDA0'"),
        (LoadOptions(n_gpu_layers=3), "has all layers on the GPU"),
        (LoadOptions(device="auto"), "no graph of m.gguf was made yet"),
    ],
)
def test_what_it_cannot_honour_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: LoadOptions, message: str
) -> None:
    """Other devices, a part of the layers, and choosing by speed where a graph would have to be made first."""
    card(monkeypatch)
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"])
    with pytest.raises(RequestError, match=message):
        webgpu.WebGpu().plan(path, options)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "taken"), [(0.5, "webgpu"), (1.0, "cpu")])
def test_auto_takes_a_gpu_only_where_it_was_measured_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, taken: str
) -> None:
    """The cpu runtime is compared with every other one that takes the options."""
    pytest.importorskip("onnx")
    card(monkeypatch)
    times = {"cpu": 1.0, "webgpu": factor}
    monkeypatch.setattr(
        comparing, "measure", lambda path, runtime, *_, **__: Measured({1: 0.02 * times[runtime.name]}, 0.01)
    )
    path, options = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"]), LoadOptions(cache_dir=tmp_path)
    make_graph(path, options)
    choice = choose_runtime(path, "auto", replace(options, device="auto"), measure=True)
    assert (choice.runtime.name, "webgpu: " in choice.reason) == (taken, True)

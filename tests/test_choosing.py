"""Choosing between two runtimes that both take a model: measured once, remembered, said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_llama

import edgedec
from edgedec import choosing
from edgedec.errors import CancelledError, PluginError, RequestError, RuntimeUnavailableError
from edgedec.model import LoadOptions, Runtime
from edgedec.progress import CancelToken
from edgedec_runtimes.llamacpp import LlamaCpp


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that cpu and llamacpp both take."""
    return tiny_llama(tmp_path / "m.gguf")


def speeds(monkeypatch: pytest.MonkeyPatch, **seconds: float | None) -> list[str]:
    """Let each runtime's step take so long; return the names of those measured."""
    measured: list[str] = []

    def step_seconds(path: Path, runtime: Runtime, *_: Any, **__: Any) -> float | None:
        measured.append(runtime.name)
        return seconds[runtime.name]

    monkeypatch.setattr(choosing, "_step_seconds", step_seconds)
    return measured


def test_the_faster_one_is_taken_and_remembered(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison per model and options; a lookup that may not measure sees its outcome."""
    options = LoadOptions(cache_dir=tmp_path / "cache")
    assert choosing.choose_runtime(model, "auto", options).reason == ""
    measured = speeds(monkeypatch, cpu=0.004, llamacpp=0.002)
    for measure in (True, False, True):
        choice = choosing.choose_runtime(model, "auto", options, measure=measure)
        assert choice.runtime.name == "llamacpp"
        assert choice.reason == "measured: 4.0 ms a token on cpu, 2.0 on llamacpp"
    assert measured == ["cpu", "llamacpp"]
    assert choosing.choose_runtime(model, "auto", replace(options, n_threads=1)).reason == ""
    assert choosing.choose_runtime(model, "cpu", options, measure=True).runtime.name == "cpu"
    # What the winner can't do leaves the other one.
    assert choosing.choose_runtime(model, "auto", replace(options, n_gpu_layers=-1)).runtime.name == "cpu"


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (0.0039, "measured: 4.0 ms a token on cpu, 3.9 on llamacpp"),
        (None, "cpu: 4.0 ms a token; llamacpp took too long to load"),
    ],
)
def test_nearly_equal_or_unknown_is_no_reason_to_change(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: float | None, reason: str
) -> None:
    """The first is the one that can do everything."""
    speeds(monkeypatch, cpu=0.004, llamacpp=theirs)
    choice = choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path / "cache"), measure=True)
    assert (choice.runtime.name, choice.reason) == ("cpu", reason)


def test_a_real_comparison_tells_both_figures(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics say what was found, when there is time for both; a second load finds it in the cache."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(choosing, "_LIMIT_S", 600.0)
    reasons = []
    for _ in range(2):
        with edgedec.load(model, cache_dir=tmp_path / "cache") as engine:
            stats = engine.generate("a", max_tokens=2).stats
            reasons.append((stats.runtime, stats.runtime_reason))
    assert "ms a token on cpu" in reasons[0][1]
    assert reasons[0] == reasons[1]
    with edgedec.load(model, cache_dir=tmp_path / "other", memory="1GB") as engine:
        assert engine.generate("a", max_tokens=2).stats.runtime_reason == ""


def test_damage_in_the_cache_is_measured_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lies there ends a load."""
    options = LoadOptions(cache_dir=tmp_path / "cache")
    measured = speeds(monkeypatch, cpu=0.004, llamacpp=0.008)
    choosing.choose_runtime(model, "auto", options, measure=True)
    (file,) = (tmp_path / "cache" / "probes").glob("runtimes-*.json")
    for damage in ("{", "[]", "{}", '{"cpu": "soon"}'):
        file.write_text(damage)
        assert choosing.choose_runtime(model, "auto", options, measure=True).runtime.name == "cpu"
    assert measured == ["cpu", "llamacpp"] * 5


def test_a_cancelled_load_ends_the_comparison(model: Path, tmp_path: Path) -> None:
    """Ctrl-C while runtimes are compared is not taken for a slow runtime."""
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, cancel=token), measure=True)
    with pytest.raises(PluginError, match="fastest"):
        choosing.choose_runtime(model, "fastest")


def test_a_value_that_no_runtime_takes_is_refused_with_what_each_takes(model: Path) -> None:
    """Once, where all take the same; a device is refused in the words of the last one asked, which lists them."""
    pytest.importorskip("llama_cpp")
    for options, words in (
        (
            {"kv_type": "q9"},
            "kv_type is 'q9'; the cpu runtime takes f16, q8_0, q4_0, gear; the llamacpp runtime takes f32,",
        ),
        ({"n_threads": 999}, "n_threads is 999; it must be from 1 to 256$"),
    ):
        with pytest.raises(RequestError, match=f"^{words}"):
            edgedec.load(model, **options)
    with pytest.raises(RuntimeUnavailableError, match=r"^llama.cpp knows no device 'x'; it knows CPU"):
        edgedec.load(model, device="x")


def test_a_value_that_the_only_runtime_does_not_take(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other one installed, the value is what is wrong, not the model; why it is out is said, too."""
    monkeypatch.setattr(LlamaCpp, "accepts", _absent)
    words = "kv_type is 'q9'; the cpu runtime takes f16, q8_0, q4_0, gear; llamacpp: not installed"
    with pytest.raises(RequestError, match=f"^{words}"):
        edgedec.load(model, kv_type="q9")


def _absent(*_: object) -> str:
    raise RuntimeUnavailableError("not installed")

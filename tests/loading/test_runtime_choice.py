"""Choosing between two runtimes that both take a model: measured once, remembered, said."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import CancelledError, PluginError, RequestError, RuntimeUnavailableError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tile_form import TiledForm
from edgedec.load_options import LoadOptions
from edgedec.loading import comparison as comparing
from edgedec.loading import runtime_choice as choosing
from edgedec.loading.comparison import Measured, is_faster
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model
from edgedec.progress import CancelToken
from edgedec.runtime import Runtime, RuntimeReport
from edgedec.storage import probe_cache
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody know which runtime is faster on this processor."""
    monkeypatch.setattr(Cpu, "is_fastest", False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that cpu and llamacpp both take."""
    return tiny_llama(tmp_path / "m.gguf")


CPU = Measured({1: 0.0343, 2: 0.0372, 4: 0.0430, 8: 0.0500}, 0.0053, 8, 1074_000_000)
LLAMACPP = Measured({1: 0.0317, 2: 0.0500, 4: 0.0919, 8: 0.2219}, 0.0095, 8, 2044_000_000)
"""A machine with fast memory: llama.cpp's single token is the faster one, its forwards of several rows are not."""


def speeds(monkeypatch: pytest.MonkeyPatch, **found: Measured | None) -> list[str]:
    """Let each runtime be measured so; return the names of those measured."""
    names: list[str] = []

    def measured(path: Path, runtime: Runtime, *_: Any, **__: Any) -> Measured | None:
        names.append(runtime.name)
        return found[runtime.name]

    monkeypatch.setattr(comparing, "measure", measured)
    return names


def alike(factor: float, measured: Measured = CPU) -> Measured:
    """Return a runtime that takes so many times as long for everything."""
    assert measured.prompt_s is not None
    seconds = {n: factor * seconds for n, seconds in measured.seconds.items()}
    return replace(measured, seconds=seconds, prompt_s=factor * measured.prompt_s)


@pytest.mark.slow
def test_the_faster_one_is_taken_and_remembered(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comparison per machine and options; a lookup that may not measure, and another model, see its outcome."""
    options = LoadOptions(cache_dir=tmp_path / "cache")
    assert choosing.choose_runtime(model, "auto", options).reason == ""
    measured = speeds(monkeypatch, cpu=CPU, llamacpp=alike(0.5))
    for measure in (True, False, True):
        choice = choosing.choose_runtime(model, "auto", options, measure=measure)
        assert choice.runtime.name == "llamacpp"
        assert choice.reason == (
            "cpu: 34.3 ms a token, 17.7 with drafts as expected, 5.3 a token of a prompt, 1074.0 MB; "
            "llamacpp: 17.1 ms a token, 8.9 with drafts as expected, 2.6 a token of a prompt, 1074.0 MB"
        )
    other = tiny_llama(tmp_path / "other.gguf", n_layer=3)
    assert choosing.choose_runtime(other, "auto", options, measure=True).runtime.name == "llamacpp"
    assert measured == ["cpu", "llamacpp"]
    assert choosing.choose_runtime(model, "auto", replace(options, n_threads=1)).reason == ""
    assert choosing.choose_runtime(model, "auto", replace(options, runtime_options={"repack": False})).reason == ""
    assert choosing.choose_runtime(model, "cpu", options, measure=True).runtime.name == "cpu"
    # What the winner can't do leaves the other one.
    assert choosing.choose_runtime(model, "auto", replace(options, n_gpu_layers=-1)).runtime.name == "cpu"


@pytest.mark.slow
def test_the_choice_does_not_depend_on_the_drafting(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runtime may write another text: with and without drafts, and for any context, the same is measured."""
    seen: list[LoadOptions] = []

    class Seen(Cpu):
        def load(self, path: Path, options: LoadOptions) -> Model:
            seen.append(replace(options, cancel=None))
            return super().load(path, options)

        def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
            seen.append(replace(options, cancel=None))
            return super().plan(path, options)

    found = []
    for options in (LoadOptions(max_rows=1), LoadOptions(max_rows=16, n_ctx=64, n_parallel=3, planning_bytes=1)):
        seen.clear()
        comparing.measure(model, Seen(), options, 600.0, load_limited=False, matters=lambda _: True)
        found.append(list(seen))
    assert found[0] == found[1]
    assert [(options.n_ctx, options.max_rows) for options in found[0]] == [(40, 16), (None, 16)]

    speeds(monkeypatch, cpu=CPU, llamacpp=alike(0.5))
    cache = tmp_path / "cache"
    choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=cache, max_rows=16), measure=True)
    assert choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=cache, max_rows=1)).runtime.name == "llamacpp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (alike(0.97), "; llamacpp: 33.3 ms a token, 17.2 with drafts as expected, 5.1 a token of a prompt, 1074.0 MB"),
        # It is faster for one token, but slow for several rows and prompts, and large.
        (LLAMACPP, "; llamacpp: 31.7 ms a token, 28.6 with drafts as expected, 9.5 a token of a prompt, 2044.0 MB"),
        (None, "; llamacpp took too long to load"),
    ],
)
def test_drafts_prompts_and_memory_count_and_nearly_equal_is_no_reason_to_change(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: Measured | None, reason: str
) -> None:
    """The first is the one that can do everything."""
    speeds(monkeypatch, cpu=CPU, llamacpp=theirs)
    choice = choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path / "cache"), measure=True)
    assert (choice.runtime.name, choice.slower, choice.reason) == ("cpu", None, CPU.text("cpu") + reason)


@pytest.mark.parametrize("busy", ["cpu", "llamacpp"])
def test_nothing_is_kept_of_a_busy_machine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    """859.8 ms a token of a model of 135M was kept, and told at every start."""
    pytest.importorskip("llama_cpp")
    options = LoadOptions(cache_dir=tmp_path / "cache")
    found = {"cpu": CPU, "llamacpp": alike(0.5)}
    measured = speeds(monkeypatch, **found | {busy: replace(found[busy], is_quiet=False)})
    for _ in range(2):
        choice = choosing.choose_runtime(model, "auto", options, measure=True)
        assert (choice.runtime.name, choice.reason) == ("cpu", "")
    assert measured == ["cpu", "llamacpp"][: 1 + (busy == "llamacpp")] * 2  # none is measured in vain
    assert not list(tmp_path.glob("cache/probes/runtimes-*"))


def test_what_is_known_is_not_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels are faster than llama.cpp's without a GPU, and a GGUF that tiles took the place of is not made again.

    With a GPU the comparison is made.
    """
    pytest.importorskip("llama_cpp")
    measured = speeds(monkeypatch, cpu=CPU, llamacpp=alike(0.5))
    devices = ["BLAS", "CPU"]
    monkeypatch.setattr(LlamaCpp, "report", lambda self: RuntimeReport("1", tuple(devices)))
    with monkeypatch.context() as patch:
        patch.setattr(Cpu, "is_fastest", True)
        for folder, expected in (("without", "cpu"), ("with", "llamacpp")):
            options = LoadOptions(cache_dir=tmp_path / folder)
            assert choosing.choose_runtime(model, "auto", options, measure=True).runtime.name == expected
            assert measured == ([] if expected == "cpu" else ["cpu", "llamacpp"])
            devices.insert(0, "Vulkan0")
    tiled = replace(read_gguf(model), form=cast(TiledForm, object()))
    monkeypatch.setattr(choosing, "read_header_of", lambda path: tiled)
    choice = choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path / "tiled"), measure=True)
    assert (choice.runtime.name, measured) == ("cpu", ["cpu", "llamacpp"])


def test_rows_that_are_not_bit_equal_bring_nothing() -> None:
    """Where no row of several has a single step's bits, what drafts would cost there says nothing."""
    cheap = replace(alike(0.9), n_exact=8)
    assert cheap.drafted_s() < CPU.drafted_s()
    assert replace(cheap, n_exact=1, seconds={1: 0.5, 8: 0.5}).drafted_s() == 0.5
    assert not is_faster(replace(cheap, n_exact=1), CPU)
    assert is_faster(replace(cheap, n_exact=1), replace(CPU, n_exact=1))


def test_twice_the_memory_must_be_a_tenth_faster() -> None:
    """A runtime that holds more is taken for a gain that is worth it; one that holds less needs no more than any."""
    assert CPU.n_bytes is not None
    double = 2 * CPU.n_bytes
    faster = alike(0.9)
    assert is_faster(faster, CPU)
    assert not is_faster(replace(faster, n_bytes=double), CPU)
    assert is_faster(replace(alike(0.85), n_bytes=double), CPU)
    assert is_faster(replace(faster, n_bytes=double), replace(CPU, n_bytes=None))


def test_what_there_was_no_time_to_measure_counts_on_neither_side() -> None:
    """A comparison that was cut short goes by the rows that both runtimes were timed with."""
    short = Measured({1: LLAMACPP.seconds[1]}, None, None, None)
    assert is_faster(short, CPU)
    assert is_faster(LLAMACPP, CPU) is False
    assert is_faster(replace(short, seconds={1: 0.034}), CPU) is False


def test_the_probe_for_equal_bits_is_made_where_the_choice_depends_on_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a second on llama.cpp, so it is left out where the runtime wins or loses whatever it finds."""
    asked: dict[str, Callable[[Measured], bool]] = {}

    def noted(path: Path, runtime: Runtime, *_: Any, matters: Callable[[Measured], bool], **__: Any) -> Measured:
        asked[runtime.name] = matters
        return CPU

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "measure", noted)
        comparing.compared_runtimes(model, Cpu(), LlamaCpp(), LoadOptions())
    unprobed = [replace(alike(factor), n_exact=None) for factor in (0.4, 0.9, 1.1)]
    assert [asked["llamacpp"](found) for found in unprobed] == [False, True, False]
    assert [asked["cpu"](found) for found in unprobed] == [True, True, True]

    class Slow(Cpu):
        name = "llamacpp"

    for n_exact, matters in ((8, lambda _: True), (None, lambda _: False)):
        found = comparing.measure(model, Slow(), LoadOptions(), 600.0, load_limited=True, matters=matters)
        assert found is not None
        assert found.n_exact == n_exact
        assert set(found.seconds) == {1, 2, 4, 8}
        assert found.n_bytes is not None


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("n_threads", "n_exact"), [pytest.param(1, 8, marks=pytest.mark.long), (2, 1)])
def test_rows_count_where_they_are_bit_equal_in_contexts_of_the_usual_length(
    smollm_path: Path, n_threads: int, n_exact: int
) -> None:
    """With two threads llama.cpp's rows have the bits of single steps in short contexts only."""
    options = LoadOptions(n_threads=n_threads)
    found = comparing.measure(smollm_path, LlamaCpp(), options, 600.0, load_limited=True, matters=lambda _: True)
    assert found is not None
    assert found.n_exact == n_exact


@pytest.mark.slow
def test_a_real_comparison_tells_both_figures(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics say what was found, when there is time for both; a second load finds it in the cache."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(comparing, "_LIMIT_S", 600.0)
    monkeypatch.setattr(probe_cache, "_waited_s", lambda: 0)
    reasons = []
    for _ in range(2):
        with edgedec.load(model, cache_dir=tmp_path / "cache") as engine:
            stats = engine.generate("a", max_tokens=2).stats
            reasons.append((stats.runtime, stats.runtime_reason))
    figures = r"[\d.]+ ms a token, (at best )?[\d.]+ with drafts as expected, [\d.]+ a token of a prompt, [\d.]+ MB"
    assert re.fullmatch(f"cpu: {figures}; llamacpp: {figures}", reasons[0][1])
    assert reasons[0] == reasons[1]
    with edgedec.load(model, cache_dir=tmp_path / "other", memory="1GB") as engine:
        assert engine.generate("a", max_tokens=2).stats.runtime_reason == ""


@pytest.mark.slow
def test_damage_in_the_cache_is_measured_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that lies there ends a load."""
    options = LoadOptions(cache_dir=tmp_path / "cache")
    measured = speeds(monkeypatch, cpu=CPU, llamacpp=LLAMACPP)
    choosing.choose_runtime(model, "auto", options, measure=True)
    (file,) = (tmp_path / "cache" / "probes").glob("runtimes-*.json")
    damages = (
        *("{", "[]", "{}", '{"cpu": "soon"}', '{"cpu": {"seconds": {"1": -1}}}'),
        '{"cpu": 0.004, "llamacpp": 0.002}',
    )
    for damage in damages:
        file.write_text(damage)
        assert choosing.choose_runtime(model, "auto", options, measure=True).runtime.name == "cpu"
    assert measured == ["cpu", "llamacpp"] * (1 + len(damages))


@pytest.mark.slow
def test_a_cancelled_load_ends_the_comparison(model: Path, tmp_path: Path) -> None:
    """Ctrl-C while runtimes are compared is not taken for a slow runtime."""
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        choosing.choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, cancel=token), measure=True)
    with pytest.raises(PluginError, match="fastest"):
        choosing.choose_runtime(model, "fastest")


def test_layers_on_a_gpu_are_refused_where_there_is_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of layers is no reason to change the runtime for nothing; -1, all that can go there, is only told."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(LlamaCpp, "report", lambda self: RuntimeReport("1", ("BLAS", "CPU")))
    ten = LoadOptions(n_gpu_layers=10)
    for name, found in (
        ("auto", "cpu has CPU, llamacpp has BLAS and CPU"),
        ("cpu", "cpu has CPU"),
        ("llamacpp", "llamacpp has BLAS and CPU"),
    ):
        words = f"n_gpu_layers is 10, and there is no GPU for them ({found}); leave device and n_gpu_layers out"
        with pytest.raises(RequestError, match=f"^{re.escape(words)}"):
            choosing.choose_runtime(model, name, ten)
        told = choosing.choose_runtime(model, name, replace(ten, n_gpu_layers=-1))
        assert told.reason == f"no layer is on a GPU, as none was found ({found})"
        assert told.runtime.name == name.replace("auto", "cpu")
    for n_gpu_layers in (0, None):
        assert choosing.choose_runtime(model, "auto", replace(ten, n_gpu_layers=n_gpu_layers)).reason == ""


@pytest.mark.parametrize("n_gpu_layers", [10, -1])
def test_layers_on_a_gpu_go_to_the_runtime_that_has_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, n_gpu_layers: int
) -> None:
    """All of them, too: the cpu runtime, which would be asked first, has nothing to put them on."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setattr(LlamaCpp, "report", lambda self: RuntimeReport("1", ("Vulkan0", "CPU")))
    choice = choosing.choose_runtime(model, "auto", LoadOptions(n_gpu_layers=n_gpu_layers))
    assert (choice.runtime.name, choice.reason) == ("llamacpp", "")


def test_a_value_that_no_runtime_takes_is_refused_with_what_each_takes(model: Path) -> None:
    """Once, where all take the same; of a device each says which it knows."""
    pytest.importorskip("llama_cpp")
    for options, words in (
        (
            {"kv_type": "q9"},
            "kv_type is 'q9'; the cpu runtime takes f16, q8_0, q8_0/q4_0, q4_0, gear; llamacpp: kv_type is 'q9'; the ",
        ),
        ({"n_threads": 999}, "n_threads is 999; it must be from 1 to 256$"),
    ):
        with pytest.raises(RequestError, match=f"^{words}"):
            edgedec.load(model, **options)
    with pytest.raises(
        RequestError, match=r"llamacpp: llama.cpp knows no device 'x'; it knows CPU.*; webgpu: device is"
    ):
        edgedec.load(model, device="x")


def test_a_value_that_the_only_runtime_does_not_take(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other one installed, the value is what is wrong, not the model; why it is out is said, too."""
    monkeypatch.setattr(LlamaCpp, "accepts", _absent)
    words = "kv_type is 'q9'; the cpu runtime takes f16, q8_0, q8_0/q4_0, q4_0, gear; llamacpp: not installed"
    with pytest.raises(RequestError, match=f"^{words}"):
        edgedec.load(model, kv_type="q9")


def _absent(*_: object) -> str:
    raise RuntimeUnavailableError("not installed")

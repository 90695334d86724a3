"""How far ahead weights are fetched: the texts of settings, the choice by times, what is kept; no bit depends on it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, write_tiny
from support.models.tiny_runs import extend, one_by_one

from edgedec.errors import CancelledError, OptionError, SessionError
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken
from edgedec.storage import probe_cache
from edgedec_runtimes.cpu import prefetch
from edgedec_runtimes.cpu.library import check, instruction_sets, native
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.prefetch import CANDIDATES, OFF, ROWS, USUAL, Ahead, Products
from edgedec_runtimes.cpu.runtime import Cpu

TEXT = np.random.default_rng(0).integers(0, 260, 40).astype(np.int32)
Q4_K, Q6_K = GGMLType.Q4_K, GGMLType.Q6_K


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model whose matrices have all the tensor types."""
    return write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["llama"], types=TILE_TYPES, dealt=True, n_layer=4))


def load(path: Path, **options: object) -> CpuModel:
    """Return the model, loaded with a cache beside it unless another is given."""
    model = Cpu().load(path, LoadOptions(**{"n_ctx": 64, "n_threads": 2, "cache_dir": path.parent / "cache"} | options))  # type: ignore[arg-type]
    assert isinstance(model, CpuModel)
    return model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("usual", USUAL), ("off", OFF), ("L1:4608", Ahead(4608, 0)), ("L2:4608", Ahead(0, 4608))),
        *(("L1:1536+L2:12288", Ahead(1536, 12288)), ("L2:64+L1:65536", Ahead(65536, 64))),
        *(("L2:4096x3", Ahead(0, 4096, 3)), ("L1:64+L2:32768x2", Ahead(64, 32768, 2))),
    ],
)
def test_a_setting_has_a_text(text: str, expected: Ahead) -> None:
    assert prefetch.parse(text) == expected == prefetch.parse(str(expected))


@pytest.mark.parametrize(
    "text",
    [
        *("", "on", "L3:64", "L1", "L1:0", "L1:-64", "L1:65537", "L2:64,L1:64", "L1:x", "L1:64x2", "L2:64x"),
        *("L2:64x0", "L2:32768x3"),
    ],
)
def test_other_texts_are_refused(tiny: Path, text: str) -> None:
    with pytest.raises(OptionError, match=r"prefetch is .*; it must be auto, usual, off, or bytes"):
        load(tiny, runtime_options={"prefetch": text})


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_no_setting_changes_a_bit(tiny: Path, instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In single steps and in one forward, with weights of every type."""
    monkeypatch.setenv("EDGEDEC_CPU_ISA", instruction_set)
    with load(tiny) as model:
        expected = one_by_one(model.session(64), TEXT)
    for text in ("usual", "off", "L1:4608", "L2:4608", "L1:65536+L2:65536", "L2:4096x3"):
        with load(tiny, runtime_options={"prefetch": text}) as model:
            np.testing.assert_array_equal(one_by_one(model.session(64), TEXT), expected)
            np.testing.assert_array_equal(extend(model.session(64), TEXT), expected)


def times_of(by_setting: Mapping[Ahead, float], slow_moment: bool = False) -> prefetch.SecondsOf:
    """Return a measurement that finds these seconds for rows above 1, and the same for all settings of one row."""
    calls = iter(range(10**6))

    def seconds_of(kind: GGMLType, n: int, ahead: Ahead) -> float:
        found = by_setting.get(ahead, 2.0) if n > 1 and kind is Q4_K else 1.0
        return found * (7.0 if slow_moment and next(calls) % 2 else 1.0)

    return seconds_of


@pytest.mark.parametrize("slow_moment", [False, True])
def test_the_fastest_setting_is_chosen(slow_moment: bool) -> None:
    """By type and rows, also where every other measurement meets a busy moment; a small gain is none."""
    fast = Ahead(0, 4096, 3)
    found = prefetch.measure([Q4_K, Q6_K], times_of({USUAL: 1.0, fast: 0.8}, slow_moment))
    assert found == {Q4_K: {1: USUAL, 2: fast, 4: fast, 8: fast}, Q6_K: dict.fromkeys(ROWS, USUAL)}
    slight = prefetch.measure([Q4_K], times_of({USUAL: 1.0, fast: 0.96}, slow_moment))
    assert slight == {Q4_K: dict.fromkeys(ROWS, USUAL)}


def test_the_time_is_limited() -> None:
    """Every setting is measured a few times, however long that takes; on a busy machine no more than are needed."""
    n_calls = 0

    def seconds_of(kind: GGMLType, n: int, ahead: Ahead) -> float:
        nonlocal n_calls
        n_calls += 1
        return 1.0

    prefetch.measure([Q4_K], seconds_of, limit_s=0.0)
    assert n_calls == 3 * len(CANDIDATES) * len(ROWS)
    busy = n_calls + 5
    assert prefetch.measure([Q4_K], seconds_of, is_quiet=lambda: n_calls < busy) == {}
    assert n_calls == busy


def test_what_was_measured_is_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load with a cache measures; the next ones, also of other models, take what was found."""
    measured: list[list[GGMLType]] = []
    fast = Ahead(0, 4096, 3)

    def measure(kinds: list[GGMLType], *_: object, **__: object) -> dict[GGMLType, dict[int, Ahead]]:
        measured.append(kinds)
        return {kind: dict.fromkeys(ROWS, fast) for kind in kinds}

    monkeypatch.setattr(prefetch, "LEAST_BYTES", 1)
    monkeypatch.setattr(prefetch, "LEAST_TOGETHER", 1)
    monkeypatch.setattr(prefetch, "measure", measure)
    load(tiny, cache_dir=None).close()
    assert not measured
    load(tiny, runtime_options={"prefetch": "off"}).close()
    assert not measured
    load(tiny).close()
    load(tiny).close()
    best = instruction_sets()[0]
    assert [{Q4_K, GGMLType.F16} <= set(kinds) <= set(GGMLType) for kinds in measured] == [True]
    assert prefetch.stored_settings(tiny.parent / "cache", best, 2)[Q4_K] == dict.fromkeys(ROWS, fast)
    assert prefetch.stored_settings(tiny.parent / "cache", best, 1) == prefetch.stored_settings(None, best, 2) == {}


@pytest.mark.parametrize(
    "kept",
    [
        *(None, 3, {"Q4_K": 1}, {"Q9": {}}, {"Q4_K": {"1": [1]}}, {"Q4_K": {"x": [0, 0, 1]}}),
        *({"Q4_K": {"1": ahead}} for ahead in ([0, 4608], [70000, 0, 1], [0, 70000, 1], [0, 32768, 3], [0, 64, 0])),
    ],
)
def test_what_is_damaged_is_not_known(tmp_path: Path, kept: object) -> None:
    """Then it is measured again."""
    probe_cache.put(tmp_path, prefetch.KIND, prefetch.key("avx2", 1), kept)
    assert prefetch.stored_settings(tmp_path, "avx2", 1) == {}


def test_a_load_can_be_cancelled_while_it_measures(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept then."""
    cancel = CancelToken()
    monkeypatch.setattr(prefetch, "LEAST_BYTES", 1)
    monkeypatch.setattr(prefetch, "LEAST_TOGETHER", 1)

    def seconds_of(*_: object) -> float:
        cancel.cancel()
        return 1.0

    monkeypatch.setattr(Products, "__call__", seconds_of)
    with pytest.raises(CancelledError, match="measuring how far ahead"):
        load(tiny, cancel=cancel)
    assert prefetch.stored_settings(tiny.parent / "cache", instruction_sets()[0], 2) == {}


@pytest.mark.parametrize("kind", [Q4_K, GGMLType.F16])
def test_products_of_a_model_are_timed(tiny: Path, kind: GGMLType) -> None:
    """Piece by piece, around the end of the weights, integers and floats."""
    with load(tiny) as model:
        products = Products(model.handle, {kind: 100_000})
        assert all(products(kind, n, ahead) > 0 for n in ROWS for ahead in CANDIDATES)
        expected = one_by_one(model.session(64), TEXT)
    with load(tiny) as model:
        np.testing.assert_array_equal(one_by_one(model.session(64), TEXT), expected)


def test_products_of_weights_that_there_are_not_are_refused(tmp_path: Path) -> None:
    """The model has matrices of another type only."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["llama"], types=("Q4_K",)))
    with load(path) as model, pytest.raises(SessionError, match="no such weights in memory"):
        Products(model.handle, {Q6_K: 100})(Q6_K, 1, USUAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *((4, 1, 0, 0, 1), (99, 1, 0, 0, 1), (12, 0, 0, 0, 1), (12, 17, 0, 0, 1), (12, 1, -2, 0, 1)),
        *((12, 1, 65537, 0, 1), (12, 1, 0, -1, 1), (12, 1, 0, 64, -1), (12, 1, 0, 32768, 3)),
    ],
)
def test_the_library_checks_its_arguments(tiny: Path, arguments: tuple[int, ...]) -> None:
    """A type, a number of rows and distances that there are not."""
    with load(tiny) as model, pytest.raises(SessionError, match=r"no such products|not fetched so far ahead"):
        check(native().ec_model_set_ahead(model.handle, *arguments), "fetching ahead")


def test_doctor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, or that nothing was."""
    monkeypatch.setattr(prefetch, "stored_settings", lambda *_: {Q6_K: {1: Ahead(2304, 9216), 2: OFF, 4: OFF, 8: OFF}})
    assert Cpu().report().notes[-1] == "weights are fetched ahead as measured: Q6_K off (1 row: L1:2304+L2:9216)"

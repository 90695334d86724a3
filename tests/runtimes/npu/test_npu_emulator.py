"""Exports on the Hexagon emulator of onnxruntime-qnn for x86-64, where all of the graph runs; compiled graphs kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_runs import extend, one_by_one

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.npu.compiled import GRAPH, open_kept
from edgedec_runtimes.npu.graphs import npu_devices
from edgedec_runtimes.npu.runtime import Npu
from edgedec_runtimes.onnx.library import load_library

TOKENS: NDArray[np.int32] = np.random.default_rng(2).integers(0, 260, 90).astype(np.int32)


@pytest.fixture(scope="module")
def emulated(exported: Path) -> Iterator[Model]:
    """The export on the emulator; skips where there is none."""
    try:
        npu_devices(load_library())
    except RuntimeUnavailableError as error:
        pytest.skip(str(error))
    with Npu().load(exported, LoadOptions()) as model:
        yield model


def test_the_emulator_computes_what_the_cpu_provider_does(emulated: Model, model: Model) -> None:
    """No node falls back to the CPU (or loading fails), and logits differ by a 30th of their spread at most."""
    found = emulated.session(128).forward(TOKENS, n_past=0, rows="all").logits
    expected = model.session(128).forward(TOKENS, n_past=0, rows="all").logits
    assert np.sqrt(np.square(found - expected).mean() / expected.var()) < 0.03


def test_the_emulator_cuts_blocks_in_two_as_the_cpu_does(emulated: Model, cut_in_two: Path) -> None:
    """Saturation is an operator there, too: quantizing anew alone let the emulator go on with what had been cut off."""
    found = []
    for options in (LoadOptions(), LoadOptions(device="cpu")):
        with Npu().load(cut_in_two, options) as cut:
            found.append(cut.session(64).forward(TOKENS[:40], n_past=0, rows="all").logits.copy())
    assert np.sqrt(np.square(found[0] - found[1]).mean() / found[1].var()) < 0.03


def test_chains_on_the_emulator_have_the_bits_of_single_steps(emulated: Model) -> None:
    """As on the CPU provider: rows of a forward, across blocks, equal steps of one token."""
    sessions = [emulated.session(128) for _ in range(2)]
    for session in sessions:
        session.forward(TOKENS[:20], n_past=0)
    assert np.array_equal(extend(sessions[0], TOKENS[20:31], (11,)), one_by_one(sessions[1], TOKENS[20:31]))


def test_compiled_graphs_are_kept(emulated: Model, exported: Path, tmp_path: Path) -> None:
    """What was compiled is opened at the next load, compiled again where it is damaged, and computes the same bits."""
    options = LoadOptions(cache_dir=tmp_path)
    expected = emulated.session(64).forward(TOKENS[:3], n_past=0).logits
    for i in range(3):
        with Npu().load(exported, options) as loaded:
            assert np.array_equal(loaded.session(64).forward(TOKENS[:3], n_past=0).logits, expected)
        (kept,) = tmp_path.glob("npu/*/8x64")
        assert {path.name for path in kept.iterdir()} == {"graph.onnx", "graph_qnn.bin"}
        if i == 1:
            (kept / "graph.onnx").write_bytes(b"damaged")


def test_without_the_package_it_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no NPU is found, the error says why (the provider's, with what to install) and how to try without one."""

    def nothing(ort: object, device: str) -> None:
        raise RuntimeUnavailableError("no such package")

    monkeypatch.setattr("edgedec_runtimes.npu.graphs.choose_provider", nothing)
    with pytest.raises(RuntimeUnavailableError, match="no such package; or try the export with --device cpu"):
        Npu().load(exported, LoadOptions())
    assert Npu().report().devices == ("cpu",)


PROMPT = "one two one two one two one"
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]


def test_a_draft_model_goes_on_while_the_emulator_verifies(emulated: Model, exported: Path, source: Path) -> None:
    """Greedy and with a seed, the text is plain decoding's; the draft model on the cpu runtime drafts meanwhile."""
    drafting = DraftOptions(overlap=True)
    options: dict[str, Any] = {"draft": "model", "draft_model": source, "drafting": drafting, "n_draft_max": 5}
    with edgedec.load(exported, runtime="npu", offline=True, **options) as engine:
        for way in WAYS:
            plain = engine.generate(PROMPT, max_tokens=24, ignore_end=True, draft=False, **way)
            found = engine.generate(PROMPT, max_tokens=24, ignore_end=True, **way)
            assert found.token_ids == plain.token_ids
            assert found.stats.reasons == []
            assert found.stats.n_steps < plain.stats.n_steps
            assert found.stats.drafters["model"]["ahead"] > 0


class Compiler:
    """Stands in for ONNX Runtime: writes where it is told to, and opens what is sound.

    Attributes:
        n_compiled: How often the export's graph was opened.
    """

    def __init__(self) -> None:
        self.n_compiled = 0

    def __call__(self, compiled: Path | None, entries: dict[str, str]) -> str:
        if compiled is not None:
            assert not entries
            return compiled.read_text(encoding="utf-8")
        self.n_compiled += 1
        if entries:
            Path(entries["ep.context_file_path"]).write_text("sound", encoding="utf-8")
        return "sound"


def test_it_is_compiled_once(tmp_path: Path) -> None:
    """The second time opens what the first left, in a folder with nothing else beside it."""
    compiler, folder = Compiler(), tmp_path / "deep" / "8x64"
    assert [open_kept(folder, compiler) for _ in range(3)] == ["sound"] * 3
    assert compiler.n_compiled == 1
    assert [path.name for path in folder.parent.iterdir()] == ["8x64"]


def test_without_a_folder_nothing_is_kept() -> None:
    """None, as where there is no cache, compiles every time."""
    compiler = Compiler()
    assert [open_kept(None, compiler) for _ in range(2)] == ["sound"] * 2
    assert compiler.n_compiled == 2


def test_what_cannot_be_opened_is_replaced(tmp_path: Path) -> None:
    """A kept graph that raises is compiled again, and the new one kept."""
    compiler, folder = Compiler(), tmp_path / "8x64"
    open_kept(folder, compiler)
    (folder / GRAPH).write_bytes(b"\xff")
    assert open_kept(folder, compiler) == "sound"
    assert (folder / GRAPH).read_text(encoding="utf-8") == "sound"
    assert compiler.n_compiled == 2


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path: Path) -> None:
    """Below a file there can be no folder: the graph is compiled all the same."""
    (tmp_path / "file").touch()
    assert open_kept(tmp_path / "file" / "8x64", Compiler()) == "sound"


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    """What the compiler raises comes through, and no folder stays behind."""

    def fail(compiled: Path | None, entries: dict[str, str]) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_kept(tmp_path / "8x64", fail)
    assert not list(tmp_path.iterdir())

"""Exports for NPUs on the CPU provider: the source's logits, the same bits in every cut, and clear refusals."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.conformance.runtime import check_runtime
from support.models.cut_files import cut_in_a_forward
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.models.tiny_runs import extend, one_by_one

from edgedec.errors import (
    CancelledError,
    EdgedecError,
    ModelFormatError,
    ModelNotFoundError,
    RequestError,
    RuntimeUnavailableError,
    UnsupportedModelError,
)
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.progress import Progress
from edgedec.runtime import Runtime
from edgedec.testing import raise_failures
from edgedec_export.npu.export import export_npu
from edgedec_export.quantizing import bundled_text
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.npu.runtime import Npu
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.onnx.providers import devices

TOKENS: NDArray[np.int32] = np.random.default_rng(1).integers(0, 260, 200).astype(np.int32)
ON_CPU = LoadOptions(device="cpu", n_threads=1)


def logits(runtime: Runtime, path: Path, options: LoadOptions) -> NDArray[np.float32]:
    """Return a runtime's logits of a prefill of 100 tokens, all rows."""
    with runtime.load(path, options) as model:
        return model.session(256).forward(TOKENS[:100], n_past=0, rows="all").logits.copy()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "llama-linear", "qwen2", "qwen3"])
def test_logits_are_the_sources_but_for_quantization(name: str, tmp_path: Path) -> None:
    """Weights and keys of 8 bits move logits by a 20th of their spread, in every architecture (measured: to 0.05)."""
    source = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], vectors=()))
    folder = export_npu(source, tmp_path / "export", contexts=(256,), calibration=bundled_text()[:2500])
    expected = logits(Cpu(), source, LoadOptions(n_threads=1, max_rows=100))
    distance = np.sqrt(np.square(logits(Npu(), folder, ON_CPU) - expected).mean() / expected.var())
    assert 0.001 < distance < 0.08


def test_a_bias_that_graphs_lack_is_refused_by_name(tmp_path: Path) -> None:
    """It would be left out without a word."""
    source = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["llama-linear"])
    with pytest.raises(UnsupportedModelError, match=r"graphs for NPUs lack 'blk\.0\.attn_output\.bias'"):
        export_npu(source, tmp_path / "export", contexts=(256,))


@pytest.mark.slow
def test_blocks_cut_in_two_compute_the_same(cut_in_two: Path, model: Model) -> None:
    """What is cut off of the products of a feed-forward block comes back by a matrix of its own."""
    expected = model.session(64).forward(TOKENS[:60], n_past=0, rows="all").logits
    with Npu().load(cut_in_two, ON_CPU) as cut:
        found = cut.session(64).forward(TOKENS[:60], n_past=0, rows="all").logits
    assert 0 < np.sqrt(np.square(found - expected).mean() / expected.var()) < 0.02


@pytest.mark.slow
def test_it_conforms(exported: Path) -> None:
    """The suite for runtimes fails nothing, and skips only trees and what starts from or ends in hidden states."""
    results = check_runtime(lambda: Npu().load(exported, ON_CPU))
    raise_failures(results)
    skipped = {result.name for result in results if result.status == "skipped"}
    assert skipped - {"cancel_stops_a_forward"} == {  # a fast machine leaves no time for that
        "trees_equal_their_chains",
        "kept_paths_go_on_as_chains",
        "branches_must_be_settled",
        "layer_subsets_skip",
        "hidden_states_resume",
        "memory_is_as_planned",
    }


@pytest.mark.slow
@pytest.mark.parametrize("n_past", [5, 60, 120])
def test_chains_have_the_bits_of_single_steps(model: Model, n_past: int) -> None:
    """Up to 63 rows in one forward, across blocks of 8 and from one context to the next, equal single steps."""
    assert model.batch_invariant == 63
    stepped = model.session(256)
    stepped.forward(TOKENS[:n_past], n_past=0)
    expected = one_by_one(stepped, TOKENS[n_past : n_past + 63])
    for sizes in [(63,), (8, 8, 30), (1, 62), (7, 9, 3, 2, 40)]:
        session = model.session(256)
        session.forward(TOKENS[:n_past], n_past=0)
        assert np.array_equal(extend(session, TOKENS[n_past : n_past + 63], sizes), expected), sizes


@pytest.mark.slow
def test_going_back_to_a_shorter_context_forgets(model: Model) -> None:
    """After 150 tokens, in the larger buffers, going back to 33 continues as a session that never went on does."""
    session, fresh = model.session(256), model.session(256)
    session.forward(TOKENS[:33], n_past=0)
    session.forward(TOKENS[:117], n_past=33)
    fresh.forward(TOKENS[:33], n_past=0)
    rows = [each.forward(TOKENS[150:170], n_past=33, rows="all").logits.copy() for each in (session, fresh)]
    assert np.array_equal(rows[0], rows[1])


def test_saved_sessions_and_forks_go_on_with_the_same_bits(model: Model) -> None:
    """A fork, and a session that loads what another saved in the middle of a block, continue as the first does."""
    session, restored = model.session(200), model.session(200)
    session.forward(TOKENS[:99], n_past=0)
    restored.load(session.save(), 99)
    twin = session.fork()
    expected = extend(session, TOKENS[99:120])
    assert np.array_equal(extend(restored, TOKENS[99:120]), expected)
    assert np.array_equal(extend(twin, TOKENS[99:120]), expected)


def test_cancelling_stops_at_a_multiple_of_64(model: Model) -> None:
    """A cancelled prefill keeps whole pieces, and going on from there gives an undisturbed prefill's bits."""
    session, fresh = model.session(256), model.session(256)

    def cancel(progress: Progress) -> None:
        if progress.done == 56:
            session.cancel()

    session.forward(TOKENS[:8], n_past=0)
    with pytest.raises(CancelledError, match="64 tokens are cached"):
        session.forward(TOKENS[8:], n_past=8, on_progress=cancel)
    assert session.n_cached == 64
    fresh.forward(TOKENS[:8], n_past=0)
    fresh.forward(TOKENS[8:128], n_past=8)
    session.forward(TOKENS[64:128], n_past=64)
    assert np.array_equal(extend(session, TOKENS[128:140]), extend(fresh, TOKENS[128:140]))


def test_options_that_cannot_be_honoured_are_refused(exported: Path, model: Model) -> None:
    """A device, KV type or context that there is none of is a RequestError that says what there is."""
    cases = [
        (LoadOptions(device="tpu"), "takes 'npu'"),
        (LoadOptions(device="cpu", kv_type="f32"), "8 bits"),
        (LoadOptions(device="cpu", kv_type="q8_0"), "8 bits"),
        (LoadOptions(device="cpu", n_ctx=257), "1 to 256"),
        (LoadOptions(device="cpu", n_gpu_layers=3), "n_gpu_layers"),
        (LoadOptions(device="cpu", resident_bytes=1), "resident_bytes"),
    ]
    for options, what in cases:
        with pytest.raises(RequestError, match=what):
            Npu().plan(exported, options)
    with pytest.raises(RequestError, match="larger contexts"):
        model.session(257)


@pytest.mark.parametrize("device", ["openvino", "openvino-gpu", "openvino-npu"])
def test_openvino_is_refused_where_it_is_not_installed(exported: Path, device: str) -> None:
    if "openvino" in devices(load_library())[0]:
        pytest.skip("OpenVINO is installed")
    with pytest.raises(RuntimeUnavailableError, match="pip install onnxruntime-ep-openvino"):
        Npu().load(exported, LoadOptions(device=device))


def test_openvinos_processor_takes_the_graph(exported: Path, model: Model) -> None:
    """Where it is installed: logits are near those of the CPU provider, and the same for a row and for several."""
    if "openvino" not in devices(load_library())[0]:
        pytest.skip("OpenVINO is not installed; the package onnxruntime-openvino in place of onnxruntime brings it")
    tokens = np.arange(5, 17, dtype=np.int32)
    expected = model.session(64).forward(tokens, n_past=0, rows="all").logits.copy()
    with Npu().load(exported, LoadOptions(device="openvino", n_threads=1)) as loaded:
        session = loaded.session(64)
        found = session.forward(tokens, n_past=0, rows="all").logits.copy()
        steps = [session.forward(tokens[n : n + 1], n_past=n).logits[0].copy() for n in range(4, 8)]
        together = session.forward(tokens[4:8], n_past=4, rows="all").logits.copy()
    assert np.abs(found - expected).max() < 0.1 * expected.std()
    assert np.array_equal(np.stack(steps), together)


def truncate(folder: Path) -> None:
    path = folder / "model.onnx.data"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    """Change one byte of the embeddings."""
    path = folder / "embedding.f16"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "edgedec.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    change(found)
    path.write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "error", "what"),
    [
        (truncate, ModelFormatError, "cut short"),
        (flip, ModelFormatError, "other contents"),
        (lose, ModelNotFoundError, "missing"),
        (lambda folder: rewrite(folder, lambda m: m.pop("npu")), ModelFormatError, "KeyError"),
        (lambda folder: rewrite(folder, lambda m: m["npu"].update(contexts=[100])), ModelFormatError, "contexts"),
        (lambda folder: rewrite(folder, lambda m: m["npu"].update(n_head=3)), ModelFormatError, "3 heads on 2"),
        (lambda folder: rewrite(folder, lambda m: m.update(n_embd=10**9)), ModelFormatError, "n_embd"),
        (lambda folder: rewrite(folder, lambda m: m.update(n_embd=32)), ModelFormatError, "260 rows of 32"),
        (lambda folder: rewrite(folder, lambda m: m.update(architecture="qwen2")), ModelFormatError, "in the manifest"),
        (lambda folder: rewrite(folder, lambda m: m["files"].update({"../x": {}})), ModelFormatError, "../x"),
        (lambda folder: (folder / "edgedec.json").write_text("{"), ModelFormatError, "no JSON"),
    ],
)
def test_damage_is_found_before_anything_runs(
    exported: Path, tmp_path: Path, damage: Callable[[Path], object], error: type[EdgedecError], what: str
) -> None:
    """Files that are not those of the manifest, and manifests that contradict themselves, are refused by name."""
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    damage(folder)
    with pytest.raises(error, match=what):
        Npu().load(folder, ON_CPU)


def test_other_paths_are_not_accepted(exported: Path, source: Path, tmp_path: Path) -> None:
    """The folder and the graph in it are accepted; a GGUF, an empty folder and an export for the CPU are not."""
    assert Npu().accepts(exported) is None
    assert Npu().accepts(exported / "model.onnx") is None
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    rewrite(folder, lambda m: m.update(target="cpu"))
    for path in (source, tmp_path):
        told = f"{path}: no exported model, expected a folder that `edgedec export MODEL --target npu` wrote"
        assert Npu().accepts(path) == told
    assert "expected" in (Npu().accepts(folder) or "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file short")
def test_embeddings_cut_short_in_a_forward_are_an_error(exported: Path, tmp_path: Path) -> None:
    """The embedding matrix is mapped: a forward that meets missing pages fails, and so do all later ones."""
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    first, second = cut_in_a_forward("npu", folder, folder / "embedding.f16")
    assert first == second
    assert first.startswith(f"{folder / 'embedding.f16'} was cut short or written to since it was loaded; ")

"""The webgpu runtime on a software GPU: the numbers of the CPU in other bits, and errors where a driver ends."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.errors import ModelFormatError, RuntimeLostError
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_export.cached import graph_folder, list_graphs, make_graph
from edgedec_export.webgpu import finding
from edgedec_export.webgpu.runtime import WebGpu
from edgedec_runtimes.child.model import ChildModel
from edgedec_runtimes.onnx.runtime import Onnx

_CHROMIUM = Path(
    "/usr/lib/chromium"
)  # Debian's package brings SwiftShader and a loader; Mesa's of Debian 12 is too old
_DRIVER = _CHROMIUM / "vk_swiftshader_icd.json"


def software_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let processes that are started from now on find the software GPU; skip the test where there is none."""
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        pytest.skip("onnxruntime-ep-webgpu is not installed: pip install .[gpu]")
    if not _DRIVER.is_file():
        pytest.skip("no Vulkan that computes on the CPU: apt install chromium")
    patch.setenv(finding.SOFTWARE, "1")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        patch.setenv(name, str(_DRIVER))
    patch.setenv("LD_LIBRARY_PATH", str(_CHROMIUM))
    finding.gpu_report.cache_clear()


pytestmark = pytest.mark.slow

TOKENS = np.arange(7, dtype=np.int32) * 31 % 257
PROMPT = "abababababababab"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadOptions]:
    """A tiny model, and options with a cache of its own."""
    pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("webgpu")
    path = write_tiny(folder / "m.gguf", ARCHITECTURES["qwen2"])
    return path, LoadOptions(n_ctx=32, n_parallel=2, n_threads=1, cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def model(made: tuple[Path, LoadOptions]) -> Iterator[Model]:
    """The model on a software GPU."""
    with pytest.MonkeyPatch.context() as patch:
        software_gpu(patch)
        with WebGpu().load(*made) as loaded:
            yield loaded
        finding.gpu_report.cache_clear()


def test_its_numbers_are_the_cpus_to_five_digits(model: Model, made: tuple[Path, LoadOptions]) -> None:
    """A prompt, single steps and the token that each of them would write; of float weights only the order differs."""
    path, options = made
    (graph,) = list_graphs(options.cache_dir or Path())
    assert graph.path == graph_folder(path, options.cache_dir)
    with Onnx().load(graph.path, options) as other:
        sessions = model.session(32), other.session(32)
        for begin, end in ((0, 5), (5, 6), (6, 7)):
            found, expected = (
                session.forward(TOKENS[begin:end], n_past=begin, rows="all").logits.copy() for session in sessions
            )
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
            assert np.array_equal(found.argmax(1), expected.argmax(1))


def test_a_fork_and_a_restored_session_go_on_with_the_same_bits(model: Model) -> None:
    """Keys and values lie on the GPU, and are copied whole."""
    first, other = model.session(32), model.session(32)
    first.forward(TOKENS[:5], n_past=0)
    twin = first.fork()
    other.load(first.save(), 5)
    rows = [one.forward(TOKENS[5:6], n_past=5).logits.copy() for one in (first, twin, other)]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_a_driver_that_ends_its_process_is_an_error(model: Model) -> None:
    """The last test, as the model is gone after it."""
    assert isinstance(model, ChildModel)
    session = model.session(32)
    session.forward(TOKENS[:2], n_past=0)
    os.kill(model.processes[0], signal.SIGKILL)
    with pytest.raises(RuntimeLostError, match=r"ran the model on SwiftShader.* was lost \(it was ended by SIGKILL"):
        session.forward(TOKENS[2:3], n_past=2)


def test_drafts_leave_texts_as_they_are(tmp_path: Path) -> None:
    """Greedily and with sampling, one text and several together, under caps, with the rows of a quantized model."""
    pytest.importorskip("onnx")
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["llama"], types=("Q4_K", "Q6_K"), n_layer=1))
    with pytest.MonkeyPatch.context() as patch:
        software_gpu(patch)
        with edgedec.load(
            path, runtime="webgpu", draft="suffix", n_ctx=128, memory="900MB", gpu_memory="700MB", cache_dir=tmp_path
        ) as engine:
            plain, drafted = (
                [
                    engine.generate(PROMPT, draft=draft, max_tokens=6, temperature=0, ignore_end=True),
                    *engine.samples(PROMPT, 2, draft=draft, max_tokens=4, temperature=0.8, seed=1, ignore_end=True),
                ]
                for draft in (False, True)
            )
    finding.gpu_report.cache_clear()
    assert [text.token_ids for text in plain] == [text.token_ids for text in drafted]
    assert not any(text.stats.n_drafts for text in plain)
    assert any(text.stats.n_drafts for text in drafted)


def test_a_damaged_graph_is_deleted_and_made_anew(made: tuple[Path, LoadOptions], tmp_path: Path) -> None:
    """The error says so; a manifest that can't be read counts as no graph."""
    path, options = made[0], replace(made[1], cache_dir=tmp_path)
    (make_graph(path, options) / "edgedec.json").write_text("{", encoding="utf-8")
    data = make_graph(path, options) / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.MonkeyPatch.context() as patch:
        software_gpu(patch)
        with pytest.raises(ModelFormatError, match="it was deleted from the cache: ask again"):
            WebGpu().load(path, options)
    assert list_graphs(tmp_path) == []

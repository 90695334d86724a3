"""Graphs for GPUs in the cache: made once, listed, and deleted with all the rest."""

import os
from pathlib import Path

import pytest
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.processes.command_line import run_here

from edgedec.errors import CancelledError
from edgedec.load_options import LoadOptions
from edgedec.progress import CancelToken
from edgedec_export.cached import list_graphs, make_graph, refusal

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that can be exported."""
    pytest.importorskip("onnx")
    return write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"])


def test_a_graph_is_made_once_and_again_for_another_file(model: Path, tmp_path: Path) -> None:
    """The graph of what the file was before is deleted."""
    options = LoadOptions(cache_dir=tmp_path)
    first = make_graph(model, options)
    written = (first / "model.onnx").stat().st_mtime_ns
    assert make_graph(model, options) == first
    assert (first / "model.onnx").stat().st_mtime_ns == written
    os.utime(model, ns=(1, 1))
    second = make_graph(model, options)
    assert [graph.path for graph in list_graphs(tmp_path)] == [second]
    assert second != first


def test_a_cancelled_export_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """The next load begins anew."""
    cancel = CancelToken()
    with pytest.raises(CancelledError):
        make_graph(model, LoadOptions(cache_dir=tmp_path, cancel=cancel, on_progress=lambda _: cancel.cancel()))
    assert list_graphs(tmp_path) == []


def test_graphs_are_listed_and_deleted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their room on the disk is told by `cache list` and `list`; `prune` alone leaves them."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path))
    make_graph(model, LoadOptions())
    assert "graph of m.gguf, for a GPU" in run_here("cache", "list").text
    assert "graphs for GPUs: " in run_here("list").text
    run_here("cache", "prune")
    assert len(list_graphs(tmp_path)) == 1
    run_here("cache", "prune", "--all")
    assert list_graphs(tmp_path) == []


def test_what_no_graph_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    """An architecture that is not exported, and a type of weights."""
    assert "ffn_gate_inp" in str(refusal(write_tiny(tmp_path / "a.gguf", ARCHITECTURES["qwen3moe"])))

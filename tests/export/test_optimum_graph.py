"""A graph of optimum gets the form of our exports: one data file, every value unchanged, no data from elsewhere."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.foreign_graphs import counting_graph, weight
from support.models.tiny_models import N_VOCAB

from edgedec.errors import CancelledError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import DATA, GRAPH
from edgedec.progress import CancelToken
from edgedec_runtimes.onnx.foreign.contract import Contract

_WITHOUT = "onnx, of the extra `export`, is not installed"
onnx = pytest.importorskip("onnx", reason=_WITHOUT)
rewrite_graph = pytest.importorskip("edgedec_export.optimum.graph", reason=_WITHOUT).rewrite_graph


def saved(folder: Path, model: Any, **options: Any) -> Path:
    """Save a graph and return its path."""
    (folder / "source").mkdir()
    path = folder / "source" / "model.onnx"
    onnx.save(model, path, **options)
    return path


def with_a_constant(values: Any) -> Any:
    """Return a counting graph that has a Constant with these values in a branch of an If."""
    model = counting_graph()
    constant = onnx.helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(values, "c"))
    out = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, None)
    branch = onnx.helper.make_graph([constant], "branch", [], [out])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(onnx.helper.make_node("If", ["yes"], ["d"], then_branch=branch, else_branch=branch))
    return model


@pytest.mark.parametrize("outside", [False, True])
def test_every_value_stays(tmp_path: Path, outside: bool) -> None:
    """Weights in the graph or in files beside it keep their values; large ones go to the data file."""
    values = np.arange(1000, dtype=np.float32)
    options = {"save_as_external_data": True, "size_threshold": 100, "convert_attribute": True} if outside else {}
    source = saved(tmp_path, with_a_constant(values), **options)
    assert (len(os.listdir(source.parent)) > 1) == outside
    out = tmp_path / "out"
    out.mkdir()
    contract, sha256 = rewrite_graph(source, out)
    assert contract == Contract(2, 2, 2, N_VOCAB, has_positions=True)
    assert sorted(os.listdir(out)) == [GRAPH, DATA]
    assert len(sha256) == 64
    bare = onnx.load(out / GRAPH, load_external_data=False).graph
    large = [tensor.name for tensor in bare.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert large == ["weight"]
    found = {tensor.name: onnx.numpy_helper.to_array(tensor, str(out)) for tensor in bare.initializer}
    before = onnx.load(source).graph
    assert found.keys() == {tensor.name for tensor in before.initializer}
    for tensor in before.initializer:
        assert np.array_equal(found[tensor.name], onnx.numpy_helper.to_array(tensor)), tensor.name
    assert np.array_equal(found["weight"], weight(N_VOCAB))
    branch = bare.node[-1].attribute[0].g
    assert np.array_equal(onnx.numpy_helper.to_array(branch.node[0].attribute[0].t), values)


def test_what_can_not_be_kept_is_refused(tmp_path: Path) -> None:
    """A graph without a KV cache, text weights, a missing graph and data from another folder are refused."""
    (tmp_path / "out").mkdir()
    model = counting_graph()
    del model.graph.input[2:]
    source = saved(tmp_path, model)
    with pytest.raises(UnsupportedModelError, match="exported without a KV cache"):
        rewrite_graph(source, tmp_path / "out")
    model = counting_graph()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(["a"], object), "words"))
    onnx.save(model, source)
    with pytest.raises(UnsupportedModelError, match="'words' holds object"):
        rewrite_graph(source, tmp_path / "out")
    (tmp_path / "out" / DATA).unlink()
    source.unlink()
    with pytest.raises(ModelFormatError, match="optimum wrote no readable graph"):
        rewrite_graph(source, tmp_path / "out")


def test_it_can_be_cancelled(tmp_path: Path) -> None:
    """Rewriting can be cancelled between two tensors."""
    (tmp_path / "out").mkdir()
    token = CancelToken()
    with pytest.raises(CancelledError, match="writing the weights"):
        rewrite_graph(
            saved(tmp_path, counting_graph()), tmp_path / "out", on_progress=lambda _: token.cancel(), cancel=token
        )

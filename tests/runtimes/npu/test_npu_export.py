"""What an export for NPUs writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.models.tiny_mamba import tiny_mamba
from support.models.tiny_models import tiny_llama

from edgedec.errors import CancelledError, RequestError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.progress import CancelToken, Progress
from edgedec_export.npu.export import export_npu
from edgedec_export.npu.qdq import exact
from edgedec_export.npu.weights import Weights, equalize_keys, equalize_values
from edgedec_export.quantizing import bundled_text
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.npu.facts import read_facts

OPERATORS = {
    *("Add", "Concat", "DequantizeLinear", "Gather", "MatMul", "Mul", "QuantizeLinear", "RMSNormalization"),
    *("Reshape", "Sigmoid", "Slice", "Softmax", "Sub", "Transpose"),
}


def test_the_folder_is_complete(exported: Path) -> None:
    """There is one graph and all that the manifest lists; nothing of the calibration is left."""
    names = {path.name for path in exported.iterdir()}
    assert names == {"model.onnx", "model.onnx.data", "embedding.f16", "vocabulary.gguf", "edgedec.json"}
    manifest = json.loads((exported / "edgedec.json").read_text(encoding="utf-8"))
    assert manifest["target"] == "npu"
    assert manifest["files"].keys() == names - {"edgedec.json"}
    facts = read_facts(exported)
    assert (facts.contexts, facts.n_layer, facts.n_vocab, facts.n_groups) == ((64, 256), 2, 260, 2)


def test_the_graph_is_quantized_throughout(exported: Path) -> None:
    """Operators have no branches or loops, inputs and outputs are 8 or 16 bits, every float operator stands in Q/DQ."""
    model = onnx.load(exported / "model.onnx")
    onnx.checker.check_model(exported / "model.onnx")
    assert {node.op_type for node in model.graph.node} == OPERATORS
    types = {value.name: value.type.tensor_type.elem_type for value in [*model.graph.input, *model.graph.output]}
    assert types.pop("logit_rows") == onnx.TensorProto.INT32
    assert types["past_key_high_0"] == types["new_value_low_1"] == onnx.TensorProto.UINT8
    assert set(types.values()) == {onnx.TensorProto.UINT8, onnx.TensorProto.UINT16}
    quantized = {node.output[0]: node.op_type for node in model.graph.node}
    readers = {name: node.op_type for node in model.graph.node for name in node.input}
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            assert readers[node.output[0]] == "QuantizeLinear", node.name
            assert quantized[node.input[0]] == "DequantizeLinear", node.name


def graph_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return an export's graph, and its constants by name."""
    graph = onnx.load(folder / "model.onnx").graph
    return graph, {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_products_of_activations_are_left_little_to_round(exported: Path) -> None:
    """Every result of 16 bits has a power of two as its scale, and a multiple of 256 as its zero point."""
    graph, constants = graph_of(exported)
    how = [[constants[name] for name in node.input[1:]] for node in graph.node if node.op_type == "QuantizeLinear"]
    long = [(scale, zero) for scale, zero in how if zero.dtype == np.uint16]
    assert len(long) > 40
    assert all(np.frexp(scale)[0] == 0.5 and zero % 256 == 0 for scale, zero in long)


@pytest.mark.parametrize("span", [(-1.0, 1.0), (-3.0, 0.0), (0.0, 5.0), (-255.5, 256.0), (-0.01, 1e3), (2.0, 9.0)])
def test_ranges_are_covered_with_zero_points_of_8_bits(span: tuple[float, float]) -> None:
    """A range is held whole, 0 with it, in steps at most four times as long as the shortest that would do."""
    found = exact(*span)
    assert found.lowest <= min(span[0], 0) <= max(span[1], 0) <= found.highest
    assert found.zero_point in range(0, 65536, 256)
    assert found.scale < 4 * (max(span[1], 0) - min(span[0], 0)) / 65535


def test_keys_are_quantized_as_they_are_cached(exported: Path) -> None:
    """What a forward returns is what the next one reads: an output has the scale and zero point of its input."""
    graph = onnx.load(exported / "model.onnx", load_external_data=False).graph
    for what in ("key", "value"):
        for part in ("high", "low"):
            (written,) = (node for node in graph.node if node.output[0] == f"new_{what}_{part}_1")
            (read,) = (node for node in graph.node if node.input[0] == f"past_{what}_{part}_1")
            assert list(written.input[1:]) == list(read.input[1:])


def test_low_parts_go_on_where_high_parts_end(exported: Path) -> None:
    """Both parts have 8 bits, a step of the high one is 256 of the low one, which is 0 at 128."""
    graph, constants = graph_of(exported)
    found = {
        node.output[0]: [constants[name] for name in node.input[1:]] for node in graph.node if len(node.input) == 3
    }
    for what in ("key_{}_0", "value_{}_0", "key_{}_1", "value_{}_1"):
        (high, _), (low, zero) = (found[f"new_{what.format(part)}"] for part in ("high", "low"))
        assert (float(high), int(zero), zero.dtype.name) == (256 * float(low), 128, "uint8")


def test_products_of_low_parts_have_both_signs(exported: Path) -> None:
    """They are quantized around 0, wherever the products of the high parts lie."""
    graph, constants = graph_of(exported)
    quantized = {
        node.input[0]: int(constants[node.input[2]]) for node in graph.node if node.op_type == "QuantizeLinear"
    }
    found = [zero for name, zero in quantized.items() if name.split("/")[0].removesuffix("_f").endswith(".low")]
    assert set(found) == {2**15}, sorted(quantized)


def test_what_is_not_cut_off_leaves_nothing(cut_in_two: Path) -> None:
    """Steps of what is beyond a limit, and of its product, are longer than twice what rounding makes of a 0 there."""
    graph, constants = graph_of(cut_in_two)
    steps = {node.output[0]: constants[node.input[1]] for node in graph.node if node.op_type == "QuantizeLinear"}
    for layer in ("blk.0", "blk.1"):
        weights = constants[f"{layer}.ffn_down.weight/scales"]
        assert steps[f"{layer}.ffn_rest"] >= 2 * steps[f"{layer}.ffn_product"]
        assert steps[f"{layer}.ffn_down.rest"] > 2 * 256 * steps[f"{layer}.ffn_rest"] * weights.max()
        assert steps[f"{layer}.ffn_low"] < steps[f"{layer}.ffn_product"]


def test_weights_lie_in_the_data_file(exported: Path) -> None:
    """Every initializer over 1 KiB is outside the graph, at a multiple of 4,096 bytes."""
    for tensor in onnx.load(exported / "model.onnx", load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            assert place["location"] == "model.onnx.data"
            assert int(place["offset"]) % 4096 == 0
        else:
            assert len(tensor.raw_data) <= 1024


@pytest.mark.slow
def test_an_export_is_reproducible(source: Path, exported: Path, tmp_path: Path) -> None:
    """The same file gives the same bytes, and --force replaces an export."""
    out = tmp_path / "again"
    text = bundled_text()[:1200]
    export_npu(source, out, contexts=(64,), calibration=text[:300])
    with pytest.raises(RequestError, match="already holds an export"):
        export_npu(source, out, contexts=(64, 256), calibration=text)
    export_npu(source, out, contexts=(64, 256), calibration=text, force=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in exported.iterdir()}


@pytest.mark.slow
def test_a_cancelled_export_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """Cancelled among the weights or in the calibration, it leaves an empty folder behind."""
    for phase in ("export", "calibrate"):
        cancel = CancelToken()

        def stop(progress: Progress, phase: str = phase, cancel: CancelToken = cancel) -> None:
            if progress.phase == phase:
                cancel.cancel()

        with pytest.raises(CancelledError):
            export_npu(source, tmp_path / "out", on_progress=stop, cancel=cancel)
        assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(source: Path, tmp_path: Path) -> None:
    """Contexts that are no ascending multiples of 64, a text that is too short and other architectures are named."""
    bad: list[Any] = [(), (100,), (128, 64), (64, 64), (0,)]
    for contexts in bad:
        with pytest.raises(RequestError, match="ascending multiples of 64"):
            export_npu(source, tmp_path / "out", contexts=contexts)
    with pytest.raises(RequestError, match="text has 5 tokens"):
        export_npu(source, tmp_path / "out", calibration="short")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        export_npu(tiny_mamba(tmp_path / "mamba.gguf"), tmp_path / "out")


def test_equal_channels_change_no_result(tmp_path: Path) -> None:
    """Keys are divided by what queries are multiplied with, the same in both elements of a rotated pair; values too."""
    network = read_network(read_gguf(tiny_llama(tmp_path / "m.gguf")))
    heads, kv, n = network.n_head, network.n_head_kv, network.head_dim
    names = {"q": heads * n, "k": kv * n, "v": kv * n}
    weights = Weights({f"blk.1.attn_{name}.weight": np.ones(size, np.float32) for name, size in names.items()}, {})
    seen = np.random.default_rng(0).uniform([[[-8]], [[4]]], [[[-4]], [[8]]], (2, kv, n)).astype(np.float32)
    equalize_keys(network, weights, 1, seen)
    equalize_values(network, weights, 1, seen)
    queries = weights.scales["blk.1.attn_q.weight"].reshape(kv, heads // kv, n)
    keys, values = (weights.scales[f"blk.1.attn_{name}.weight"].reshape(kv, n) for name in "kv")
    back = weights.vectors["blk.1.value_factors"].reshape(kv, heads // kv, n)
    assert np.allclose(queries * keys[:, None], 1, rtol=1e-6)
    assert np.allclose(back * values[:, None], 1, rtol=1e-6)
    assert np.array_equal(keys[:, : n // 2], keys[:, n // 2 :])
    centred = seen * keys + weights.vectors["blk.1.key_offsets"]
    assert np.allclose(centred[0], -centred[1], atol=1e-5)
    assert np.allclose(centred[1].reshape(kv, 2, n // 2).max(axis=1), centred.max(), rtol=1e-5)
    assert np.allclose(np.abs(seen * values).max(axis=0), np.abs(seen).max(), rtol=1e-5)

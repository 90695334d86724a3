"""The exported graph, run by plain onnxruntime, computes what the source computes."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import all_logits, distance
from support.models.exported_graph import ExportedGraph
from support.models.kept_as_tiles import kept_as_tiles
from support.models.tiny_models import byte_ids, tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, EXPORTED, EXPORTED_TYPES, Tiny, write_tiny

from edgedec.gguf.file import DATA, GRAPH, VOCABULARY
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec_export.folder import read_manifest
from edgedec_export.to_onnx import export_onnx
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

onnx = pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")

IDS = np.random.default_rng(1).integers(0, 260, 40).astype(np.int32)
TOKENS: list[int] = IDS.tolist()
F32 = NDArray[np.float32]
Maker = Callable[[str], ExportedGraph]

# Root mean square of the differences over the spread of the logits. Measured: 1e-6 against the reference where both
# keep keys and values in float32, 7e-4 where the cpu runtime rounds them to float16, 0.014 where both round
# activations to 8 bits.
EXACT, HALVES, INT8 = 1e-5, 1.5e-3, 0.03


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama of 3 layers that the reference runtime reads."""
    return tiny_llama(tmp_path_factory.mktemp("llama") / "m.gguf", n_layer=3)


@pytest.fixture(scope="module")
def exported(llama: Path) -> Path:
    """Return its export."""
    return export_onnx(llama, llama.with_name("onnx"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_floats_are_the_references(tmp_path: Path, architecture: Literal["llama", "qwen2"]) -> None:
    """With float32 weights, keys and values, logits equal the reference's up to float32's rounding."""
    path = tiny_llama(tmp_path / "m.gguf", architecture=architecture, tied=True)
    graph = ExportedGraph(export_onnx(path, tmp_path / "onnx"))
    assert distance(graph.forward(TOKENS, 0)[0], all_logits(Reference(), path, IDS, kv_type="f32")) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_every_architecture_is_the_references(tmp_path: Path, name: str) -> None:
    """Logits are the reference's, up to float32's rounding.

    Among the switches are scales and caps, rotary scalings, layers that don't rotate, norms of heads, over all heads
    and behind half-layers, biases, GELU, sliding windows, fused matrices and tied heads.
    """
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name])
    window = dict(ARCHITECTURES[name].keys).get("attention.sliding_window", 8)
    graph = ExportedGraph(export_onnx(path, tmp_path / "onnx"), window=window)
    assert distance(graph.forward(TOKENS, 0)[0], all_logits(Reference(), path, IDS, kv_type="f32")) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma3"])
@pytest.mark.parametrize("types", [EXPORTED_TYPES[:6], EXPORTED_TYPES[6:]])
def test_every_type_is_the_cpu_runtimes(tmp_path: Path, name: str, types: tuple[str, ...]) -> None:
    """Logits are the cpu runtime's for matrices of all types, in heads and embeddings, tied and not."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=types, seed=3))
    graph = ExportedGraph(export_onnx(path, tmp_path / "onnx"), window=8)
    assert distance(graph.forward(TOKENS, 0)[0], all_logits(Cpu(), path, IDS)) < INT8


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["balanced", "small"])
def test_rounded_weights_stay_close(tmp_path: Path, quant: str) -> None:
    """Even random weights, the hardest to round, stay close; the manifest names each method; small is smaller."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(types=("F16",)))
    folders = [export_onnx(path, tmp_path / name, quant=name) for name in ("exact", quant)]
    exact, rounded = (ExportedGraph(folder).forward(TOKENS, 0)[0] for folder in folders)
    assert 0 < distance(rounded, exact) < 0.6
    facts = read_manifest(folders[1])
    assert facts is not None
    assert {entry["method"] for entry in facts["matrices"].values()} - {"exact"}
    exact_bytes, rounded_bytes = ((folder / DATA).stat().st_size for folder in folders)
    assert rounded_bytes < exact_bytes


def test_a_text_in_parts_is_the_text(exported: Path) -> None:
    """Chunks and single tokens behind cached ones give the logits of one forward."""
    whole = ExportedGraph(exported).forward(TOKENS, 0)[0]
    graph = ExportedGraph(exported)
    parts = [graph.forward(TOKENS[a:b], a)[0] for a, b in ((0, 13), (13, 14), (14, 15), (15, 40))]
    assert distance(np.concatenate(parts), whole) < EXACT


def test_what_was_rejected_leaves_no_trace(exported: Path) -> None:
    """After going back to a smaller n_past, bits are those of a cache that never held more."""
    graph, other = ExportedGraph(exported), ExportedGraph(exported)
    for one in (graph, other):
        one.forward(TOKENS[:10], 0)
    graph.forward([7, 8, 9], 10)
    np.testing.assert_array_equal(graph.forward(TOKENS[10:12], 10)[0], other.forward(TOKENS[10:12], 10)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_tree_is_its_chains(tmp_path: Path, name: str) -> None:
    """Each row of a tree has the logits of its chain from the prefix; windows count positions, not slots."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=("F32",), sliding_window=4))
    folder = export_onnx(path, tmp_path / "onnx")
    graph = ExportedGraph(folder, window=4)
    graph.forward(TOKENS[:9], 0)
    rows, parents = [5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, -1]
    tree = graph.forward(rows, 9, parents=parents)[0]
    for path_rows in ([0, 1, 3], [0, 2, 4], [5]):
        chain = ExportedGraph(folder, window=4).forward(TOKENS[:9] + [rows[i] for i in path_rows], 0)[0]
        assert distance(tree[path_rows], chain[9:]) < EXACT


@pytest.mark.parametrize("attn_on", [[True, False, True], [False, True, True]])
def test_halves_of_layers_can_be_left_out(llama: Path, exported: Path, attn_on: list[bool]) -> None:
    """Without attention or feed-forward halves, logits are those of the reference without them."""
    mlp_on = [False, True, True]
    found = ExportedGraph(exported).forward(TOKENS, 0, attn_on=attn_on, mlp_on=mlp_on)[0]
    layers = LayerSet(np.array(attn_on), np.array(mlp_on))
    assert distance(found, all_logits(Reference(), llama, IDS, kv_type="f32", layers=layers)) < EXACT


def test_a_pass_with_layers_left_out_changes_nothing_for_later_ones(exported: Path) -> None:
    """Whole forwards over the slots of a draft that skipped layers have the bits that they have without the draft."""
    graph, other = ExportedGraph(exported), ExportedGraph(exported)
    for one in (graph, other):
        one.forward(TOKENS[:10], 0)
    before = {name: buffer.copy() for name, buffer in graph.buffers.items()}
    for i, token in enumerate((3, 4, 5)):
        graph.forward([token], 10 + i, attn_on=[True, False, True], mlp_on=[True, False, False])
    for name in ("past_key_1", "past_value_1"):
        np.testing.assert_array_equal(graph.buffers[name], before[name])
    assert (graph.buffers["past_key_0"] != before["past_key_0"]).any()
    np.testing.assert_array_equal(graph.forward(TOKENS[10:20], 10)[0], other.forward(TOKENS[10:20], 10)[0])


def test_taps_are_the_states_after_layers(llama: Path, exported: Path) -> None:
    """Taps are the reference's hidden states; that of the last layer is the head's input."""
    _, states = ExportedGraph(exported).forward(TOKENS, 0, taps=(0, 2))
    with Reference().load(llama, LoadOptions(n_ctx=64, max_rows=64, kv_type="f32")) as model:
        expected = model.session(64).forward(IDS, n_past=0, taps=(0, 2)).hidden
    for layer in (0, 2):
        assert distance(states[layer], expected[layer]) < EXACT


def test_only_the_rows_asked_for_have_logits(exported: Path) -> None:
    """Logits come in the requested order, also for no rows; layers that are not tapped return no rows."""
    whole = ExportedGraph(exported).forward(TOKENS, 0)[0]
    some, states = ExportedGraph(exported).forward(TOKENS, 0, rows=[39, 3])
    assert distance(some, whole[[39, 3]]) < EXACT
    assert states == {}
    assert ExportedGraph(exported).forward(TOKENS, 0, rows=[])[0].shape == (0, 260)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_int8_keys_and_values_stay_close(tmp_path: Path, name: str) -> None:
    """It holds in one forward, in parts and behind skipped halves; buffers are a quarter as large."""
    tokens = byte_ids("The quick brown fox jumps over the dog.")
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES[name])
    exact, graph = (ExportedGraph(export_onnx(path, tmp_path / kv, kv=kv), window=8) for kv in ("f32", "int8"))
    expected, found = exact.forward(tokens, 0)[0], graph.forward(tokens, 0)[0]
    assert 1e-4 < distance(found, expected) < 0.06
    assert {buffer.dtype for buffer in graph.buffers.values()} == {np.dtype(np.int8)}
    off = [False] * len(graph.buffers)
    graph.forward([1, 2], 13, attn_on=off[::2], mlp_on=off[::2])
    parts = [graph.forward(tokens[a:b], a)[0] for a, b in ((13, 14), (14, len(tokens)))]
    assert distance(np.concatenate(parts), expected[13:]) < 0.06


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no file that is mapped")
def test_a_model_that_is_kept_as_tiles_gives_the_same_graph(tmp_path: Path) -> None:
    """Weights are read where the GGUF's bytes are, and not at the places that the GGUF had them at."""
    whole = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["llama"], types=("Q4_K", "Q6_K", "F16")))
    fetched = kept_as_tiles(whole, tmp_path / "cache")
    folders = [export_onnx(path, tmp_path / f"{i}") for i, path in enumerate((whole, fetched))]
    for name in (DATA, GRAPH, VOCABULARY):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_the_graph_says_what_the_contract_says(tmp_path: Path) -> None:
    """Names, types and shapes of all inputs and outputs are checked, with sliding windows."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["gemma3"], n_layer=1))
    session = ExportedGraph(export_onnx(path, tmp_path / "onnx")).session
    inputs = [(node.name, node.type, node.shape) for node in session.get_inputs()]
    assert inputs == [
        ("input_ids", "tensor(int64)", [1, "S"]),
        ("position_ids", "tensor(int64)", [1, "S"]),
        ("seqlens_k", "tensor(int32)", [1]),
        ("total_sequence_length", "tensor(int32)", []),
        ("attention_bias", "tensor(float)", [1, 1, "A", "T"]),
        ("attention_bias_local", "tensor(float)", [1, 1, "A", "T"]),
        ("logit_rows", "tensor(int64)", ["R"]),
        ("attention_rows", "tensor(int64)", ["A"]),
        ("attn_on", "tensor(bool)", [1]),
        ("mlp_on", "tensor(bool)", [1]),
        ("tap_rows", "tensor(int64)", [1]),
        ("past_key_0", "tensor(float)", [1, 1, "C", 128]),
        ("past_value_0", "tensor(float)", [1, 1, "C", 128]),
    ]
    outputs = {node.name: node.shape for node in session.get_outputs()}
    assert outputs == {
        "logits": [1, "R", 260],
        "hidden_0": [1, None, 256],
        "present_key_0": [1, 1, "C", 128],
        "present_value_0": [1, 1, "C", 128],
    }

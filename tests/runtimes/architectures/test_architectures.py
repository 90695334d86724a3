"""Architectures are plug-ins; fused matrices are read as their parts; what a file leaves out has its default.

Tests of shared code run with some architectures only, which have among them whatever any architecture has. Nextn
layers in a file: the model without them, and the layer as a model of its own.
"""

import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.tiny_nextn import OWN, nextn_metadata, nextn_tensors, write_nextn
from support.models.code_paths import CODE_PATHS
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.processes.installed import with_plugin

from edgedec import plugins
from edgedec.errors import ModelFormatError, PluginError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.gguf.metadata import get_per_layer
from edgedec.gguf.model_info import describe
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.architectures.architecture import BIASES, Architecture, plain
from edgedec_runtimes.architectures.fused import unfused
from edgedec_runtimes.architectures.header import Header
from edgedec_runtimes.architectures.nextn import is_nextn_alone, nextn_layer, nextn_model, without_nextn
from edgedec_runtimes.architectures.reading import read_description
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.weights import tile_job
from edgedec_runtimes.shared.consistency import require_consistent
from edgedec_runtimes.shared.hyperparameters import ATTENTION

ROOT = Path(__file__).parents[3]
OTHER = Architecture(
    lambda header: replace(plain(header), residual_scale=header.number("halves", 1.0)), keys=frozenset({"halves"})
)
NONE = "no architecture"


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="the sources are not beside the tests")
def test_the_packages_entry_points_are_those_that_are_found() -> None:
    """The architectures that the sources declare are those of the installed metadata, and each has its file."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    own = {name: plugin.target for name, plugin in plugins.plugins(plugins.ARCHITECTURES).items()}
    assert declared["edgedec.architectures"] == own
    for name in own:
        assert isinstance(plugins.load_plugin(plugins.ARCHITECTURES, name), Architecture)
        file = ROOT / f"runtimes/edgedec_runtimes/architectures/{name.replace('-', '_')}.py"
        assert len(file.read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.slow
def test_an_architecture_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its name in the file, and its switches change the logits; another object is refused by name."""
    path = write_tiny(tmp_path / "m.gguf", Tiny("other", keys=(("halves", 0.5),)))
    reason = Cpu().accepts(path)
    assert reason is not None
    assert "the architecture is 'other'; the cpu runtime runs llama, qwen2, " in reason
    with_plugin(monkeypatch, tmp_path / "plugins", plugins.ARCHITECTURES, "other", f"{__name__}:OTHER")
    assert Cpu().accepts(path) is None
    llama = write_tiny(tmp_path / "l.gguf", Tiny("qwen3"))
    network = read_network(read_gguf(path))
    assert (network.switches.residual_scale, read_network(read_gguf(llama)).switches.residual_scale) == (0.5, 1.0)
    with Cpu().load(path, LoadOptions(n_ctx=64)) as model:
        assert np.isfinite(model.session(64).forward(np.arange(5, dtype=np.int32), n_past=0).logits).all()
    with_plugin(monkeypatch, tmp_path / "later", plugins.ARCHITECTURES, "other", f"{__name__}:NONE")
    with pytest.raises(PluginError, match="the architecture 'other' is of the type str, not Architecture"):
        read_network(read_gguf(path))


@pytest.mark.slow
@pytest.mark.parametrize("types", [("F32",), ("Q4_K",), ("Q8_0",)])
def test_fused_matrices_are_their_parts(tmp_path: Path, types: tuple[str, ...]) -> None:
    """Rows of a fused matrix, and elements of a fused bias, in the file's bytes; a file without any stays as it is."""
    tiny = Tiny("qwen2", types=types)
    tensors = dict(tiny_tensors(tiny))
    for kind in ("weight", "bias"):
        parts = [tensors.pop(f"blk.0.attn_{part}.{kind}") for part in "qkv"]
        shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
        tensors[f"blk.0.attn_qkv.{kind}"] = RawTensor(parts[0].type, shape, b"".join(part.data for part in parts))
    gate, up = tensors.pop("blk.1.ffn_gate.weight"), tensors["blk.1.ffn_up.weight"]
    tensors["blk.1.ffn_up.weight"] = RawTensor(up.type, (256, 512), gate.data + up.data)
    plain_path = write_tiny(tmp_path / "plain.gguf", tiny)
    fused = read_gguf(write_gguf(tmp_path / "fused.gguf", tiny_metadata(tiny), tensors))
    found, expected = read_description(fused, "cpu").gguf, read_gguf(plain_path)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert (found.tensors[name].shape, found.tensors[name].type) == (tensor.shape, tensor.type)
        assert found.read_tensor_bytes(name) == expected.read_tensor_bytes(name)
    assert unfused(found, read_network(fused)) is found
    tokens, logits = np.arange(9, dtype=np.int32), []
    for path in (plain_path, fused.paths[0]):
        with Cpu().load(path, LoadOptions(n_ctx=64)) as model:
            logits.append(model.session(64).forward(tokens, n_past=0, rows="all").logits)
    np.testing.assert_array_equal(logits[0], logits[1])


def test_a_fused_matrix_of_another_height_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is cut that does not fit its parts."""
    tensors = dict(tiny_tensors(ARCHITECTURES["phi3"]))
    tensors["blk.0.attn_qkv.weight"] = RawTensor(GGMLType.F32, (256, 480), bytes(256 * 480 * 4))
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(ARCHITECTURES["phi3"]), tensors)
    with pytest.raises(Exception, match=r"blk\.0\.attn_q"):
        read_network(read_gguf(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("gemma2", (True, False) * 2),
        ("gemma3", (True,) * 4),
        *((name, (True,) * 3 + (False,)) for name in ("exaone4", "olmo2")),
    ],
)
def test_which_layers_slide(tmp_path: Path, name: str, pattern: tuple[bool, ...]) -> None:
    """By the architecture's period, by another one of the file, or layer by layer; without a window, none does."""
    tiny = Tiny(name, n_layer=4, keys=(("attention.sliding_window", 8),))

    def sliding(*keys: tuple[str, object]) -> tuple[bool, ...]:
        gguf = read_gguf(write_tiny(tmp_path / "m.gguf", replace(tiny, keys=(*tiny.keys, *keys))))
        return read_description(gguf, "cpu").switches.sliding

    assert sliding() == pattern
    assert sliding(("attention.sliding_window_pattern", 3)) == (True, True, False, True)
    assert sliding(("attention.sliding_window_pattern", [False, True, True, False])) == (False, True, True, False)
    assert sliding(("attention.sliding_window", 0)) == ()
    with pytest.raises(Exception, match="sliding_window_pattern is 0"):
        sliding(("attention.sliding_window_pattern", 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_layer", "scale"), [("gemma2", 46, 32), ("gemma2", 26, 128), ("gemma3", 62, 32), ("gemma3", 26, 128)]
)
def test_the_27b_of_gemma_scales_attention_by_its_width(tmp_path: Path, name: str, n_layer: int, scale: int) -> None:
    """As llama.cpp, which tells it by the number of layers; the others scale by the length of a head."""
    tiny = Tiny(name, n_layer=n_layer, n_embd=64, n_head=2, n_head_kv=1, head_dim=128, n_ff=32, tied=True)
    switches = read_description(read_gguf(write_tiny(tmp_path / "m.gguf", tiny)), "cpu").switches
    assert switches.attention_scale == pytest.approx(scale**-0.5)


def test_tensors_with_other_names(tmp_path: Path) -> None:
    """They are what they stand for; a file that has the usual name as well is refused, whichever comes first."""
    tiny = ARCHITECTURES["seed_oss"]
    metadata, tensors = tiny_metadata(tiny), tiny_tensors(tiny)
    found = read_description(read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors)), "cpu").gguf
    assert {"blk.0.ffn_norm.weight", "blk.1.ffn_norm.weight"} <= found.tensors.keys()
    assert not any("post_attention_norm" in name for name in found.tensors)
    norm = tensors["blk.1.post_attention_norm.weight"]
    assert found.read_tensor_bytes("blk.1.ffn_norm.weight") == norm.data
    usual = {"blk.1.ffn_norm.weight": norm}
    for both in (usual | tensors, tensors | usual):
        with pytest.raises(UnsupportedModelError, match=r"blk\.1\.post_attention_norm\.weight' is none that"):
            read_network(read_gguf(write_gguf(tmp_path / "both.gguf", metadata, both)))


def test_missing_norms_are_named(tmp_path: Path) -> None:
    """What an architecture needs must be there, and what it does not know must not."""
    tensors = dict(tiny_tensors(ARCHITECTURES["olmo2"]))
    del tensors["blk.1.attn_k_norm.weight"]
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(ARCHITECTURES["olmo2"]), tensors)
    with pytest.raises(Exception, match=r"no tensor 'blk\.1\.attn_k_norm\.weight'"):
        read_network(read_gguf(path))
    tiny = replace(ARCHITECTURES["granite"], biases=True)
    assert not (BIASES & plugins.load_plugin(plugins.ARCHITECTURES, "granite").vectors)
    with pytest.raises(UnsupportedModelError, match=r"attn_q\.bias' is none that this architecture has"):
        read_network(read_gguf(write_tiny(tmp_path / "m.gguf", tiny)))


@pytest.mark.parametrize(
    ("name", "key"),
    [*(("minicpm", key) for key in ("embedding_scale", "residual_scale", "logit_scale")), ("nanbeige", "num_loops")],
)
def test_missing_numbers_are_named(tmp_path: Path, name: str, key: str) -> None:
    """A file without them would be another network."""
    metadata = tiny_metadata(ARCHITECTURES[name])
    del metadata[f"{name}.{key}"]
    path = write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors(ARCHITECTURES[name]))
    with pytest.raises(ModelFormatError, match=rf"the metadata has no '{name}\.{key}'"):
        read_network(read_gguf(path))


def test_a_fourth_section_of_a_rotation_is_refused(tmp_path: Path) -> None:
    """The pairs of the first three turn with the position of a text; what a fourth one turns with is not known."""
    for sections, is_run in (([8, 4, 4], True), ([8, 4, 4, 0], True), ([8, 4, 2, 2], False)):
        path = write_tiny(tmp_path / "m.gguf", Tiny("qwen2vl", keys=(("rope.dimension_sections", sections),)))
        reason = Cpu().accepts(path)
        assert (reason is None) == is_run
        assert is_run or "qwen2vl.rope.dimension_sections has a section after its first three" in str(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("smallthinker", "expert_gating_func", 0),
        ("smallthinker", "expert_gating_func", 9),
        ("qwen2vl", "rope.dimension_sections", [0, 0, 0, 0]),
        ("qwen3vl", "rope.dimension_sections", [400, 2, 2, 0]),
        ("qwen3vl", "n_deepstack_layers", 4),
        ("nanbeige", "num_loops", 400),
    ],
)
def test_what_llamacpp_would_end_the_process_over_is_refused(tmp_path: Path, name: str, key: str, value: Any) -> None:
    """By the key, before llama.cpp sees the file."""
    tiny = ARCHITECTURES[name]
    path = write_tiny(tmp_path / "m.gguf", tiny, metadata={f"{name}.{key}": value})
    with pytest.raises(ModelFormatError, match=f"{name}.{key}"):
        require_consistent(read_gguf(path))


def test_layers_of_several_passes_share_their_weights(tmp_path: Path) -> None:
    """They count as layers, and the tiles of a matrix are there once."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["nanbeige"])
    gguf = read_gguf(path)
    network = read_network(gguf)
    assert (network.n_layer, network.n_block, network.n_with(ATTENTION), network.switches.norm_period) == (6, 3, 6, 3)
    placed = {p.layer: p.tensor.name for p in network.matrices if p.tensor.name.endswith("attn_q.weight")}
    assert placed == {layer: f"blk.{layer % 3}.attn_q.weight" for layer in range(6)}
    job = tile_job(gguf, network, LoadOptions())
    assert sum(tensor.name == "blk.1.ffn_up.weight" for tensor in job.tensors) == 1
    halves = layer_bytes(path).halves
    np.testing.assert_array_equal(halves[:3], halves[3:])


def test_the_header_reads_numbers_with_their_defaults(tmp_path: Path) -> None:
    """A missing number has its default; without one the file is refused, by the key."""
    gguf = read_gguf(write_tiny(tmp_path / "m.gguf", Tiny()))
    found = read_description(gguf, "cpu")

    header = Header(gguf, describe(gguf), found.hyper)
    assert (header.number("x", 2.0), header.whole("x", 3), header.flag("x", default=True)) == (2.0, 3, True)
    assert header.every(2) == (False, True)
    with pytest.raises(Exception, match=r"llama\.logit_scale"):
        header.number("logit_scale")


def features(path: Path) -> set[str]:
    """Return what a network has: its switches that are no defaults, its mixers, and its kinds of tensors."""
    gguf = read_gguf(path)
    network = read_network(gguf)
    switches = {
        field.name + (f" {value}" if isinstance(value, str | bool) else "")
        for field in fields(network.switches)
        if field.default is not MISSING and (value := getattr(network.switches, field.name)) != field.default
    }
    rule = {f"rule {network.switches.recurrence.rule}"} if network.switches.recurrence else set()
    names = read_description(gguf, "cpu").gguf.tensors
    tensors = {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in names}
    return switches | rule | {f"mixer {layer.mixer}" for layer in network.layers} | tensors


@pytest.mark.slow
def test_no_architecture_has_what_no_member_has(tmp_path: Path) -> None:
    """Each switch, mixer and kind of tensor of any architecture is one of a member of CODE_PATHS."""
    found = {
        name: features(write_tiny(tmp_path / "m.gguf", replace(tiny, types=("Q4_0",))))
        for name, tiny in ARCHITECTURES.items()
    }
    covered = set().union(*(found[name] for name in CODE_PATHS))
    assert {name: kinds - covered for name, kinds in found.items() if kinds - covered} == {}


TINY = Tiny("qwen3", n_layer=3, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=32)


def test_the_model_alone_is_a_model_without_nextn_layers(tmp_path: Path) -> None:
    """Its tensors and its layers are those of a file that never had nextn layers, and so are a token's bytes."""
    path, plain = write_nextn(tmp_path / "m.gguf", TINY, OWN, n_nextn=2), write_tiny(tmp_path / "plain.gguf", TINY)
    gguf, without = read_gguf(path), read_gguf(plain)
    found = without_nextn(gguf)
    assert found.tensors.keys() == without.tensors.keys()
    assert found.metadata == without.metadata
    assert without_nextn(without) is without
    assert read_network(gguf).n_layer == 3
    assert np.array_equal(layer_bytes(path).halves, layer_bytes(plain).halves)
    assert layer_bytes(path).rest == layer_bytes(plain).rest


@pytest.mark.parametrize("own", [(), OWN])
def test_the_layer_is_a_model_of_one_layer(own: tuple[str, ...], tmp_path: Path) -> None:
    """It has the layer's tensors, and the layer's own norm and matrices where there are any, else the model's."""
    gguf = read_gguf(write_nextn(tmp_path / "m.gguf", TINY, own, n_nextn=2))
    found = nextn_model(gguf)
    assert read_network(found).n_layer == 1
    of_layer = {name.removeprefix("blk.3.") for name in gguf.tensors if name.startswith("blk.3.")}
    ordinary = {name for name in of_layer if not name.startswith("nextn.")}
    assert {name for name in found.tensors if name.startswith("blk.")} == {f"blk.0.{name}" for name in ordinary}
    for short, place in zip(OWN, ("output_norm", "output", "token_embd"), strict=True):
        source = f"blk.3.nextn.{short}.weight" if own else f"{place}.weight"
        assert found.tensors[f"{place}.weight"].offset == gguf.tensors[source].offset
    name = "blk.3.attn_q.weight"
    assert found.read_tensor_bytes("blk.0.attn_q.weight") == gguf.read_tensor_bytes(name)


def test_what_the_metadata_says_by_layer_is_the_layers(tmp_path: Path) -> None:
    """An array's number for the layer stands, and the last one of an array for the model's own layers alone."""
    arrays = {
        "qwen3.feed_forward_length": np.array([1, 2, 3, 4], np.int32),
        "qwen3.attention.head_count_kv": np.array([5, 6, 7], np.int32),
        "qwen3.rope.dimension_sections": np.array([1, 2, 3, 4], np.int32),
        "qwen3.attention.recurrent_layers": np.array([True, True, False, True]),
        "qwen3.ssm.state_size": 16,
        "qwen3.leading_dense_block_count": 1,
    }
    path = write_gguf(tmp_path / "m.gguf", nextn_metadata(TINY) | arrays, nextn_tensors(TINY))
    found = nextn_model(read_gguf(path))
    values = {key: found.metadata[f"qwen3.{key}"] for key in ("full_attention_interval", "leading_dense_block_count")}
    assert values == {"full_attention_interval": 1, "leading_dense_block_count": 0}
    assert get_per_layer(found, "qwen3.feed_forward_length", 1, at_most=9) == (4,)
    assert get_per_layer(found, "qwen3.attention.head_count_kv", 1, at_most=9) == (7,)
    assert get_per_layer(found, "qwen3.attention.recurrent_layers", 1, at_most=1) == (0,)
    assert found.metadata["qwen3.rope.dimension_sections"] == read_gguf(path).metadata["qwen3.rope.dimension_sections"]


def test_where_nextn_layers_are(tmp_path: Path) -> None:
    """Beside a model, alone, or counted by the metadata and left out of the file."""
    beside = read_gguf(write_nextn(tmp_path / "beside.gguf", TINY))
    alone = read_gguf(write_nextn(tmp_path / "alone.gguf", TINY, alone=True))
    kept = {name: tensor for name, tensor in nextn_tensors(TINY).items() if not name.startswith("blk.3.")}
    counted = read_gguf(write_gguf(tmp_path / "counted.gguf", nextn_metadata(TINY), kept))
    assert [nextn_layer(gguf) for gguf in (beside, alone, counted)] == [3, 3, None]
    assert [is_nextn_alone(gguf) for gguf in (beside, alone, counted)] == [False, True, False]
    assert read_network(counted).n_layer == 3


def test_a_count_above_the_layers_is_refused(tmp_path: Path) -> None:
    """By its name, wherever it is read."""
    path = write_gguf(tmp_path / "m.gguf", nextn_metadata(TINY) | {"qwen3.nextn_predict_layers": 4}, {})
    for read in (without_nextn, nextn_layer):
        with pytest.raises(ModelFormatError, match=r"'qwen3.nextn_predict_layers' is 4, expected .* from 0 to 3"):
            read(read_gguf(path))

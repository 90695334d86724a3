"""Files of networks with states, gated delta rules and Mamba-2 mixers: which layers have one, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, tiny_tensors, write_tiny

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.hyperparameters import ATTENTION, ATTENTION_AND_RECURRENT, NO_MIXER, RECURRENT

TINY = replace(ARCHITECTURES["qwen35"], recurrent=(0, 2))
TOKENS = np.arange(20, dtype=np.int32)


def written(path: Path, keys: dict[str, Any], tensors: Mapping[str, RawTensor | None] | None = None) -> Path:
    """Write the tiny model with other keys below the architecture's name and other tensors; None for none."""
    return write_changed(path, TINY, keys, tensors or {})


def network_of(path: Path) -> Network:
    return read_network(read_gguf(path))


def vector(values: list[float]) -> RawTensor:
    return RawTensor(GGMLType.F32, (len(values),), np.array(values, np.float32).tobytes())


@pytest.mark.slow
def test_which_layers_have_a_state(tmp_path: Path) -> None:
    """By an array of the file, or by an interval, whose last layer has attention."""
    by_array = network_of(written(tmp_path / "a.gguf", {}))
    mixers = [layer.mixer for layer in by_array.layers]
    assert mixers == ["recurrent", "attention", "recurrent", "attention"]
    without: dict[str, Any] = {"attention.recurrent_layers": None}
    by_interval = network_of(written(tmp_path / "i.gguf", without | {"full_attention_interval": 2}))
    assert [layer.mixer for layer in by_interval.layers] == mixers
    with pytest.raises(ModelFormatError, match=r"it has no tensor 'blk.1.ssm_mix.weight'"):
        network_of(written(tmp_path / "w.gguf", without))  # four layers, the last of which has attention


def block_to_draft(path: Path) -> Path:
    """Write the tiny model with a block behind its layers that only drafts."""
    tensors = tiny_tensors(TINY)
    added = {name.replace("blk.3.", "blk.4."): t for name, t in tensors.items() if name.startswith("blk.3.")}
    added |= {f"blk.4.nextn.{name}.weight": vector([1.0] * TINY.n_embd) for name in ("enorm", "hnorm")}
    layers = {"block_count": 5, "attention.recurrent_layers": [True, False, True, False, False]}
    return written(path, layers | {"nextn_predict_layers": 1}, added)


@pytest.mark.slow
def test_blocks_that_draft_are_left_out(tmp_path: Path) -> None:
    """A file with such a block has the logits of one without, and no memory is planned for it."""
    paths = write_tiny(tmp_path / "m.gguf", TINY), block_to_draft(tmp_path / "d.gguf")
    found, terms, options = [], [], LoadOptions(n_ctx=64, n_threads=1)
    for path in paths:
        with Cpu().load(path, options) as model:
            found.append(model.session(64).forward(TOKENS, n_past=0).logits.view(np.uint32).copy())
        planned = {term.name: term.n_bytes for term in Cpu().plan(path, options)}
        terms.append((planned["KV cache"], planned["weights (tiles)"]))
    np.testing.assert_array_equal(found[0], found[1])
    assert terms[0] == terms[1]


REFUSED: list[tuple[dict[str, Any], dict[str, RawTensor], type[Exception], str]] = [
    ({"ssm.v_head_reordered": True}, {}, UnsupportedModelError, "ssm.v_head_reordered"),
    ({"rope.mrope_interleaved": True}, {}, UnsupportedModelError, "rope.mrope_interleaved"),
    ({"vision.block_count": 2}, {}, UnsupportedModelError, "vision.block_count"),
    ({"ssm.inner_size": 128}, {}, ModelFormatError, "inner_size = time_step_rank"),
    ({"ssm.group_count": 3}, {}, ModelFormatError, "a multiple of group_count"),
    ({"ssm.state_size": None}, {}, ModelFormatError, "expected positive numbers"),
    ({"ssm.conv_kernel": 17}, {}, UnsupportedModelError, "go over 17 tokens, not 2 to 16"),
    ({"nextn_predict_layers": 4}, {}, ModelFormatError, "a whole number from 0 to 3"),
    ({}, {"blk.0.ssm_dt": vector([0.0] * 4)}, UnsupportedModelError, "no use for tensor 'blk.0.ssm_dt'"),
    ({}, {"blk.0.ssm_norm.weight": vector([1.0] * 16)}, ModelFormatError, "ssm_norm.weight"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "tensors", "kind", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_is_refused(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, RawTensor], kind: type[Exception], words: str
) -> None:
    """Keys and tensors of other converters, and sizes that contradict each other, are named."""
    with pytest.raises(kind, match=words):
        network_of(written(tmp_path / "m.gguf", keys, tensors))


@pytest.mark.slow
def test_states_that_would_grow_are_refused(tmp_path: Path) -> None:
    """A rate above 0, which is no sound number, is named when the weights are read."""
    path = written(tmp_path / "m.gguf", {}, {"blk.2.ssm_a": vector([-1.0, -0.5, 0.25, -2.0])})
    with pytest.raises(ModelFormatError, match=r"'blk.2.ssm_a' holds 0.25, expected rates of at most 0"):
        Cpu().load(path, LoadOptions(n_ctx=64, n_threads=1))


NAMES = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")


def write_changed(path: Path, tiny: Tiny, keys: Mapping[str, Any], tensors: Mapping[str, RawTensor | None]) -> Path:
    """Write a tiny model with other metadata below the architecture's name, and other tensors; None for none."""
    changed = {f"{tiny.architecture}.{key}": value for key, value in keys.items()}
    metadata = {key: value for key, value in (tiny_metadata(tiny) | changed).items() if value is not None}
    found = {key: tensor for key, tensor in {**tiny_tensors(tiny), **tensors}.items() if tensor is not None}
    return write_gguf(path, metadata, found)


def write(path: Path, name: str, keys: Mapping[str, Any], tensors: Mapping[str, RawTensor | None]) -> Path:
    return write_changed(path, ARCHITECTURES[name], keys, tensors)


def refusal(path: Path) -> str:
    """Return why the cpu runtime does not take a file."""
    reason = Cpu().accepts(path)
    assert reason is not None
    return reason


def floats(*shape: int) -> RawTensor:
    return RawTensor(GGMLType.F32, shape, np.ones(shape, np.float32).tobytes())


@pytest.mark.slow
def test_layers_are_what_the_file_says(tmp_path: Path) -> None:
    """A mixer, attention, both, or a feed-forward block alone, whose norm is the layer's only one."""

    def mixers(name: str) -> list[tuple[str, bool]]:
        network = read_network(read_gguf(write(tmp_path / "m.gguf", name, {}, {})))
        return [(network.layers[i].mixer, network.has_mlp(i)) for i in range(network.n_layer)]

    assert mixers("granitehybrid") == [(RECURRENT, True), (ATTENTION, True), (RECURRENT, True), (RECURRENT, True)]
    assert mixers("falcon-h1") == [(ATTENTION_AND_RECURRENT, True)] * 2
    single = [(RECURRENT, False), (NO_MIXER, True), (ATTENTION, False), (NO_MIXER, True), (RECURRENT, False)]
    assert mixers("nemotron_h") == mixers("nemotron_h_moe") == single
    assert mixers("mamba2") == [(RECURRENT, False)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_contradict_each_other(tmp_path: Path, name: str) -> None:
    """Of the metadata among themselves, and against the tensors."""
    space = ARCHITECTURES[name].space
    for key in ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel"):
        reason = refusal(write(tmp_path / "m.gguf", name, {f"ssm.{key}": 0}, {}))
        assert "expected positive numbers, inner_size a multiple of time_step_rank" in reason
    assert "expected positive numbers" in refusal(write(tmp_path / "m.gguf", name, {"ssm.time_step_rank": 7}, {}))
    odd = {"ssm.state_size": space.n_state + 1}
    assert "has the shape" in refusal(write(tmp_path / "m.gguf", name, odd, {}))
    assert "blk.0.ssm" in refusal(write(tmp_path / "m.gguf", name, {}, {"blk.0.ssm_dt.bias": None}))
    assert "blk.0.ssm_d" in refusal(write(tmp_path / "m.gguf", name, {}, {"blk.0.ssm_d": floats(1, space.n_head + 1)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("short", ["ssm_in.weight", "ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_a", "ssm_out.weight"])
def test_missing_tensors(tmp_path: Path, name: str, short: str) -> None:
    reason = refusal(write(tmp_path / "m.gguf", name, {}, {f"blk.0.{short}": None}))
    assert "it has no tensor 'blk.0.ssm" in reason or "no use for tensor 'blk.0.ssm_in.weight'" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"moe_latent_size": 64}, "does not know 'nemotron_h_moe.moe_latent_size'"),
        ({"expert_group_count": 4}, "its experts are chosen by groups, 4 of them"),
        ({"expert_gating_func": 7}, "expert_gating_func is 7, none of 1, 2, 3"),
    ],
)
def test_mixtures_that_are_not_supported(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    """Experts that work in a smaller space, and others."""
    assert expected in refusal(write(tmp_path / "m.gguf", "nemotron_h_moe", keys, {}))


@pytest.mark.slow
def test_a_gate_is_refused_where_blocks_have_none(tmp_path: Path) -> None:
    """It would be left out."""
    gate = {"blk.1.ffn_gate.weight": floats(256, 256)}
    assert "blk.1.ffn_gate.weight" in refusal(write(tmp_path / "m.gguf", "nemotron_h", {}, gate))

"""Files of models with Mamba-2 mixers: what contradicts itself, and what is not supported, is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, tiny_metadata, tiny_tensors

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.hyperparameters import ATTENTION, ATTENTION_AND_RECURRENT, NO_MIXER, RECURRENT

NAMES = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")


def write(path: Path, name: str, keys: dict[str, Any], tensors: dict[str, RawTensor | None]) -> Path:
    """Write a tiny model with other metadata below the architecture's name, and other tensors; None for none."""
    tiny = ARCHITECTURES[name]
    changed = {f"{tiny.architecture}.{key}": value for key, value in keys.items()}
    metadata = {key: value for key, value in (tiny_metadata(tiny) | changed).items() if value is not None}
    found = {key: tensor for key, tensor in (tiny_tensors(tiny) | tensors).items() if tensor is not None}
    return write_gguf(path, metadata, found)


def refusal(path: Path) -> str:
    """Return why the cpu runtime does not take a file."""
    reason = Cpu().accepts(path)
    assert reason is not None
    return reason


def floats(*shape: int) -> RawTensor:
    """Return a tensor of ones."""
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
    """Each that llama.cpp needs."""
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
    gate: dict[str, RawTensor | None] = {"blk.1.ffn_gate.weight": floats(256, 256)}
    assert "blk.1.ffn_gate.weight" in refusal(write(tmp_path / "m.gguf", "nemotron_h", {}, gate))

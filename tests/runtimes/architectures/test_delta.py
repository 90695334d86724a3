"""Headers of Qwen3.5 and Qwen3-Next: which layers have a recurrent state, what is left out, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, tiny_metadata, tiny_tensors, write_tiny

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.cpu.runtime import Cpu

TINY = replace(ARCHITECTURES["qwen35"], recurrent=(0, 2))
TOKENS = np.arange(20, dtype=np.int32)


def written(
    path: Path, metadata: dict[str, Any], tensors: dict[str, RawTensor] | None = None, without: tuple[str, ...] = ()
) -> Path:
    """Write the tiny model with other metadata and tensors."""
    keys = {name: value for name, value in (tiny_metadata(TINY) | metadata).items() if name not in without}
    return write_gguf(path, keys, tiny_tensors(TINY) | (tensors or {}))


def network_of(path: Path) -> Network:
    """Return what a header says."""
    return read_network(read_gguf(path))


def vector(values: list[float]) -> RawTensor:
    """Return a vector of F32."""
    return RawTensor(GGMLType.F32, (len(values),), np.array(values, np.float32).tobytes())


@pytest.mark.slow
def test_which_layers_have_a_state(tmp_path: Path) -> None:
    """By an array of the file, or by an interval, whose last layer has attention."""
    by_array = network_of(written(tmp_path / "a.gguf", {}))
    mixers = [layer.mixer for layer in by_array.layers]
    assert mixers == ["recurrent", "attention", "recurrent", "attention"]
    key = "qwen35.attention.recurrent_layers"
    by_interval = network_of(written(tmp_path / "i.gguf", {"qwen35.full_attention_interval": 2}, without=(key,)))
    assert [layer.mixer for layer in by_interval.layers] == mixers
    with pytest.raises(ModelFormatError, match=r"it has no tensor 'blk.1.ssm_mix.weight'"):
        network_of(written(tmp_path / "w.gguf", {}, without=(key,)))  # four layers, the last of which has attention


def block_to_draft(path: Path) -> Path:
    """Write the tiny model with a block behind its layers that only drafts."""
    tensors = tiny_tensors(TINY)
    added = {name.replace("blk.3.", "blk.4."): t for name, t in tensors.items() if name.startswith("blk.3.")}
    added |= {f"blk.4.nextn.{name}.weight": vector([1.0] * TINY.n_embd) for name in ("enorm", "hnorm")}
    layers = {"qwen35.block_count": 5, "qwen35.attention.recurrent_layers": [True, False, True, False, False]}
    return written(path, layers | {"qwen35.nextn_predict_layers": 1}, added)


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


REFUSED: list[tuple[Callable[[Path], Path], type[Exception], str]] = [
    (lambda p: written(p, {"qwen35.ssm.v_head_reordered": True}), UnsupportedModelError, "ssm.v_head_reordered"),
    (lambda p: written(p, {"qwen35.rope.mrope_interleaved": True}), UnsupportedModelError, "rope.mrope_interleaved"),
    (lambda p: written(p, {"qwen35.vision.block_count": 2}), UnsupportedModelError, "vision.block_count"),
    (lambda p: written(p, {"qwen35.ssm.inner_size": 128}), ModelFormatError, "inner_size = time_step_rank"),
    (lambda p: written(p, {"qwen35.ssm.group_count": 3}), ModelFormatError, "a multiple of group_count"),
    (lambda p: written(p, {}, without=("qwen35.ssm.state_size",)), ModelFormatError, "expected positive numbers"),
    (lambda p: written(p, {"qwen35.ssm.conv_kernel": 17}), UnsupportedModelError, "go over 17 tokens, not 2 to 16"),
    (lambda p: written(p, {"qwen35.nextn_predict_layers": 4}), ModelFormatError, "a whole number from 0 to 3"),
    (
        lambda p: written(p, {}, {"blk.0.ssm_dt": vector([0.0] * 4)}),
        UnsupportedModelError,
        "no use for tensor 'blk.0.ssm_dt'",
    ),
    (lambda p: written(p, {}, {"blk.0.ssm_norm.weight": vector([1.0] * 16)}), ModelFormatError, "ssm_norm.weight"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("write", "kind", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_what_is_refused(tmp_path: Path, write: Callable[[Path], Path], kind: type[Exception], words: str) -> None:
    """Keys and tensors of other converters, and sizes that contradict each other, are named."""
    with pytest.raises(kind, match=words):
        network_of(write(tmp_path / "m.gguf"))


@pytest.mark.slow
def test_states_that_would_grow_are_refused(tmp_path: Path) -> None:
    """A rate above 0, which is no sound number, is named when the weights are read."""
    path = written(tmp_path / "m.gguf", {}, {"blk.2.ssm_a": vector([-1.0, -0.5, 0.25, -2.0])})
    with pytest.raises(ModelFormatError, match=r"'blk.2.ssm_a' holds 0.25, expected rates of at most 0"):
        Cpu().load(path, LoadOptions(n_ctx=64, n_threads=1))

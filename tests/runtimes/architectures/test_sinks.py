"""Attention sinks: a score of each head that takes a part of the softmax and has no value (gpt-oss, arXiv:2508.10925).

They are tested on a Llama that has them, as an architecture of another package would.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import TILE_TYPES, Tiny, tiny_metadata, tiny_tensors
from support.models.tiny_runs import all_logits, distance
from support.processes.installed import with_plugin

from edgedec import plugins
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.architectures.architecture import SINKS, Architecture
from edgedec_runtimes.cpu.library import KV_TYPES, instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

WITH_SINKS = Architecture(vectors=frozenset({SINKS}))
TOKENS = np.random.default_rng(5).integers(0, 260, 250).astype(np.int32)


@pytest.fixture(autouse=True)
def architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the architecture `sunken`."""
    with_plugin(monkeypatch, tmp_path / "plugins", plugins.ARCHITECTURES, "sunken", f"{__name__}:WITH_SINKS")


def write(path: Path, sinks: float | None, types: tuple[str, ...] = ("F32",)) -> Path:
    """Write a model whose sinks are near a score; None for a model without sinks and otherwise the same weights."""
    tiny = Tiny("sunken", types=types)
    tensors = dict(tiny_tensors(tiny))
    for layer in range(tiny.n_layer):
        if sinks is not None:
            values = (sinks + np.linspace(-1, 1, tiny.n_head)).astype(np.float32)
            tensors[f"blk.{layer}.{SINKS}"] = RawTensor(GGMLType.F32, values.shape, values.tobytes())
    return write_gguf(path, tiny_metadata(tiny), tensors)


logits = partial(all_logits, tokens=TOKENS)


@pytest.mark.parametrize("isa", instruction_sets())
def test_they_agree_with_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Below, among and far above the scores, over texts of several spans."""
    monkeypatch.setenv("EDGEDEC_CPU_ISA", isa)
    for sinks in (-4.0, 1.0, 30.0):
        path = write(tmp_path / "m.gguf", sinks)
        expected = logits(Reference(), path)
        assert distance(logits(Cpu(), path), expected) < 2e-4


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_sink_below_all_scores_changes_no_bit(tmp_path: Path, kv_type: str) -> None:
    """And one that is not does change the logits."""
    without = logits(Cpu(), write(tmp_path / "none.gguf", None), kv_type)
    np.testing.assert_array_equal(logits(Cpu(), write(tmp_path / "low.gguf", -1e30), kv_type), without)
    assert (logits(Cpu(), write(tmp_path / "high.gguf", 1.0), kv_type) != without).any(axis=1).all()


def test_a_row_has_the_same_bits_by_steps_and_in_trees(tmp_path: Path) -> None:
    """Whoever joins the spans of a query, the sink has its part once."""
    path = write(tmp_path / "m.gguf", 1.0, TILE_TYPES)
    expected = logits(Cpu(), path).astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(logits(Cpu(), path, n_threads=2).astype(np.float32).view(np.uint32), expected)
    with Cpu().load(path, LoadOptions(n_ctx=256, n_threads=2, max_rows=256)) as model:
        session = model.session(256)
        session.forward(TOKENS[:230], n_past=0)
        for i in range(230, 240):
            row = session.forward(TOKENS[i : i + 1], n_past=i).logits.view(np.uint32)
            np.testing.assert_array_equal(row[0], expected[i])
        nodes, parents = np.repeat(TOKENS[240:244], 2), np.array([-1, -1, 0, 1, 2, 3, 4, 5], np.int32)
        found = session.forward(nodes, n_past=240, parents=parents, rows="all").logits.view(np.uint32)
        np.testing.assert_array_equal(found, np.repeat(expected[240:244], 2, axis=0))


def test_sinks_of_a_wrong_length_are_refused(tmp_path: Path) -> None:
    """Their number is that of the heads."""
    tensors = dict(tiny_tensors(Tiny("sunken"))) | {f"blk.0.{SINKS}": RawTensor(GGMLType.F32, (3,), bytes(12))}
    reason = Cpu().accepts(write_gguf(tmp_path / "m.gguf", tiny_metadata(Tiny("sunken")), tensors))
    assert reason is not None
    assert "'blk.0.attn_sinks.weight' has the shape (3,), expected (4,)" in reason

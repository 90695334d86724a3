"""Mixtures of experts on the cpu runtime: what is counted of them, and which rows share an expert's weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.model import LoadOptions
from edgedec.stats import DecodeStats
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.session import CpuSession

TOKENS = np.random.default_rng(3).integers(0, 260, 256).astype(np.int32)


def loaded(path: Path, max_rows: int = 16) -> CpuModel:
    """Load a model on two threads."""
    model = Cpu().load(path, LoadOptions(n_ctx=512, n_threads=2, max_rows=max_rows))
    assert isinstance(model, CpuModel)
    return model


def test_experts_are_counted_by_rows(tmp_path: Path) -> None:
    """One row goes through n_expert_used experts; equal rows share them; many rows go through nearly all."""
    tiny = ARCHITECTURES["qwen3moe"]
    with loaded(write_tiny(tmp_path / "m.gguf", tiny)) as model:
        session = model.session(512)
        assert model.experts_touched() == {}
        session.forward(TOKENS[:1], n_past=0)
        assert model.experts_touched() == {1: tiny.n_expert_used}
        # Three branches with the same token at the same position are the same rows.
        session.forward(np.repeat(TOKENS[1:2], 3), n_past=1, parents=np.full(3, -1, np.int32), rows="all")
        assert model.experts_touched() == {1: tiny.n_expert_used, 3: tiny.n_expert_used}
        session.forward(TOKENS[:16], n_past=0, rows="all")
        touched = model.experts_touched()
        assert tiny.n_expert_used < touched[16] <= tiny.n_expert


def test_the_explanation_has_the_experts(tmp_path: Path) -> None:
    """A text's statistics say them where there are experts, and nothing else."""
    for name, n_sentences in (("qwen3moe", 1), ("qwen3", 0)):
        with loaded(write_tiny(tmp_path / f"{name}.gguf", ARCHITECTURES[name])) as model:
            session = model.session(64)
            assert isinstance(session, CpuSession)
            session.forward(TOKENS[:1], n_past=0)
            stats = DecodeStats()
            session.count_text(stats, 1)
            assert len(stats.explanation) == n_sentences
            assert all("went through, since the model was loaded: 1: 4.0" in text for text in stats.explanation)
            session.close()
            session.count_text(stats, 1)
            assert len(stats.explanation) == n_sentences


@pytest.mark.parametrize("n_rows", [1, 7, 64, 65, 256])
def test_all_rows_may_choose_the_same_experts(tmp_path: Path, n_rows: int) -> None:
    """Groups of one expert's rows are cut at 64; a tree of equal rows has equal logits, those of a single step."""
    tiny = replace(ARCHITECTURES["granitemoe-shared"], types=("Q4_K", "Q6_K", "Q8_0"))
    with loaded(write_tiny(tmp_path / "m.gguf", tiny), max_rows=256) as model:
        session = model.session(512)
        expected = session.forward(TOKENS[:1], n_past=0).logits.copy()
        rows = np.repeat(TOKENS[:1], n_rows), np.full(n_rows, -1, np.int32)
        found = session.forward(rows[0], n_past=0, parents=rows[1], rows="all").logits
        np.testing.assert_array_equal(found, np.repeat(expected, n_rows, axis=0))

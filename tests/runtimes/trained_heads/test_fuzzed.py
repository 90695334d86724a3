"""Damaged heads are refused with an EdgedecError, or are heads whose every tensor can be used."""

import random
from pathlib import Path

import numpy as np
import pytest
from support.heads.head_mutants import mutant, sound_heads

from edgedec.errors import EdgedecError
from edgedec_runtimes.trained_heads.load import load_head

pytestmark = pytest.mark.slow


def test_the_sound_heads_load(tmp_path: Path) -> None:
    """Else the mutants would be refused for what is wrong with all of them."""
    for i, files in enumerate(sound_heads()):
        files.write(tmp_path / str(i))
        assert load_head(tmp_path / str(i)).card.n_embd == 32


@pytest.mark.parametrize("seed", range(4))
def test_mutants_load_or_are_refused(tmp_path: Path, seed: int) -> None:
    """250 mutants a seed; some of each must load, or the damage would be too coarse to test anything."""
    rng, heads, n_loaded = random.Random(seed), sound_heads(), 0
    refusals: list[str] = []
    for _ in range(250):
        mutant(rng, heads).write(tmp_path)
        try:
            head = load_head(tmp_path)
        except EdgedecError as error:
            refusals.append(str(error))
            continue
        n_loaded += 1
        assert all(tensor.floats().shape == tensor.shape for tensor in head.tensors.values())
        assert 0 <= head.d2t.min() <= head.d2t.max() < head.card.n_vocab_target
        assert len(np.unique(head.d2t)) == head.card.n_vocab_draft
    assert n_loaded > 5
    assert [text for text in refusals if not text.isprintable()] == [], "a terminal can't show these"

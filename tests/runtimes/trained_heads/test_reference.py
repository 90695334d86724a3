"""The numpy draft head computes what the formulas say, with every setting, in any order of absorbing and rewinding."""

from pathlib import Path

import numpy as np
import pytest
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_heads import KINDS, TinyHead, oracle_logits, write_head

from edgedec_runtimes.trained_heads.load import load_head

pytestmark = pytest.mark.slow

N_TEXT = 9


def _opened(folder: Path, tiny: TinyHead) -> tuple[ReferenceHead, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    weights = write_head(folder, tiny)
    rng = np.random.default_rng(7)
    borrowed = rng.standard_normal((tiny.n_vocab_target, tiny.n_embd)).astype(np.float32)
    taps = rng.standard_normal((N_TEXT - 1, len(tiny.taps) * tiny.n_embd_target)).astype(np.float32)
    head = load_head(folder)
    embedding = weights.get("embedding", borrowed)
    output = weights.get("output", borrowed[head.d2t])
    return ReferenceHead(head, lambda tokens: embedding[tokens], output), weights, borrowed, taps


@pytest.mark.parametrize("tiny", KINDS.values(), ids=KINDS)
def test_logits_are_those_of_the_formulas(tmp_path: Path, tiny: TinyHead) -> None:
    """A chain of four after a text has the logits of a float64 forward of one pair after another."""
    reference, weights, borrowed, taps = _opened(tmp_path, tiny)
    text = np.random.default_rng(8).integers(0, tiny.n_vocab_target, N_TEXT).tolist()
    reference.absorb(taps)
    drafted, logits = reference.draft(text, 4)
    expected = oracle_logits(tiny, weights, borrowed, taps, text, drafted[:3])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert drafted == [int(reference.head.d2t[row.argmax()]) for row in expected]


def test_pieces_and_rewinding_change_nothing(tmp_path: Path) -> None:
    """Absorbing in pieces, drafting in between and forgetting tokens lead to the same drafts as absorbing at once."""
    reference, _, _, taps = _opened(tmp_path, TinyHead())
    text = list(range(10, 10 + N_TEXT))
    reference.absorb(taps)
    whole = reference.draft(text, 3)
    again, _, _, _ = _opened(tmp_path, TinyHead())
    again.absorb(taps[:3])
    again.draft(text[:4], 2)
    again.absorb(taps[3:6])
    again.draft([*text[:6], 99], 2)
    again.rewind(5)
    again.absorb(taps[5:])
    tokens, logits = again.draft(text, 3)
    assert tokens == whole[0]
    np.testing.assert_allclose(logits, whole[1], rtol=0, atol=1e-5)

"""A draft head beside layers that share keys and values, which leave out rows that nobody reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 71, dtype=np.int32)
N_READ = 70


def scores(session: Session) -> NDArray[np.float32]:
    """Return the head's scores behind TEXT, whose last token the session has not read."""
    assert session.draft_head is not None
    row = session.draft_head.begin(N_READ, int(TEXT[N_READ]))
    assert row is not None
    return row.copy()


@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 4, 6)])
def test_a_text_read_at_once_or_by_single_rows(tmp_path: Path, taps: tuple[int, ...]) -> None:
    """The head sees the same states of every row, whether it taps layers in front of those that share or behind."""
    sizes: dict[str, Any] = {"n_embd": 256, "n_ff": 128, "n_head": 4, "n_head_kv": 2, "head_dim": 64}
    head = TinyHead(n_embd_target=256, taps=taps, n_vocab_target=N_VOCAB, **sizes)
    write_head(tmp_path / "head", head)
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["gemma4"])
    with Cpu().load(path, LoadOptions(n_ctx=256, draft_head=tmp_path / "head")) as model:
        steps, whole, asked = (model.session(200) for _ in range(3))
        for n in range(N_READ):
            steps.forward(TEXT[n : n + 1], n_past=n)
        last = whole.forward(TEXT[:N_READ], n_past=0).logits.copy()
        every = asked.forward(TEXT[:N_READ], n_past=0, rows="all").logits[-1:].copy()
        np.testing.assert_array_equal(last, every)
        found = [scores(session) for session in (steps, whole, asked)]
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_array_equal(found[0], found[2])

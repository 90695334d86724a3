"""The plain formulas of a nextn layer are llama.cpp's, on random models of the architectures that have such layers."""

from pathlib import Path

import numpy as np
import pytest
from support.heads.llama_head import LlamaHead
from support.heads.llama_nextn import LlamaNextn
from support.heads.tiny_nextn import OWN, PlainNextn, write_nextn
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES

from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LlamaHead.available(), reason="this llama.cpp has no functions of nextn layers"),
]

TEXT = np.random.default_rng(5).integers(4, 260, 24).tolist()


@pytest.mark.parametrize("own", [OWN[:1], ()], ids=["own norm", "the model's norm"])
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_scores_are_llama_cpps(name: str, own: tuple[str, ...], tmp_path: Path) -> None:
    """Of the states that llama.cpp gives, the formulas make its scores; the cpu runtime's head is within 3 %."""
    tiny = ARCHITECTURES[name]
    path = write_nextn(tmp_path / "m.gguf", tiny, own)
    with LlamaNextn(path) as theirs:
        states = theirs.states(TEXT)
        expected = theirs.scores(TEXT[1:], states[:-1])
    assert expected.shape == (len(TEXT) - 1, N_VOCAB)
    last = tiny.n_layer - 1
    with Cpu().load(path, LoadOptions(n_ctx=64, draft_head=path)) as model:
        session = model.session(64)
        ours = session.forward(np.array(TEXT[:-1], np.int32), n_past=0, taps=(last,)).hidden[last].copy()
        head = session.draft_head
        assert head is not None
        scores = head.begin(len(TEXT) - 1, TEXT[-1])
        assert scores is not None
        found = scores.copy()
    plain = PlainNextn(tmp_path, tiny, own).scores(ours, TEXT, [])[0]
    spread = np.sqrt(np.square(expected[-1]).mean())
    assert np.sqrt(np.square(plain - expected[-1]).mean()) < 0.0025 * spread
    assert np.abs(found - expected[-1]).max() < 0.03 * np.abs(expected[-1]).max()

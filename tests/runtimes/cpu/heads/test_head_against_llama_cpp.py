"""Heads draft on the cpu runtime what llama.cpp drafts: trained ones of the same GGUF files, and nextn layers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec.head_kinds import usable_head
from edgedec.head_state import ChainRules, HeadState
from edgedec.load_options import LoadOptions
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.kind import NAME as TRAINED
from edgedec_runtimes.trained_heads.load import load_head

pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

from support.heads.llama_head import LlamaHead, LlamaNextn, LlamaPair
from support.heads.tiny_nextn import OWN, PlainNextn, write_nextn
from support.models.tiny_quantized import ARCHITECTURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LlamaHead.available(), reason="the library has no names as gcc gives them"),
]


N_DRAFT = 4
N_CTX = 128
ROUNDING = 0.04
"""How far a logit may be off, as a share of the largest: the two round activations in blocks of other sizes."""
ROUNDING_135M = 0.25
"""The same behind the thirty quantized layers of the 135M, whose output rows the cpu runtime rounds once more."""
STEPS = ((17, 0), (1, 3), (3, 2), (1, 0), (5, 0), (2, 1), (1, 4), (4, 0))
"""What each forward evaluates: tokens of the text, then drafted tokens that turn out to be wrong."""


@pytest.mark.parametrize(
    ("types", "n_embd", "has_output"),
    [
        ("F32,q=Q8_0,k=Q8_0,v=Q8_0,down=Q8_0", 48, False),
        ("F32,q=Q4_0,k=Q4_0,v=Q4_0,down=Q4_0", 48, True),
        ("Q8_0", 64, True),
        ("Q4_0,fc=Q8_0", 64, True),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_drafts_are_those_of_llama_cpp(
    tmp_path: Path, architecture: str, types: str, n_embd: int, has_output: bool
) -> None:
    """A random head of a random target, in types that the cpu runtime keeps: floats only where no blocks of 32 fit."""
    sizes: dict[str, Any] = {"n_embd": n_embd, "n_head": n_embd // 16, "n_head_kv": 1, "head_dim": 16, "n_ff": 96}
    target = write_tiny(tmp_path / "m.gguf", Tiny(architecture, n_layer=6, tied=architecture == "qwen3", **sizes))
    tiny = TinyHead(n_embd_target=n_embd, taps=(2, 3, 4), n_vocab_target=N_VOCAB, own_output=has_output, **sizes)
    write_head(tmp_path / "head", tiny)
    path = write_head_gguf(load_head(tmp_path / "head"), read_gguf(target), tmp_path / "h.gguf", types=types)
    text = np.random.default_rng(2).integers(0, N_VOCAB, 60).tolist()
    assert share_of_equal_tokens(target, path, text, ROUNDING) >= 0.9


@pytest.mark.model
def test_drafts_of_the_135m_are_those_of_llama_cpp(smollm_path: Path) -> None:
    """A trained head, where one lies beside the model or is shipped."""
    head, _ = usable_head(smollm_path, [TRAINED], None)
    if head is None or head.suffix != ".gguf":
        pytest.skip("no draft head for smollm2-135m as a GGUF")
    with Cpu().load(smollm_path, LoadOptions(n_ctx=N_CTX)) as model:
        words = (
            "The water of the sea is salt because rivers carry salt from the rocks, and the sun takes only the water."
        )
        text = model.tokenizer.encode(words, add_special=False, parse_special=False)
    assert share_of_equal_tokens(smollm_path, head, [*text, *text, *text], ROUNDING_135M) >= 0.6


def share_of_equal_tokens(target: Path, head: Path, text: list[int], rounding: float) -> float:
    """Let both draft behind each of STEPS; return the share of drafted tokens that are the same.

    Taps and logits must be the same but for rounding, and tokens where the two best logits differ by more than that.
    """
    rng, n_past, n_same = np.random.default_rng(3), 0, 0
    options = LoadOptions(n_ctx=N_CTX, draft_head=head)
    with LlamaPair(head, target, N_CTX) as theirs, Cpu().load(target, options) as model:
        session = model.session(N_CTX)
        state = session.draft_head
        assert state is not None
        layers, ids = tuple(entered - 1 for entered in theirs.taps), state.token_ids
        for n_right, n_wrong in STEPS:
            tokens = [*text[n_past : n_past + n_right], *rng.integers(0, N_VOCAB, n_wrong).tolist()]
            taps = theirs.read(tokens, n_past)
            hidden = session.forward(np.array(tokens, np.int32), n_past=n_past, taps=layers).hidden
            _assert_close(np.concatenate([hidden[layer] for layer in layers], axis=1), taps, rounding)
            n_past += n_right
            drafted, logits = theirs.draft(n_past, text[n_past], N_DRAFT, ids)
            rows = logits[:, ids]
            _assert_close(_scores(state, n_past, text[n_past], drafted[:-1]), rows, rounding)
            chain = state.chain(n_past, text[n_past], ChainRules(N_DRAFT))
            n_same += _n_same(chain.tokens, drafted, rows, 2 * rounding * np.abs(rows).max())
    return n_same / (N_DRAFT * len(STEPS))


def _assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32], rounding: float) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rounding * np.abs(theirs).max())


def _scores(state: HeadState, n_past: int, token: int, drafted: list[int]) -> NDArray[np.float32]:
    """Return the cpu runtime's scores behind `token`, and behind each drafted token."""
    found = [state.begin(n_past, token)]
    for following in drafted:
        assert found[-1] is not None
        found[-1] = found[-1].copy()  # the next row is written over it
        found.append(state.next(following))
    return np.stack([row for row in found if row is not None])


def _n_same(ours: tuple[int, ...], theirs: list[int], rows: NDArray[np.float32], close: float) -> int:
    """Return how many drafted tokens are the same up to the first other one, whose two best logits must be close."""
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            second, best = np.sort(rows[i])[-2:]
            assert best - second <= close, f"token {i}"
            return i
    return len(theirs)


NEXTN_TEXT = np.random.default_rng(5).integers(4, 260, 24).tolist()


@pytest.mark.parametrize("own", [OWN[:1], ()], ids=["own norm", "the model's norm"])
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_scores_are_llama_cpps(name: str, own: tuple[str, ...], tmp_path: Path) -> None:
    """Of the states that llama.cpp gives, the formulas make its scores; the cpu runtime's head is within 3 %."""
    tiny = ARCHITECTURES[name]
    path = write_nextn(tmp_path / "m.gguf", tiny, own)
    with LlamaNextn(path) as theirs:
        states = theirs.states(NEXTN_TEXT)
        expected = theirs.scores(NEXTN_TEXT[1:], states[:-1])
    assert expected.shape == (len(NEXTN_TEXT) - 1, N_VOCAB)
    last = tiny.n_layer - 1
    with Cpu().load(path, LoadOptions(n_ctx=64, draft_head=path)) as model:
        session = model.session(64)
        ours = session.forward(np.array(NEXTN_TEXT[:-1], np.int32), n_past=0, taps=(last,)).hidden[last].copy()
        head = session.draft_head
        assert head is not None
        scores = head.begin(len(NEXTN_TEXT) - 1, NEXTN_TEXT[-1])
        assert scores is not None
        found = scores.copy()
    plain = PlainNextn(tmp_path, tiny, own).scores(ours, NEXTN_TEXT, [])[0]
    spread = np.sqrt(np.square(expected[-1]).mean())
    assert np.sqrt(np.square(plain - expected[-1]).mean()) < 0.0025 * spread
    assert np.abs(found - expected[-1]).max() < 0.03 * np.abs(expected[-1]).max()

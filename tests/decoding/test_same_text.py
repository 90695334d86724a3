"""One seed, one text, on a real model, for every drafter and length of draft (benchmarks/texts: all prompts)."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.tiny_blocks import block_card, tiny_block, write_block
from support.heads.tiny_heads import TinyHead, write_head
from support.models.real_models import real_model

import edgedec
from edgedec.drafters.suffix.learned_file import Learned, LearnedSource, learned_path
from edgedec.drafters.suffix.store_file import vocabulary_hash
from edgedec_apps.learning import write_learned

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.usefixtures("drafting_pays")]

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
WAYS.append({"temperature": 1.0, "top_p": 1.0, "seed": 6})


def generated(draft: str, n_draft_max: int, **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each way to draw them, and note that something was drafted."""
    model = real_model("smollm2-135m.gguf")
    with edgedec.load(model, draft=draft, n_draft_max=n_draft_max, runtime="cpu", offline=True, **options) as engine:
        results = [engine.generate(PROMPT, max_tokens=20, ignore_end=True, **way) for way in WAYS]
    assert draft == "off" or any(result.stats.n_drafts for result in results)
    return [result.token_ids for result in results]


@cache
def plain() -> list[tuple[int, ...]]:
    """Return the tokens of each way without drafts."""
    return generated("off", 15)


@pytest.mark.parametrize(
    ("draft", "n_draft_max"),
    [
        ("suffix", 1),
        ("suffix", 13),
        ("common", 4),
        ("recycling", 7),
        ("trigram", 3),
        ("stand", 15),
        ("suffix+recycling+stand", 9),
        ("auto", 15),
    ],
)
def test_the_text_is_plain_decodings(draft: str, n_draft_max: int) -> None:
    """Greedy and with two seeds, the tokens are equal."""
    assert generated(draft, n_draft_max) == plain()


def test_learned_files_change_nothing(tmp_path: Path) -> None:
    """A user's file that goes on as the prompt does at first: its drafter alone, and left to the policy."""
    with edgedec.load(real_model("smollm2-135m.gguf"), draft="off", runtime="cpu", offline=True) as engine:
        tokens = engine.tokenizer.encode(PROMPT, add_special=False)
        path = learned_path(tmp_path, vocabulary_hash(engine.tokenizer))
    text = np.array([*tokens, *plain()[0][:20], *tokens, *plain()[1]], np.int32)
    write_learned(Learned(path, ("smollm2-135m",), (LearnedSource("multiply.py", text),)))
    for draft in ("learned", "suffix+learned", "auto"):
        assert generated(draft, 7, cache_dir=tmp_path) == plain()


def test_a_model_that_drafts_for_itself_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model and the cascade around it, pinned, and left to the policy where it is loaded in any case."""
    monkeypatch.setattr("edgedec.loading.draft_worth.why_it_cannot_pay", lambda *_, **__: None)
    model = real_model("smollm2-135m.gguf")
    for draft in ("model", "cascade", "auto"):
        assert generated(draft, 6, draft_model=model) == plain()


def test_a_trained_head_changes_nothing(tmp_path: Path) -> None:
    """Heads with random weights: pinned alone, pinned beside another drafter, and left to the policy."""
    sizes: dict[str, Any] = {"n_ff": 512, "n_head": 9, "n_head_kv": 3, "head_dim": 64, "n_embd": 576}
    sizes |= {"n_embd_target": 576, "n_vocab_draft": 2000, "n_vocab_target": 49152, "taps": (2, 15, 27)}
    write_head(tmp_path / "pairs", TinyHead(**sizes))
    blocks = {"n_layer": 2, "size": 8, "markov": "vanilla", "rank": 64, "confidence": True}
    selecting = {"markov": "selector", "rank": 64, "top_k": 16, "shifted": False, "conv_length": 2, "conv_group": 16}
    write_block(tmp_path / "block", tiny_block(block_card(blocks, **sizes)))
    write_block(tmp_path / "selecting", tiny_block(block_card({"size": 8} | selecting, **sizes)))
    assert generated("head", 6, draft_head=tmp_path / "selecting") == plain()
    assert generated("suffix+head", 9, draft_head=tmp_path / "pairs") == plain()
    assert generated("auto", 15, draft_head=tmp_path / "block") == plain()

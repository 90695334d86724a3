"""Reward models as scorers: heads and answers of made files, against the states and rows of a plain forward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_rankers import NO, YES, tiny_cross_encoder, tiny_qwen3_ranker

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.search_by import SearchBy
from edgedec.control_tokens import encode_with_controls
from edgedec.errors import CapabilityError
from edgedec.gguf.file import read_gguf
from edgedec_apps.ranking import rank, sigmoid
from edgedec_apps.reward import ASKED, reward_scorer
from edgedec_runtimes.shared.final_norm import read_final_norm
from edgedec_runtimes.weights.levels import read_rows

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.slow

QUESTION, STEPS = "where is the cat", ["the cat", "a dog sat", "the"]
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
CHAT = {"tokenizer.chat_template": TURN, "tokenizer.chat_template.rerank": None}
LABELS = "qwen3.classifier.output_labels"
HEADS: dict[str, tuple[tuple[int, ...], list[str] | None, tuple[float, ...]]] = {
    "two classes": ((YES, NO), None, (-1, 1)),
    "two classes with labels": ((YES, NO), ["Good", "bad"], (1, -1)),
    "one output": ((YES,), None, (1,)),
}
"""The rows of a head, its labels, and the weight of each output."""


def opened(path: Path) -> edgedec.Engine:
    """Load a reward model."""
    return edgedec.load(path, runtime="cpu", draft="off", n_ctx=256, n_threads=1)


def forward(engine: edgedec.Engine, text: str) -> tuple[Any, Any]:
    """Return the normed state of a text's last token, and the logits behind it."""
    ids = np.array(encode_with_controls(engine.tokenizer, text, add_special=False), np.int32)
    last = engine.card.n_layer - 1
    read = engine.session().forward(ids, n_past=0, taps=(last,))
    return read_final_norm(engine.path).of(read.hidden[last][-1:])[0], read.logits[-1].copy()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("own", [False, True])
def test_a_head_reads_the_unfinished_answer(kind: str, own: bool, tmp_path: Path) -> None:
    """By the state of its last token: in the assistant's turn, or at the end of the file's own template."""
    answers, labels, signs = HEADS[kind]
    more: dict[str, Any] = CHAT | {LABELS: labels}
    if own:
        more["tokenizer.chat_template.rerank"] = "{query}\n{document}"
    path = tiny_qwen3_ranker(tmp_path / "reward.gguf", tied=False, answers=answers, more=more)
    with opened(path) as engine:
        found = reward_scorer(engine)(QUESTION, STEPS)
        head = read_rows(read_gguf(path), "cls.output.weight", 0, len(answers))
        before = f"{QUESTION}\n" if own else f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        for step, score in zip(STEPS, found, strict=True):
            outputs = head @ forward(engine, before + step)[0]
            assert score == pytest.approx(sigmoid(float(np.dot(signs, outputs))), abs=1e-4)
            assert 0 < score < 1


@pytest.mark.parametrize("own", [False, True])
def test_a_model_without_a_head_is_asked(own: bool, tmp_path: Path) -> None:
    """In a further turn, for the letter A or B; or by the file's template, for its labels, as "+" and "-"."""
    mark = {"tokenizer.chat_template.rerank": "{query} {document} ", LABELS: ["+", "-"]}
    path = tiny_qwen3_ranker(tmp_path / "judge.gguf", head=False, more=CHAT | (mark if own else {}))
    with opened(path) as engine:
        good, bad = (engine.tokenizer.encode(each, add_special=False)[0] for each in ("+-" if own else "AB"))
        found = reward_scorer(engine)(QUESTION, STEPS)
        turns = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{{}}<|im_end|>\n"
        turns += f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant"
        for step, score in zip(STEPS, found, strict=True):
            logits = forward(engine, f"{QUESTION} {step} " if own else turns.format(step))[1]
            assert score == pytest.approx(sigmoid(float(logits[good] - logits[bad])), abs=1e-5)


def test_a_reward_model_scores_a_search_and_whole_texts(tmp_path: Path) -> None:
    """It is a scorer as any function; the scores are those of the texts that were written."""
    path = tiny_qwen3_ranker(tmp_path / "reward.gguf", tied=False, more=CHAT)
    writer = tiny_qwen3_ranker(tmp_path / "writer.gguf", seed=1, head=False, more=CHAT)
    options: Any = {"seed": 3, "temperature": 1.0, "max_tokens": 8}
    messages = [{"role": "user", "content": QUESTION}]
    with opened(path) as reward, opened(writer) as engine:
        scorer = reward_scorer(reward)
        for how in (BestOf(3, "score", scorer=scorer), SearchBy("particles", 3, scorer=scorer)):
            chosen = best(engine, messages, how, **options)
            assert chosen.scores == tuple(scorer(QUESTION, [text.text for text in chosen.texts]))
            assert chosen.scores[chosen.place] == max(chosen.scores)


def test_cross_encoders_rank_and_other_heads_are_refused(tmp_path: Path) -> None:
    """With the reason."""
    with edgedec.load(tiny_cross_encoder(tmp_path / "b.gguf"), runtime="llamacpp", draft="off", n_threads=1) as engine:
        assert reward_scorer(engine)(QUESTION, STEPS) == rank(engine, QUESTION, STEPS).normalized
    three = tiny_qwen3_ranker(tmp_path / "c.gguf", tied=False, answers=(YES, NO, YES), more=CHAT)
    with opened(three) as engine, pytest.raises(CapabilityError, match="3 outputs"):
        reward_scorer(engine)
    with (
        opened(tiny_qwen3_ranker(tmp_path / "d.gguf", more={"tokenizer.chat_template.rerank": None})) as engine,
        pytest.raises(CapabilityError, match="no template for ranking"),
    ):
        reward_scorer(engine)

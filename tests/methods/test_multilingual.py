"""Multilingual samples: the pool has the greedy answer, and the judge's votes do not depend on the order of answers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.api.branching import branches
from edgedec.errors import OptionError
from edgedec_methods.multilingual import ASKED, JUDGED, judged_together, multilingual

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgedec.Engine]:
    """A tiny model."""
    path = tiny_llama(tmp_path_factory.mktemp("languages") / "tiny.gguf", chat_template=CHATML, n_ctx_train=1024)
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=1024) as loaded:
        yield loaded


def turn(content: str) -> list[dict[str, str]]:
    """Return a chat of one message."""
    return [{"role": "user", "content": content}]


def test_the_best_of_a_greedy_answer_and_one_in_each_language(engine: edgedec.Engine) -> None:
    """Each answer is what the model writes alone to its own prompt, and the judge's favourite is chosen."""
    found = multilingual(engine, "Why?", ["French", "Czech"], seed=4, max_tokens=5, temperature=1.5)
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 1.5}
    own = [engine.chat(turn("Why?"), max_tokens=5, temperature=0).text]
    for k, language in enumerate(("French", "Czech")):
        own.append(engine.chat(turn(ASKED.format(question="Why?", language=language)), seed=4 + k, **options).text)
    assert [text.text for text in found.texts] == own
    assert list(found.scores) == judged_together(engine, "Why?", own)
    assert found.place == found.scores.index(max(found.scores))
    for wrong in ([], ["x"] * 26):
        with pytest.raises(OptionError, match="languages"):
            multilingual(engine, "Why?", wrong)


def test_the_votes_are_the_mean_over_all_rotations(engine: edgedec.Engine) -> None:
    """Counted by hand from the next token's logits; a rotation of the answers rotates the votes."""
    answers = ["one", "two", "three"]
    votes = judged_together(engine, "Why?", answers)
    letters = [engine.tokenizer.encode(letter, add_special=False)[0] for letter in "ABC"]
    expected = np.zeros(3)
    for shift in range(3):
        order = [(place + shift) % 3 for place in range(3)]
        listed = "\n\n".join(f"{'ABC'[i]}) {answers[place]}" for i, place in enumerate(order))
        ids = engine.chat_ids(turn(JUDGED.format(question="Why?", answers=listed)))
        with branches(engine, ids, most=1) as opened:
            odds = np.exp(opened.logits[letters].astype(np.float64))
        for i, place in enumerate(order):
            expected[place] += odds[i] / odds.sum() / 3
    assert votes == pytest.approx(expected.tolist())
    assert sum(votes) == pytest.approx(1)
    assert judged_together(engine, "Why?", [*answers[1:], answers[0]]) == pytest.approx([*votes[1:], votes[0]])

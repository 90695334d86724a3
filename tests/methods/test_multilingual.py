"""Multilingual samples: the pool has the greedy answer, and one judgement has all answers and a checklist."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.errors import OptionError
from edgedec_methods.multilingual import CHECKLIST, judged_together, multilingual

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


def test_the_best_of_a_greedy_answer_and_one_at_each_temperature(engine: edgedec.Engine) -> None:
    """Each answer is what the model writes alone; the favourite of the judge with its checklist is chosen."""
    found = multilingual(engine, "Why?", (0.5, 1.5), seed=4, max_tokens=5)
    own = [engine.chat(turn("Why?"), max_tokens=5, temperature=0).text]
    own += [engine.chat(turn("Why?"), seed=4 + k, temperature=t, max_tokens=5).text for k, t in enumerate((0.5, 1.5))]
    checklist = engine.chat(turn(CHECKLIST.format(question="Why?")), max_tokens=5, temperature=0).text
    assert [text.text for text in found.texts] == own
    assert list(found.scores) == judged_together(engine, "Why?", own, checklist.strip())
    assert found.place == found.scores.index(max(found.scores))
    for wrong in ((), (1.0,) * 26):
        with pytest.raises(OptionError, match="temperatures"):
            multilingual(engine, "Why?", wrong)


@pytest.mark.parametrize("checklist", ["", "- brief"])
def test_the_votes_are_the_chances_of_the_letters(engine: edgedec.Engine, checklist: str) -> None:
    """Counted by hand from the next token's logits, behind a prompt that has all answers, and the checklist."""
    votes = judged_together(engine, "Why?", ["one", " two\n", "three"], checklist)
    letters = [engine.tokenizer.encode(letter, add_special=False)[0] for letter in "ABC"]
    asked = "Why?\n\nThese are answers to the question above:\n\nA) one\n\nB) two\n\nC) three\n\n"
    asked += "A good answer must have:\n- brief\n\n" if checklist else ""
    ids = engine.chat_ids(turn(asked + "Which is the best? Reply with its letter."))
    logits = engine.session().forward(np.array(ids, np.int32), n_past=0).logits[-1]
    odds = np.exp(logits[letters].astype(np.float64))
    assert votes == pytest.approx((odds / odds.sum()).tolist())

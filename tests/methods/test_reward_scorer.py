"""A reward model as a scorer: its scores are those of reading each text from its beginning."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgedec
from edgedec.errors import RequestError
from edgedec_methods.judgement import Question, question_of
from edgedec_methods.reward_scorer import RewardScorer

pytestmark = pytest.mark.model


def test_texts_that_begin_alike_are_read_once_and_may_fill_the_context() -> None:
    """The question's token included; one token more is refused."""
    read = list[tuple[int, list[int]]]()

    def forward(ids: NDArray[np.int32], n_past: int) -> Any:
        read.append((n_past, ids.tolist()))
        return SimpleNamespace(logits=np.array([[0.0, 1.0, 1.0]], np.float32))

    tokenizer = SimpleNamespace(encode=lambda text: [int(digit) for digit in text])
    session: Any = SimpleNamespace(n_ctx=5, model=SimpleNamespace(tokenizer=tokenizer), forward=forward)
    reward = RewardScorer(session, Question((9,), (1,), (2,)), prompt_of=lambda prefix, step: prefix + step)
    assert list(reward("1", ["234", "24", "2"])) == [0.5] * 3
    assert read == [(0, [1, 2, 3, 4, 9]), (2, [4, 9]), (2, [9])]
    with pytest.raises(RequestError, match="holds 5 tokens and the text has 6"):
        reward("1", ["2345"])


@pytest.mark.slow
def test_a_reward_model_scores_by_a_token(smollm: edgedec.Engine) -> None:
    """Texts that begin alike are read once; the scores are those of reading each from its beginning."""
    asked = question_of(smollm.tokenizer, " Right?", "yes", "no")
    session = smollm.session(128)
    reward = RewardScorer(session, asked)
    steps = ["2 + 3 is 5.", "2 + 3 is 7.", "2 + 3"]
    together = list(reward("How much is 2 + 3?", steps))
    for step, score in zip(steps, together, strict=True):
        assert list(RewardScorer(session, asked)("How much is 2 + 3?", [step])) == [score]
    assert all(0 < score < 1 for score in together)
    with pytest.raises(RequestError, match="128"):
        reward("x", ["word " * 200])
    session.close()

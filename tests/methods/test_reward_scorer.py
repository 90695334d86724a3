"""A reward model as a scorer: its scores are those of reading each text from its beginning."""

from collections.abc import Iterator

import pytest
from support.models.real_models import real_model

import edgedec
from edgedec.errors import RequestError
from edgedec_methods.judgement import question_of
from edgedec_methods.reward_scorer import RewardScorer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engine() -> Iterator[edgedec.Engine]:
    """The 135M on the cpu runtime."""
    path = real_model("smollm2-135m.gguf")
    with edgedec.load(path, runtime="cpu", n_ctx=256, draft="off", n_threads=2) as engine:
        yield engine


@pytest.mark.slow
def test_a_reward_model_scores_by_a_token(engine: edgedec.Engine) -> None:
    """Texts that begin alike are read once; the scores are those of reading each from its beginning."""
    asked = question_of(engine.tokenizer, " Right?", "yes", "no")
    session = engine.session(128)
    reward = RewardScorer(session, asked)
    steps = ["2 + 3 is 5.", "2 + 3 is 7.", "2 + 3"]
    together = list(reward("How much is 2 + 3?", steps))
    for step, score in zip(steps, together, strict=True):
        assert list(RewardScorer(session, asked)("How much is 2 + 3?", [step])) == [score]
    assert all(0 < score < 1 for score in together)
    with pytest.raises(RequestError, match="128"):
        reward("x", ["word " * 200])
    session.close()

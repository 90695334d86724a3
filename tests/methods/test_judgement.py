"""The one-token judgement: which tokens it compares, and what the model reads before them."""

import numpy as np
import pytest
from support.table_branches import random_table, table_texts

from edgedec_methods.judgement import JudgeScorer, Question, chance_yes, log_odds, turn_after_answer


def test_a_judgement_compares_two_tokens() -> None:
    """The chance is P(yes) over P(yes) + P(no), in a fork that is dropped; the text keeps its tokens."""
    table = random_table(4, n_vocab=4, length=3)
    question = Question((1, 2), (1,), (2, 3))
    texts, branches = table_texts(table, max_tokens=3)
    with texts:
        root = texts.begin()
        (found,) = JudgeScorer(question)(texts, [root])
        row = np.exp(table[(1, 2)].astype(np.float64))
        assert found == pytest.approx(row[1] / (row[1] + row[2] + row[3]))
        assert list(branches.held.values()) == [()]
    assert chance_yes(np.array([0, -np.inf, -np.inf], np.float32), Question((1,), (1,), (2,))) == 0.5


def test_the_turn_after_an_answer() -> None:
    """What a template puts between an answer and the reply to the next turn, the user's words included."""

    def render(messages: object) -> str:
        assert isinstance(messages, list)
        return "".join(f"<{each['role']}>{each['content']}<end>" for each in messages) + "<assistant>"

    assert turn_after_answer(render, "Right?") == "<end><user>Right?<end><assistant>"
    assert turn_after_answer(lambda messages: "a template that drops answers", "Right?") == "\n\nRight?\n"
    assert log_odds(0.9) == pytest.approx(np.log(9))
    assert (log_odds(0.0), log_odds(1.0)) == (-30.0, 30.0)

"""The one-token judgement: which tokens it compares, and what the model reads before them."""

from typing import Any

import numpy as np
import pytest
from support.decoding.table_branches import random_table, table_texts

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.api.branching import partial_texts
from edgedec.choosing.choice import Candidates, chooser_named
from edgedec.choosing.choosers import mean_logprob
from edgedec_methods.judgement import JudgeScorer, Question, chance_yes, question_of, turn_after_answer
from edgedec_methods.sampled_steps import seeds_from, write_steps

CHAT = [{"role": "user", "content": "How much is 2 + 3? End with 'Answer: ' and the number."}]
OPTIONS: dict[str, Any] = {"seed": 5, "temperature": 0.9, "max_tokens": 24}


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


def test_the_highest_chance_is_chosen() -> None:
    """Of the texts that may be chosen."""
    texts: Any = ["a", "b", "c"]
    place, why = chooser_named("judge").choose(Candidates(texts, [0, 2], [None] * 3, [0.2, 0.9, 0.7]))
    assert (place, why) == (2, "its judged chance to be right, 0.700, is the highest of 2")


def test_the_turn_after_an_answer() -> None:
    """What a template puts between an answer and the reply to the next turn, the user's words included."""

    def render(messages: object) -> str:
        assert isinstance(messages, list)
        return "".join(f"<{each['role']}>{each['content']}<end>" for each in messages) + "<assistant>"

    assert turn_after_answer(render, "Right?") == "<end><user>Right?<end><assistant>"
    assert turn_after_answer(lambda messages: "a template that drops answers", "Right?") == "\n\nRight?\n"


@pytest.mark.slow
@pytest.mark.model
def test_judging_texts_again_is_judging_them_in_their_forks(smollm: edgedec.Engine) -> None:
    """The chances of whole texts equal those that a fork of each unfinished text gives: the same bits."""
    found = best(smollm, CHAT, BestOf(3, "judge"), **OPTIONS)
    asked = question_of(smollm.tokenizer, turn_after_answer(smollm.requests.render), parse_special=True)
    params = smollm.requests.sampling(temperature=0.9, max_tokens=24)
    with partial_texts(smollm, smollm.chat_ids(CHAT), max_tokens=24) as texts:
        root = texts.begin()
        live = [root, texts.fork(root), texts.fork(root)]
        written = write_steps(texts, live, params, seeds_from(5, 3), separator=None)
        assert [text.token_ids for text in written] == [each.token_ids for each in found.texts]
        assert JudgeScorer(asked)(texts, written) == list(found.scores)
        means = [mean_logprob(each) for each in found.texts]
        for text, mean in zip(written, means, strict=True):
            if text.ended == "length":
                assert text.mean_logprob == pytest.approx(mean, abs=1e-5)

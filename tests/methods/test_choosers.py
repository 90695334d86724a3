"""What chooses among the texts of a search: votes, scores, judgements, the first that ended."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoding.table_branches import random_table, table_texts

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.api.branching import partial_texts
from edgedec.choosing.choice import Candidates, chooser_named
from edgedec.choosing.choosers import mean_logprob
from edgedec.choosing.search_by import SearchRun
from edgedec.choosing.vote import ANSWER
from edgedec.sampling import SamplingParams
from edgedec_methods.bag_of_tricks import combined
from edgedec_methods.first_finish import first_finish, first_finished
from edgedec_methods.judgement import JudgeScorer, Question, chance_yes, question_of, turn_after_answer
from edgedec_methods.sampled_steps import seeds_from, write_steps
from edgedec_methods.step_scores import elected

ANSWERED, SILENT = ["Answer: 5", "Answer: 4", "Answer: 4"], ["five", "four", "four"]


class Texts:
    """Holds texts that are what they say."""

    def text(self, text: str) -> str:
        """Return it."""
        return text


@pytest.mark.parametrize(
    ("said", "scores", "is_scored", "place"),
    [
        (ANSWERED, [0.9, 0.2, 0.1], True, 0),
        (ANSWERED, [0.9, 0.2, 0.1], False, 1),
        (SILENT, [0.1, 0.2, 0.9], False, 2),
        (SILENT, [], False, 0),
    ],
)
def test_scores_of_the_caller_go_before_the_vote(
    said: list[Any], scores: list[float], is_scored: bool, place: int
) -> None:
    """Scores that the caller did not ask for count only where no text states an answer."""
    texts: Any = Texts()
    scorer = (lambda texts, live: scores) if is_scored else None
    found = elected(texts, said, scores, SearchRun(3, SamplingParams(), 0, scorer, ANSWER, "", texts))
    assert (found.place, found.scores) == (place, tuple(scores))


def test_the_combination() -> None:
    """Chances weigh the votes, likelihood decides within the winning answer; without answers chances decide."""
    assert combined(["1", "2", "1"], [-3.0, -1.0, -2.0], [0.4, 0.7, 0.4]) == 2
    assert combined(["1", "2", "1"], [-3.0, -1.0, -2.0], [0.2, 0.7, 0.2]) == 1
    assert combined([None, None], [-1.0, -2.0], [0.3, 0.9]) == 1


PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
ENDS = (("stop", 9), ("length", 4), ("stop", 5), ("length", 3), ("cancelled", 1))


def test_the_first_that_finished() -> None:
    """The shortest text that ended by itself; the first where none did."""
    assert first_finished([False, True, True], [2, 9, 5]) == 2
    assert first_finished([False, False], [2, 1]) == 0


def test_of_whole_texts_the_shortest_that_ended_is_chosen() -> None:
    """A text that was cut or stopped early is none of them, however short; of cut ones alone the shortest."""
    texts: Any = [SimpleNamespace(finish_reason=why, token_ids=range(n)) for why, n in ENDS]
    choose = chooser_named("first").choose
    assert choose(Candidates(texts, [0, 1, 2, 3], [None] * 5)) == (2, "it ended first, after 5 tokens")
    assert choose(Candidates(texts, [1, 3], [None] * 5))[0] == 3


@pytest.mark.parametrize("seed", range(20))
def test_first_finish_search_is_the_choice_among_whole_texts(seed: int) -> None:
    """It returns what choosing the shortest of all whole texts would, with the steps of that text only."""
    table = random_table(seed, n_vocab=4, length=6)
    whole, search = table_texts(table, max_tokens=6)[0], table_texts(table, max_tokens=6)[0]
    with whole, search:
        root = whole.begin()
        live = [root, *(whole.fork(root) for _ in range(3))]
        written = write_steps(whole, live, PARAMS, seeds_from(seed, 4), separator=None)
        lengths = [text.n_scored for text in written]
        place = first_finished([text.ended == "stop" for text in written], lengths)
        root = search.begin()
        live = [root, *(search.fork(root) for _ in range(3))]
        found = first_finish(search, live, PARAMS, seeds_from(seed, 4))
        assert found.token_ids == written[place].token_ids
        assert sum(search.forwards.values()) <= len(found.token_ids) + 1


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

"""Models that judge texts: grades of critiques, and whom pruning in mid-text keeps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoding.plain_texts import PARAMS, said, sampled, table_of
from support.decoding.table_branches import END, table_texts
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.api.branching import branches
from edgedec.api.requests import RequestOptions
from edgedec.errors import OptionError
from edgedec_apps.refine import RefineBy, refined
from edgedec_methods.critiques import ASKED, META, critic, critic_check, critiques_of, grade_of, meta_judge
from edgedec_methods.judgement import JudgeScorer, Question, chance_yes
from edgedec_methods.sampled_steps import seeds_from
from edgedec_methods.self_evaluation import pruned


class Critic:
    """Writes critiques with known grades: the number of letters a in the answer, then the number of b, then none."""

    def samples(self, prompt: Any, n: int = 8, **options: Any) -> tuple[Any, ...]:
        """Return them."""
        answer = prompt[0]["content"].partition("Answer:\n")[2].partition("\n\nFirst write")[0]
        written = [f"Grade: {answer.count('a')}", f"Bad.\nGrade: {answer.count('b')}", "No grade from me."]
        return tuple(SimpleNamespace(text=words) for words in written[:n])


def test_the_mean_of_the_grades() -> None:
    """A critique without a grade counts for nothing; the words are those of the worst critique."""
    assert critic(Critic(), 3)("?", ["aaab", "b", ""]) == [pytest.approx(0.2), pytest.approx(0.05), 0.0]
    score, words = critic_check(Critic(), 3)("?", "aaab")
    assert (score, words) == (0.2, "Bad.\nGrade: 1")
    assert critic_check(Critic(), 1)("?", "a") == (0.1, "Grade: 1")
    for first, score in (("Grade", 0.3), ("Bad", 0.1)):  # of two graded critiques, the meta judge's one counts

        def meta(prefix: str, text: str, words: str, first: str = first) -> float:
            return float(words.startswith(first))

        assert critic(Critic(), 3, meta)("?", ["aaab"]) == [score]
    stated = ("Grade: 3. No: **Grade:** 7", "Grade: 11", "fine")  # the last one that is stated counts
    assert [grade_of(words) for words in stated] == [0.7, None, None]
    with pytest.raises(OptionError, match="at least 1"):
        critic(Critic(), 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgedec.Engine]:
    """A tiny model."""
    path = tiny_llama(tmp_path_factory.mktemp("critiques") / "tiny.gguf", chat_template=CHATML, n_ctx_train=2048)
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=2048) as loaded:
        yield loaded


@pytest.mark.slow
def test_a_model_is_its_own_critic(engine: edgedec.Engine) -> None:
    """Critique k draws with the seed plus k; a critic is a scorer of BestOf, and its check one of RefineBy."""
    options: RequestOptions = {"seed": 5, "max_tokens": 6, "temperature": 1.5}
    asked = [{"role": "user", "content": ASKED.format(prefix="Why?", text="So.")}]
    own = [engine.chat(asked, seed=5 + k, max_tokens=6, temperature=1.5).text for k in range(3)]
    assert [words for _, words in critiques_of(engine, "Why?", "So.", 3, options)] == own
    why = [{"role": "user", "content": "Why?"}]
    found = best(engine, why, BestOf(2, "score", scorer=critic(engine, 2, **options)), **options)
    assert found.scores == (0.0, 0.0)
    again = refined(engine, why, RefineBy(check=critic_check(engine, 2, **options), n=2, texts=3), **options)
    assert len(again.texts) == 3


@pytest.mark.slow
@pytest.mark.model
def test_the_meta_judge_compares_two_letters(smollm: edgedec.Engine) -> None:
    """Behind the question, the answer and the critique, in the law of the next token."""
    asked = META.format(asked=ASKED.format(prefix="1 + 1?", text="2"), critique="It is right.")
    ids = {word: smollm.tokenizer.encode(word, add_special=False)[0] for word in ("A", " A", "B", " B")}
    with branches(smollm, smollm.chat_ids(asked), most=1) as opened:
        chances = {word: float(np.exp(np.float64(opened.logits[i]))) for word, i in ids.items()}
    expected = (chances["A"] + chances[" A"]) / sum(chances.values())
    assert meta_judge(smollm)("1 + 1?", "2", "It is right.") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_pruned_texts_are_those_of_their_seeds(seed: int) -> None:
    """The kept ones have the best judgements after so many tokens, and go on as if nothing had been judged."""
    table, question = table_of(seed), Question((2,), (1, 2), (3, 4))
    texts, branches = table_texts(table, max_tokens=4)
    with texts:
        root = texts.begin()
        live = [root, *(texts.fork(root) for _ in range(5))]
        seeds = seeds_from(seed, 6)
        begun = [sampled(table, each)[:2] for each in seeds]
        chances = [chance_yes(table[(*[t for t in ids if t != END], 2)], question) for ids in begun]
        order = sorted(range(6), key=lambda i: -chances[i])[:3]
        found, kept = pruned(texts, live, PARAMS, seeds, JudgeScorer(question), at=2, keep=3)
        assert [said(text) for text in found] == [sampled(table, seeds[i])[:4] for i in sorted(order)]
        assert kept == [chances[i] for i in sorted(order)]
        assert len(branches.held) == 3
        with pytest.raises(OptionError):
            pruned(texts, found, PARAMS, seeds, JudgeScorer(question), at=2, keep=4)
    assert not branches.held

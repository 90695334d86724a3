"""Choosing among whole texts: votes, likelihood, how many are enough, and what another package brings."""

from pathlib import Path

import numpy as np
import pytest

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.choosers import most_likely
from edgedec.choosing.sample_count import another_is_wanted, enough, n_agreeing
from edgedec.choosing.search_by import SearchBy
from edgedec.choosing.vote import answer_of, is_decided, shares, voted
from edgedec.errors import OptionError, PluginError


def test_answers_of_texts() -> None:
    """The last statement counts; a caller's pattern may have a group or none."""
    assert answer_of("Answer: 3\nNo:\n**Answer:** 4.") == "4"
    assert answer_of("answer = a dog ") == "a dog"
    assert answer_of("x=1, x=2", r"x=\d") == "x=2"
    assert answer_of("x=1, x=2", r"x=(\d)") == "2"
    assert answer_of("nothing") is None
    for wrong in ("(", "a{99999999999}", 7):
        with pytest.raises(OptionError, match="regular expression"):
            answer_of("text", wrong)  # type: ignore[arg-type]


def test_votes() -> None:
    """The most votes win; of equals the answer that came first; weights count; texts without an answer don't vote."""
    assert voted(["1", "2", "2", None]) == 1
    assert voted(["1", "2", "1", "2"]) == 0
    assert voted(["1", "2", "2"], [0.9, 0.3, 0.3]) == 0
    assert voted([None, None]) == 0
    assert voted([None, "7"]) == 1
    assert shares(["a", None], [0.0, 1.0]) == {"a": 0.0}


@pytest.mark.parametrize("seed", range(30))
def test_a_decided_vote_stays_decided(seed: int) -> None:
    """Where is_decided says so, no further texts change the winner; where it does not, some do."""
    rng = np.random.default_rng(seed)
    answers = [str(rng.integers(3)) for _ in range(int(rng.integers(1, 8)))]
    n_more = int(rng.integers(0, 5))
    winner = answers[voted(answers)]
    worst = [[*answers, *[other] * n_more] for other in ("0", "1", "2", "3")]
    same = all(after[voted(after)] == winner for after in worst)
    counts = sorted((answers.count(a) for a in set(answers)), reverse=True)
    if is_decided(answers, n_more):
        assert same
    elif len(counts) > 1 and counts[0] - counts[1] < n_more:
        assert not same


def test_likelihood() -> None:
    """The greatest mean."""
    assert most_likely([-2.0, -0.5, -1.0]) == 1


CODE = """
from edgedec.choosing.choice import Chooser
from edgedec.choosing.partial_texts import best_tokens
from edgedec.choosing.search_by import Search, SearchResult


def second_then_greedy(texts, run):
    text = texts.begin()
    (text,) = texts.advance([(text, best_tokens(text.logits, 2)[1])])
    while text.ended is None:
        (text,) = texts.advance([(text, best_tokens(text.logits, 1)[0])])
    return SearchResult((text,), 0, "its first token is the second best")


SECOND = Search(second_then_greedy, n=1, most=1, n_texts=lambda n: 1)
LAST = Chooser(lambda given: (given.whole[-1], "it is the last one"))
"""


@pytest.fixture
def another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a search, a chooser, and an entry point that is neither."""
    (tmp_path / "edgedec_strange.py").write_text(CODE)
    folder = tmp_path / "edgedec_strange-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: edgedec-strange\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(
        "[edgedec.searches]\nsecond = edgedec_strange:SECOND\nwrong = edgedec_strange:LAST\nabsent = edgedec_absent:X\n"
        "chooser.last = edgedec_strange:LAST\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("another_package")
def test_a_search_and_a_chooser_of_another_package(tiny_path: Path) -> None:
    """Both do what they say, by their names alone."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=96, draft=None) as engine:
        found = best(engine, "abc", SearchBy("second"), max_tokens=5, ignore_end=True)
        greedy = engine.generate("abc", temperature=0, max_tokens=5, ignore_end=True)
        assert found.why == "its first token is the second best"
        assert len(found.generation.token_ids) == 5
        assert found.generation.token_ids[0] != greedy.token_ids[0]
        chosen = best(engine, "abc", BestOf(3, "last"), max_tokens=5, ignore_end=True, seed=1)
        assert (chosen.place, chosen.why) == (2, "it is the last one")


@pytest.mark.usefixtures("another_package")
def test_what_is_no_search_is_refused() -> None:
    """The message says what was found: another kind of object, a plug-in that does not import, or no plug-in."""
    with pytest.raises(PluginError, match=r"the search 'wrong' is of the type Chooser, not Search"):
        SearchBy("wrong")
    with pytest.raises(PluginError, match="does not import"):
        SearchBy("absent")
    with pytest.raises(OptionError, match=r"one of vote, likely, score, .*last"):
        BestOf(3, "second")


@pytest.mark.parametrize("p", [0.0, 0.02, 0.3, 0.5, 0.77, 0.999, 1.0])
@pytest.mark.parametrize("eps", [0.001, 0.0513, 0.2017])
def test_enough_is_the_first_n_whose_next_adds_too_little(p: float, eps: float) -> None:
    """Against the accuracies F(n) themselves, one after another."""
    n = 1
    while (1 - (1 - p) ** (n + 1)) - (1 - (1 - p) ** n) >= eps:
        n += 1
    assert enough(p, eps) == n


def test_auto_stops() -> None:
    """Where texts agree it stops early, where they don't it goes on, but never past the most allowed."""
    assert not another_is_wanted(3, 3, 0.05, 64)
    assert another_is_wanted(1, 4, 0.03, 64)
    assert another_is_wanted(1, 1, 0.05, 64)  # one text that agrees with itself says little
    assert n_agreeing([None, None, "a"]) == 1
    assert not another_is_wanted(1, 4, 0.01, 4)
    assert n_agreeing(["a", "b", "b", None]) == 2

"""Searches and choosers of another package: found by name, used as edgedec's own, and refused where they are none."""

from pathlib import Path

import pytest

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import OptionError, PluginError

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

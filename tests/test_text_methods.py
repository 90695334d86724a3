"""Methods that options of a request bring: a stranger's is found by its entry point, as edgedec's own are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.installed import with_plugin

import edgedec
from edgedec.errors import PluginError, RequestError
from edgedec.grammar import Grammar

STRANGER = '''
import numpy as np

from edgedec.constraint import Constraint
from edgedec.text_method import EndBefore, TextMethod

class Even(Constraint):
    """Allows the tokens of even ids alone."""

    def allowed(self, path=()):
        found = super().allowed(path).copy()
        found[1::2] = False
        return found

class Anything:
    """The grammar of all texts."""

    is_complete = False
    may_end = True
    predicate = None

    def __init__(self, n_vocab):
        self.n_vocab = n_vocab

    def allowed(self):
        return np.ones(self.n_vocab, np.bool_)

    def forced(self):
        return ()

    def advance(self, token_id):
        return True

    def back(self, n_tokens):
        pass

    def close(self):
        pass

class EvenTokens(TextMethod):
    """Texts of even token ids, where the value is True."""

    def __init__(self, tokenizer):
        self.n_vocab = tokenizer.n_vocab

    def constraint(self, value, text):
        return Even(text.state or Anything(self.n_vocab)) if value else None

class Before:
    """Ends a text before a token."""

    note = "texts end before a token"

    def __init__(self, token_id):
        self.token_id = token_id

    def before(self, row, token_id, ops):
        return EndBefore("unsure", 0.5, "there it was") if token_id == self.token_id else None

class EndsBefore(TextMethod):
    """Texts that end before the token that is the value, and are drawn greedily."""

    def __init__(self, tokenizer):
        pass

    def draw(self, value):
        return {"temperature": 0.0}

    def early_end(self, value, card):
        return Before(value)
'''


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[edgedec.Engine]:
    """A tiny model, where a package with two methods is installed."""
    (tmp_path / "strange_texts.py").write_text(STRANGER, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with_plugin(monkeypatch, tmp_path, "edgedec.text_methods", "even", "strange_texts:EvenTokens")
    with_plugin(monkeypatch, tmp_path, "edgedec.text_methods", "ends-before", "strange_texts:EndsBefore")
    with edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", n_ctx=64, draft="suffix") as found:
        yield found


def test_a_strangers_constraint(engine: edgedec.Engine) -> None:
    """All tokens of its texts are even; without the value, and with a value that asks for nothing, they need not be."""
    plain = engine.generate("ab", max_tokens=24, seed=2, ignore_end=True)
    assert any(token_id % 2 for token_id in plain.token_ids)
    off = engine.generate("ab", max_tokens=24, seed=2, ignore_end=True, methods={"even": False})
    assert off.token_ids == plain.token_ids
    found = engine.generate("ab", max_tokens=24, seed=2, methods={"even": True})
    assert found.token_ids
    assert not any(token_id % 2 for token_id in found.token_ids)
    several = engine.samples("ab", 2, max_tokens=8, seed=2, methods={"even": True})
    assert several[0].token_ids == found.token_ids[:8]


def test_a_strangers_end(engine: edgedec.Engine) -> None:
    """The text is the greedy one up to the token, which is no part of it, and the statistics say what there was."""
    greedy = engine.generate("ab", max_tokens=24, temperature=0).token_ids
    last = greedy[len(greedy) // 2]
    found = engine.generate("ab", max_tokens=24, methods={"ends-before": last})
    assert found.token_ids == greedy[: greedy.index(last)]
    assert (found.finish_reason, found.stats.chance_right) == ("unsure", 0.5)
    assert {"texts end before a token", "there it was"} <= {*found.stats.notes}


def test_methods_that_do_not_go_together(engine: edgedec.Engine) -> None:
    """Two that make a constraint, and one that nobody brings."""
    with pytest.raises(RequestError, match="json_close and even can't be combined"):
        engine.generate("ab", grammar=Grammar.regex("a+"), max_tokens=8, methods={"json_close": True, "even": True})
    with pytest.raises(PluginError, match="no text method is called 'odd'"):
        engine.generate("ab", max_tokens=8, methods={"odd": True})

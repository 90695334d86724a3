"""A place in a grammar depends on the tokens taken alone, however it was reached; masks and forced tokens are its."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.tiny_models import BOS, EOS, FIRST_BYTE, SPACE, UNK, byte_ids

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.decoding.grammars import Grammars
from edgedec.draft import EMPTY_DRAFT, Draft
from edgedec.grammar import Grammar
from edgedec.model import Model
from edgedec.sampling import Distribution
from edgedec.scheduler.jump_forward import ForcedDrafts
from edgedec.stats import DecodeStats
from edgedec_runtimes.grammar.compiler import Llguidance

OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 3}, "n": {"enum": [1, 12]}},
        "required": ["name"],
        "additionalProperties": False,
    }
)
TEXTS = ['{"name": "ab"}', '{"name": "", "n": 12}', '{"name": "x y", "n": 1}']
NO_LOGITS = np.zeros(260, np.float32)


def allowed(constraint: Constraint, path: tuple[int, ...] = ()) -> list[int]:
    return np.flatnonzero(constraint.masked(NO_LOGITS, path) == 0).tolist()


def test_masks_leave_logits_as_they_are(grammars: Grammars) -> None:
    """What may follow keeps its logit, everything else is -inf; a row longer than the vocabulary too."""
    constraint = grammars.open(Grammar.regex("[ab]"))
    logits = np.arange(300, dtype=np.float32)
    masked = constraint.masked(logits)
    a, b = byte_ids("ab")
    assert np.flatnonzero(masked > -np.inf).tolist() == [a, b]
    assert masked[[a, b]].tolist() == [a, b]
    assert logits.tolist() == list(range(300))
    assert np.isneginf(constraint.masked(logits, byte_ids("z"))).all(), "what has no place is followed by nothing"


def test_ends_are_allowed_where_the_text_may_end(grammars: Grammars) -> None:
    """The end token where the expression matches so far; control tokens never, whatever the grammar says."""
    constraint = grammars.open(Grammar.regex("a(bb)*"))
    a, b = byte_ids("ab")
    for text, expected in (((), [a]), ((a,), [EOS, b]), ((a, b), [b]), ((a, b, b), [EOS, b])):
        assert allowed(constraint, text) == sorted(expected)
    anything = grammars.open(Grammar.regex(r"(.|\n)*"))
    assert EOS in allowed(anything)
    assert SPACE in allowed(anything)
    assert not {BOS, UNK} & set(allowed(anything))


def test_a_whole_text_is_complete(grammars: Grammars) -> None:
    """Complete is what nothing may follow; what may end but go on is not."""
    constraint = grammars.open(Grammar.regex("ab?"))
    for token in byte_ids("ab"):
        assert not constraint.is_complete
        constraint.commit(token)
    assert constraint.is_complete
    assert constraint.forced() == ()
    assert not constraint.allows((), byte_ids("c")[0])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_place_is_where_its_tokens_lead(grammars: Grammars, data: st.DataObject) -> None:
    """After any walk over paths, right and wrong, and any commits, the mask is that of a fresh grammar."""
    text = data.draw(st.sampled_from(TEXTS))
    ids = byte_ids(text)
    constraint = grammars.open(OBJECT)
    n_committed = 0
    for _ in range(data.draw(st.integers(1, 6))):
        act = data.draw(st.sampled_from(["mask", "allows", "forced", "commit", "complete"]))
        n_path = data.draw(st.integers(0, len(ids) - n_committed))
        path = tuple(ids[n_committed : n_committed + n_path])
        if act == "mask":
            fresh = grammars.open(OBJECT)
            assert allowed(constraint, path) == allowed(fresh, (*ids[:n_committed], *path))
        elif act == "allows":
            token = data.draw(st.integers(0, 259))
            fresh = grammars.open(OBJECT)
            assert constraint.allows(path, token) == fresh.allows((*ids[:n_committed], *path), token)
        elif act == "forced":
            forced = constraint.forced()
            assert forced == tuple(ids[n_committed : n_committed + len(forced)]) or n_committed > 0
        elif act == "complete":
            assert constraint.is_complete == (n_committed == len(ids))
        elif n_committed < len(ids):
            constraint.commit(ids[n_committed])
            n_committed += 1


def test_forced_tokens_are_those_of_the_masks(grammars: Grammars) -> None:
    """Each forced token is the only one that its mask allows, and after them there is a choice."""
    constraint = grammars.open(OBJECT)
    forced = constraint.forced()
    assert forced == tuple(byte_ids('{"name": "'))
    for n, token in enumerate(forced):
        assert allowed(constraint, forced[:n]) == [token]
    assert len(allowed(constraint, forced)) > 100


def test_forced_tokens_are_one_longest_chain(grammars: Grammars) -> None:
    """They are put before what drafters propose, merged with it; what has no place is gone, with all below it."""
    constraint = grammars.open(Grammar.regex("(ab[xy]z|abq)"))
    a, b, x, y, z, q = byte_ids("abxyzq")
    proposed = Draft.tree([a, b, x, z, q, z, q], [-1, 0, 1, 2, 0, 4, 1], [0.5] * 7)
    drafts = ForcedDrafts(constraint, 8, None, coupled=True)
    stats = DecodeStats()
    found = drafts.add_to(proposed, stats, 0, 8)
    assert list(found.tokens) == [a, b, x, z, q]
    assert list(found.parents) == [-1, 0, 1, 2, 1]
    assert list(found.p_accept) == [1, 1, 0.5, 0.5, 0.5]
    drafts.score(stats, (a, b, y))
    counts = stats.drafters["forced"]
    assert (counts["nodes"], counts["tried"], counts["right"]) == (2, 2, 2)
    assert list(drafts.add_to(proposed, stats, 0, 3).tokens) == [a, b, x]
    assert list(drafts.add_to(proposed, stats, 0, 1).tokens) == [a]


@pytest.mark.parametrize(
    ("seconds", "n"),
    [
        *(((1.0, 1.1, 1.2, 1.3), 3), ((1.0, 1.5, 4.0, 4.1), 1), ((1.0, 3.0, 4.5, 6.0), 0)),
        *(((1.0, 2.0, 3.0, 4.0), 0), ((1.0,), 3), ((1.0, 1.9), 3)),
    ],
)
def test_as_many_forced_tokens_as_pay(grammars: Grammars, seconds: tuple[float, ...], n: int) -> None:
    """The number with the most tokens per second, by the measured cost of rows; all where that was never measured."""
    curve = CostCurve(dict(enumerate(seconds, start=1)))
    drafts = ForcedDrafts(grammars.open(Grammar.regex("abc")), 8, curve, coupled=True)
    assert len(drafts.add_to(EMPTY_DRAFT, DecodeStats(), 0, 8)) == n


def test_a_drawn_draft_is_left_whole(grammars: Grammars) -> None:
    """For a rule that looks at q nothing that was drawn is taken out, but what was looked up is."""
    a, c = byte_ids("ac")
    law = Distribution(np.array([a, c]), np.array([0.5, 0.5]))
    tokens, parents, p = (c, a), (-1, -1), (1.0, 1.0)
    for coupled, q in product((True, False), (None, (law, law))):
        drafts = ForcedDrafts(grammars.open(Grammar.regex("ab|bb")), 8, None, coupled=coupled)
        found = drafts.add_to(Draft(tokens, parents, p, q), DecodeStats(), 0, 8)
        assert list(found.tokens) == ([c, a] if q and not coupled else [a])


class Erring:
    """A matcher of llguidance that comes to a state of error with the next token, as where a limit is met."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        """All else is the matcher's."""
        return getattr(self._matcher, name)

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Take what the grammar rules out."""
        assert not self._matcher.consume_token(FIRST_BYTE)
        assert self._matcher.is_error()
        return 0


def test_a_limit_met_by_a_draft_ends_no_text(byte_model: Model) -> None:
    """A state of error, which llguidance never leaves, is left where a path of a draft led to it."""
    state = Llguidance(byte_model.tokenizer).compile(Grammar.regex("ab"))
    a, b = byte_ids("ab")
    assert state.advance(a)
    state._matcher = Erring(state._matcher)
    assert not state.advance(b)
    assert state.advance(b)
    assert state.is_complete

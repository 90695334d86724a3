"""Numbers that a search of texts can not take are refused before anything is read or forked."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from support.decoding.plain_texts import PARAMS
from support.decoding.table_branches import random_table, table_texts

from edgedec.choosing.partial_texts import PartialTexts
from edgedec.errors import OptionError
from edgedec_methods.a_star import a_star
from edgedec_methods.adadec import LookAhead
from edgedec_methods.beam import beam_search
from edgedec_methods.cntp import Caution
from edgedec_methods.diverse_beams import diverse_beams
from edgedec_methods.particles import filtered
from edgedec_methods.planning import Planning
from edgedec_methods.sampled_steps import Steps

Search = Callable[..., object]


def no_scores(texts: PartialTexts, live: Any, /) -> list[float]:
    """Score nothing."""
    raise AssertionError("texts were written")


def a_star_of(texts: PartialTexts, **numbers: int) -> object:
    """Search with these numbers."""
    return a_star(texts, steps=Steps(PARAMS), scorer=no_scores, **numbers)


def particles_of(texts: PartialTexts, n: int) -> object:
    """Search with so many particles."""
    return filtered(texts, n, Steps(PARAMS), no_scores)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        *((LookAhead, each) for each in ({"entropy": math.nan}, {"n_candidates": 0}, {"n_tokens": 10**6})),
        *((Caution, each) for each in ({"most_trials": 0}, {"most_trials": 10**6}, {"low": 3.0, "high": 1.0})),
        (Caution, {"most_tokens": 0}),
        *((Planning, {"n_rollouts": n}) for n in (0, 10**6)),
        *((Planning, each) for each in ({"n_children": 0}, {"least": 2.0}, {"exploration": -1.0})),
    ],
)
def test_options_are_refused(options: Callable[..., object], wrong: dict[str, Any]) -> None:
    """Each with a message that says what is accepted."""
    with pytest.raises(OptionError):
        options(**wrong)


@pytest.mark.parametrize(
    ("search", "wrong"),
    [
        *((beam_search, {"n_beams": n}) for n in (0, 10**6)),
        *((beam_search, {"n_beams": 2, "length_penalty": x}) for x in (-1.0, math.nan, 11.0)),
        *((diverse_beams, {"n_beams": 4, "n_groups": n}) for n in (3, 0)),
        *((diverse_beams, {"n_beams": 2, "n_groups": 1, "penalty": x}) for x in (-1.0, math.nan)),
        (diverse_beams, {"n_beams": 10**6, "n_groups": 1}),
        *((a_star_of, {"n_steps": n}) for n in (0, 10**6)),
        (a_star_of, {"n_steps": 4, "most_expanded": 10**6}),
        *((particles_of, {"n": n}) for n in (0, -1, 10**6)),
    ],
)
def test_searches_are_refused(search: Search, wrong: dict[str, Any]) -> None:
    """And the prompt's branch is the only one that was opened."""
    texts, branches = table_texts(random_table(0, n_vocab=3, length=2), max_tokens=2)
    with texts, pytest.raises(OptionError, match="particles" if search is particles_of else "."):
        search(texts, **wrong)
    assert branches.n_opened == 1

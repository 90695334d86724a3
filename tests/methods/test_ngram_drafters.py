"""What holds for every drafter on a table of n-grams."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.draft import Draft
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds
from edgedec_methods.recycling import RecyclingDrafter
from edgedec_methods.stand import StandDrafter
from edgedec_methods.trigram import TrigramDrafter

FACTORIES = {"recycling": RecyclingDrafter, "stand": StandDrafter, "trigram": TrigramDrafter}


@pytest.mark.parametrize("name", FACTORIES)
def test_it_begins_with_nothing(make_context: Callable[..., DraftContext], name: str) -> None:
    """It asks for eight candidates; an empty prompt, one token and a token never followed have no successor."""
    drafter = FACTORIES[name](make_context())
    assert drafter.needs == DrafterNeeds(candidates=8)
    for text in ([], [262_143], [1, 2, 3]):
        drafter.begin(text)
        assert len(drafter.propose(32, 1e18)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
@given(
    st.integers(0, 2**32), st.integers(1, 25), st.sampled_from([0.0, 1e-30, 0.7, 1.5]), st.sampled_from([None, 0, 5000])
)
def test_any_generation_is_survived(
    make_context: Callable[..., DraftContext],
    generate: Callable[[Drafter, int, int], list[Draft]],
    name: str,
    seed: int,
    n_steps: int,
    temperature: float,
    budget_bytes: int | None,
) -> None:
    """Every draft is valid and within its bounds, whatever is verified, and the same once more."""
    factory = FACTORIES[name]
    first, again = (generate(factory(make_context(temperature, budget_bytes)), seed, n_steps) for _ in range(2))
    assert [draft.tokens for draft in first] == [draft.tokens for draft in again]
    assert [draft.p_accept for draft in first] == [draft.p_accept for draft in again]


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_the_store_stays_in_its_budget(budget_holds: Callable[[DrafterFactory, str], None], name: str) -> None:
    """At most half of the budget, the first context met makes room, and a smaller budget starts afresh."""
    budget_holds(FACTORIES[name], name)

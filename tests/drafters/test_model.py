"""A draft model with the target's tokenizer: the text is plain decoding's, and nothing is evaluated in vain."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoding.draft_models import SETTINGS, TEXT, Recorded, counted, generate, loaded, tiny
from support.decoding.drawings import drawn
from support.models.tiny_models import BOS, byte_ids

from edgedec.draft import Verification
from edgedec.drafter import DraftContext, DrafterFactory, Floor, ModelFactory
from edgedec.drafters.draft_model import model as model_drafter
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.draft_text import window_of
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import MemoryCapError, SessionError
from edgedec.model import Model
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams, distribution
from edgedec.scheduler.drafter_set import Drafting
from edgedec.testing import check_drafter
from edgedec_methods.drawn.rules import cut
from edgedec_methods.overlapped import OverlappedModel
from edgedec_methods.universal import UniversalDraftModel

pytestmark = pytest.mark.usefixtures("prompts_are_read_whole")

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def equal(target: Path) -> Iterator[DraftModel]:
    """The target as its own draft model."""
    with loaded(target) as model:
        yield DraftModel(model)


def context_for(model: Model, params: SamplingParams = GREEDY, **options: Any) -> DraftContext:
    """Return the context of a generation on a model."""
    return DraftContext(model.session(512), params, Noise(3), **drawn(params, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_plain_decodings(target: Path, draft_model: Model, name: str) -> None:
    """With a draft model that is always right and one that is nearly always wrong, greedy and sampled."""
    plain = generate(target, None, **SETTINGS[name])
    found = generate(target, DraftModel(draft_model), **SETTINGS[name])
    assert found.token_ids == plain.token_ids
    assert found.stats.n_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_a_draft_model_equal_to_the_target_is_always_right(target: Path, equal: DraftModel, name: str) -> None:
    """Greedily, and by the shared noise also where tokens are drawn: every draft is accepted to its end."""
    recorded = Recorded(equal)
    found = generate(target, recorded, **SETTINGS[name])
    recorded.assert_all_accepted()
    assert found.stats.n_accepted_tokens + found.stats.n_steps == 39


def test_no_accepted_token_is_evaluated_twice(target: Path, equal: DraftModel) -> None:
    """Nor is a prompt that the session holds from the turn before."""
    session = counted(equal)
    recorded = Recorded(equal)
    found = generate(target, recorded, temperature=0)
    session.assert_evaluated_once([BOS, *byte_ids(TEXT), *found.token_ids])
    n_rows = len(session.prefixes)
    again = generate(target, recorded, n_tokens=20, temperature=0)
    assert again.token_ids == found.token_ids[:20]
    assert len(session.prefixes) - n_rows < 40  # of 68 in the prompt and 20 in the text


@pytest.mark.slow
def test_rejected_tokens_leave_no_trace(target: Path, folder: Path) -> None:
    """After many rejections the draft model's logits are those of the text read by a new session."""
    with loaded(tiny(folder, 2)) as model:
        source = DraftModel(model)
        recorded = Recorded(source)
        found = generate(target, recorded, temperature=0)
        assert sum(outcome.path == () for _, outcome in recorded.steps) > 10
        text = [BOS, *byte_ids(TEXT), *found.token_ids]
        continued = source.read(source.texts[0], text).logits.copy()
        fresh = model.session(512).forward(np.array(text, np.int32), n_past=0)
        np.testing.assert_array_equal(continued, fresh.logits)


@pytest.mark.slow
@pytest.mark.parametrize("factory", [DraftModel, CascadeModel, UniversalDraftModel, OverlappedModel])
def test_a_text_longer_than_the_window(target: Path, factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window moves on, several times, and never holds more than it may; the text stays plain decoding's."""
    monkeypatch.setattr(model_drafter, "WINDOW", 48)
    plain = generate(target, None, n_tokens=120, temperature=0)
    with loaded(target) as model:
        drafts = factory(DraftModel(model)) if factory is CascadeModel else factory(model)
        source = drafts if isinstance(drafts, DraftModel) else drafts.source
        session = counted(source)
        found = generate(target, drafts, n_tokens=120, temperature=0)
    assert found.token_ids == plain.token_ids
    assert max(len(prefix) for prefix in session.prefixes) <= 48
    assert len({prefix[:2] for prefix in session.prefixes}) > 2


def test_a_long_prompt_is_read_from_its_end(equal: DraftModel) -> None:
    """Of a prompt that the session does not hold, the first token, on which attention leans, and the last 256."""
    session = counted(equal)
    drafter = equal(context_for(equal.model))
    prompt = [5 + i % 200 for i in range(400)]
    drafter.begin(prompt)
    drafter.propose(1, 1e18)
    assert session.prefixes[-1] == (prompt[0], *prompt[-256:])
    assert (window_of([1, 5, 6, 7], 0), window_of([1, 5, 6, 7], 3)) == ([1, 5, 6, 7], [1, 7])


def test_without_trees_the_draft_is_a_chain(equal: DraftModel) -> None:
    """A runtime that takes no trees gets no leaves."""
    context = context_for(equal.model)
    card = SimpleNamespace(card=equal.model.card, capabilities=Capabilities(trees=False))
    without: Any = SimpleNamespace(model=card, answer=context.target.answer)
    shapes = {}
    for name, given in {"trees": context, "chains": replace(context, target=without)}.items():
        drafter = equal(given)
        drafter.begin(byte_ids(TEXT))
        shapes[name] = drafter.propose(8, 1e18).is_chain
    assert shapes == {"trees": False, "chains": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled", "truncated", "penalized"])
def test_under_another_rule_a_chain_is_drawn_from_the_q_it_comes_with(equal: DraftModel, name: str) -> None:
    """Each q is what the draft model gives after the nodes before, by the target's options; so is p_accept."""
    params, prompt = SamplingParams(**SETTINGS[name]), byte_ids(TEXT)[:40]
    drafter = equal(context_for(equal.model, params, coupled=False))
    drafter.begin(prompt)
    draft = drafter.propose(8, 1e18)
    assert draft.is_chain
    assert draft.q is not None
    assert len(draft) == len(draft.q) == 8
    session = equal.model.session(512)
    for node, law in enumerate(draft.q):
        assert law is not None
        text = np.array([*prompt, *draft.tokens[:node]], np.int32)
        expected = distribution(session.forward(text, n_past=0).logits[0], params, text.tolist())
        assert law.token_ids.tolist() == expected.token_ids.tolist()
        assert law.probs.tolist() == expected.probs.tolist()
        assert draft.tokens[node] in law.token_ids
        assert draft.p_accept[node] == np.float32((1 + (law.probs**2).sum()) / 2)


@pytest.mark.slow
def test_a_position_that_is_drafted_again_gets_fresh_numbers(equal: DraftModel) -> None:
    """No two drafts are alike, nor those of other seeds; the same calls give the same drafts."""
    found = []
    for seed in (1, 2, 1):
        context = context_for(equal.model, SamplingParams(temperature=1.0, top_p=1.0), coupled=False)
        drafter = equal(replace(context, noise=Noise(seed)))
        drafter.begin(byte_ids(TEXT))
        found.append([drafter.propose(6, 1e18).tokens for _ in range(20)])
    assert len({*found[0], *found[1]}) == 40
    assert found[0] == found[2]


def test_a_drawn_chain_goes_on_by_what_is_there_before_the_next_draw(equal: DraftModel) -> None:
    """The floor ends a chain after the node whose q, cut to 1,024 tokens, brings the path's estimate below it."""
    floor = Floor(0.5)
    context = context_for(equal.model, SamplingParams(temperature=1.0, top_p=1.0), coupled=False, floor=floor)
    drafter = equal(context)
    drafter.begin(byte_ids(TEXT))
    lengths = set()
    for _ in range(20):
        path = np.cumprod(drafter.propose(8, 1e18).p_accept)
        assert (path[:-1] >= 0.5).all()
        assert path[-1] < 0.5
        lengths.add(len(path))
    assert lengths == {2}
    assert [cut(SamplingParams(top_k=k)).top_k for k in (0, 40, 5000)] == [1024, 40, 1024]


def test_a_greedy_draft_is_looked_up_under_every_rule(equal: DraftModel) -> None:
    """At temperature 0 there is nothing to draw: the same tree, without q."""
    drafts = []
    for coupled in (True, False):
        drafter = equal(context_for(equal.model, coupled=coupled))
        drafter.begin(byte_ids(TEXT))
        drafts.append(drafter.propose(8, 1e18))
    assert drafts[0].q is drafts[1].q is None
    assert list(drafts[0].tokens) == list(drafts[1].tokens)
    assert not drafts[1].is_chain


def test_a_token_that_was_not_drafted_is_taken_back(equal: DraftModel) -> None:
    """After a correction the next draft is what a new drafter would propose."""
    drafter, prompt = equal(context_for(equal.model)), byte_ids(TEXT)
    drafter.begin(prompt)
    wrong = (int(drafter.propose(4, 1e18).tokens[0]) + 1) % 260
    drafter.learn(Verification((), (wrong,)), {})
    fresh = equal(context_for(equal.model))
    fresh.begin([*prompt, wrong])
    assert list(drafter.propose(4, 1e18).tokens) == list(fresh.propose(4, 1e18).tokens)


@pytest.mark.slow
def test_the_conformance_suite_passes(target: Path, draft_model: Model) -> None:
    """Every check of a drafter."""
    results = check_drafter(DraftModel(draft_model), lambda: loaded(target), n_tokens=16)
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []


def test_forgetting_and_closing_reach_every_factory_with_a_model(target: Path) -> None:
    """Drafting knows them by what they can do; a class of drafters is none of them."""
    models = [loaded(target) for _ in range(2)]
    source, universal = DraftModel(models[0]), UniversalDraftModel(models[1])
    factories: dict[str, DrafterFactory] = {"model": source, "cascade": CascadeModel(source), "universal": universal}
    factories["suffix"] = SuffixDrafter
    assert [isinstance(factory, ModelFactory) for factory in factories.values()] == [True, True, True, False]
    drafting = Drafting(factories, 8)
    for held in (source, universal.source):
        held.read(held.texts[0], [1, 2, 3])
    drafting.forget()
    assert (source.texts[0].cached, universal.source.texts[0].cached) == ([], [])
    drafting.close()
    for model in models:
        with pytest.raises(SessionError, match="closed"):
            model.session(8)


def test_each_text_has_a_session_and_later_texts_fork_it(target: Path, folder: Path) -> None:
    """A second text of the same prompt forks the session of the first; when both are gone, their sessions are free."""
    with loaded(tiny(folder, 2)) as model:
        source = DraftModel(model, most=2)
        first, second, third = (source(context_for(model)) for _ in range(3))
        prompt = [BOS, *byte_ids(TEXT)]
        for drafter in (first, second, third):
            drafter.begin(prompt)
        far = monotonic() + 60
        expected = first.propose(4, far)
        assert source.texts[0].n_unread(prompt) == 0
        assert second.propose(4, far) == expected
        assert len(source.texts) == 2
        with pytest.raises(MemoryCapError, match="serves 2 of the texts"):
            third.propose(4, far)
        del first
        gc.collect()
        assert third.propose(4, far) == expected
        assert len(source.texts) == 2

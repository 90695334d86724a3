"""Drafts of the target's first layers: the text is plain decoding's, and the exit is the one that agrees and pays."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.decoding.draft_models import SETTINGS, TEXT, loaded
from support.forwards import evaluated
from support.models.tiny_models import BOS, byte_ids, tiny_llama

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.draft import Verification
from edgedec.drafter import DraftContext
from edgedec.errors import CapabilityError
from edgedec.model import LayerSet, Model, RowGroup, Span
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams
from edgedec.testing import check_drafter
from edgedec_methods import exit as exit_drafter
from edgedec_methods.exit import Agreement, ExitDrafter, exits_of

GREEDY = SamplingParams(temperature=0)
PROMPT = [BOS, *byte_ids(TEXT)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of five layers."""
    folder = tmp_path_factory.mktemp("models")
    return tiny_llama(folder / "target.gguf", seed=1, n_layer=5, n_ctx_train=1024)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    """The target on the cpu runtime."""
    with loaded(target) as model:
        yield model


@pytest.mark.slow
def test_the_text_is_plain_decodings(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and with a seed, though drafts be of little use."""
    monkeypatch.setattr(exit_drafter, "_LEAST_GAIN", 0.0)
    texts = []
    for draft in ("off", "exit"):
        with edgedec.load(target, runtime="cpu", n_ctx=256, draft=draft, n_draft_max=8, n_threads=1) as engine:
            ways = SETTINGS.values()
            found = [engine.generate(TEXT, max_tokens=40, seed=5, ignore_end=True, **way) for way in ways]
        texts.append([one.token_ids for one in found])
    assert texts[0] == texts[1]
    assert all(one.stats.n_drafts > 10 for one in found)


def test_by_name_it_knows_what_rows_cost(target: Path) -> None:
    """The curve is measured at load for it: rows of unknown cost would never pay, and so never be tried."""
    with edgedec.load(target, runtime="cpu", n_ctx=256, draft="exit", n_threads=1) as engine:
        assert len(engine.pool.slots[0].curve.table()) > 1


def test_a_memory_plan_has_room_for_it(target: Path) -> None:
    """It declares what it holds: without a term in the plan, it would be refused in every text."""
    with edgedec.load(target, runtime="cpu", n_ctx=256, draft="exit", n_threads=1, memory="2GB") as engine:
        assert not engine.generate(TEXT, max_tokens=2, ignore_end=True).stats.reasons


def agreeing(model: Model, rates: dict[int, float], curve: CostCurve) -> ExitDrafter:
    """Return a drafter that has seen how often each exit agrees."""
    agreement = Agreement(exits_of(model.card.n_layer), model.card.n_layer)
    for i in range(100):
        agreement.observe([(i * rates.get(layer, 0.0)) % 1 + rates.get(layer, 0.0) >= 1 for layer in agreement.exits])
    context = DraftContext(model.session(256), GREEDY, Noise(0), curve=curve)
    context.store["exit"] = agreement
    drafter = ExitDrafter(context)
    context.target.forward(np.array(PROMPT[:-1], np.int32), n_past=0)
    drafter.begin(PROMPT)
    return drafter


@pytest.mark.parametrize(
    ("rates", "layer"), [({1: 1.0, 2: 1.0, 3: 1.0}, 1), ({2: 0.95, 3: 1.0}, 2), ({1: 0.2, 2: 0.3, 3: 1.0}, 3)]
)
def test_the_exit_with_the_most_tokens_per_second_is_taken(model: Model, rates: dict[int, float], layer: int) -> None:
    """The first of those that agree alike, and a later one only for more than it costs."""
    drafter = agreeing(model, rates, CostCurve({1: 1.0, 16: 1.01}))
    for share, cost in ((0.52, 0.4), (0.68, 0.5), (0.84, 0.8)):
        drafter.parts.expect(share, cost)
    drafted = drafter.propose(8, 1e18)
    session = model.session(256)
    session.forward(np.array(PROMPT[:-1], np.int32), n_past=0)
    logits = session.forward(
        np.array(PROMPT[-1:], np.int32), n_past=len(PROMPT) - 1, layers=LayerSet.of(5, range(layer + 1))
    ).logits[0]
    assert drafted.tokens[0] == logits.argmax()
    assert drafter.share == pytest.approx(0.2 + 0.8 * (layer + 1) / 5)


def test_nothing_is_drafted_where_no_exit_pays(model: Model) -> None:
    """After positions at which none agreed."""
    drafter = agreeing(model, {}, CostCurve({1: 1.0, 16: 1.01}))
    assert len(drafter.propose(8, 1e18)) == 0


def test_the_judged_exits_are_those_that_would_have_drafted_the_token(model: Model) -> None:
    """What the head makes of the tapped states counts as right exactly where a forward to that exit says the same.

    The first eight positions are judged, then one in 16, and where no exit pays, as here, fewer and fewer; at the
    others nothing is tapped.
    """
    context = DraftContext(model.session(256), GREEDY, Noise(0))
    drafter = ExitDrafter(context)
    drafter.begin(PROMPT)
    session, text = context.target, list(PROMPT)
    expected = Agreement(exits_of(5), 5)
    judged = []
    for step in range(80):
        taps = drafter.needs.taps
        assert taps in ((), expected.exits)
        n_past = session.n_cached if step == 0 else len(text) - 1
        forward = session.forward(np.array(text[n_past:], np.int32), n_past=n_past, taps=taps)
        token, hidden = int(forward.logits[0].argmax()), {tap: forward.hidden[tap].copy() for tap in taps}
        if taps:
            judged.append(step)
            expected.observe([_exit_token(model, text, layer) == token for layer in taps])
            expected.seen(pays=False)
        text.append(token)
        drafter.learn(Verification((), (token,)), hidden)
        drafter.propose(2, 1e18)
    assert context.store["exit"] == expected
    assert judged == [*range(8), 16, 32, 64]


def test_where_an_exit_pays_positions_are_judged_often_again() -> None:
    """Few where none does, but never none; as many as at first as soon as one does."""
    agreement = Agreement((1, 3), 5, n_samples=100)
    found = []
    for pays in (False, False, False, False, False, False, False, True):
        agreement.seen(pays=pays)
        found.append(agreement.every)
    assert found == [32, 64, 128, 256, 512, 512, 512, 16]


def _exit_token(model: Model, text: list[int], layer: int) -> int:
    """Return the most probable token after a text whose last token goes through the first layers only."""
    session = model.session(256)
    if len(text) > 1:
        session.forward(np.array(text[:-1], np.int32), n_past=0)
    layers = LayerSet.of(model.card.n_layer, range(layer + 1))
    logits = session.forward(np.array(text[-1:], np.int32), n_past=len(text) - 1, layers=layers).logits[0]
    return int(logits.argmax())


def test_verification_could_go_on_from_the_exits_states(target: Path) -> None:
    """On the cpu runtime the rest of the layers, over the states of drafted tokens, gives a whole forward's bits."""
    ids = np.random.default_rng(0).integers(4, 250, 60).astype(np.int32)
    with loaded(target) as model:
        session = model.session(128)
        expected = session.forward(ids, n_past=0, rows="all").logits[50:].copy()
        layers = LayerSet.of(5, range(3))
        states = [
            session.forward(ids[i : i + 1], n_past=i, layers=layers, taps=(2,)).hidden[2].copy() for i in range(50, 60)
        ]
        found = evaluated(session, 50, RowGroup(vectors=np.concatenate(states), span=Span(enter=3)), rows="all").logits
        assert np.array_equal(found, expected)


@pytest.mark.slow
def test_the_conformance_suite_passes(target: Path) -> None:
    """Every check, though what is known of the exits outlives a text."""
    assert {result.status for result in check_drafter(ExitDrafter, lambda: loaded(target), n_tokens=6)} == {"passed"}


def test_what_it_needs_is_required(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that can't go on from hidden states is refused by the capability's name."""
    monkeypatch.setattr(model, "capabilities", Capabilities(layers=True, taps=True))
    with pytest.raises(CapabilityError, match="'hidden_input'"):
        ExitDrafter(DraftContext(model.session(8), GREEDY, Noise(0)))

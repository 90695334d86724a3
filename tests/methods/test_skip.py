"""Drafts of the target without some half-layers: the text is plain decoding's, and the session is left as it was."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.decoding.draft_models import SETTINGS, TEXT, Recorded, depth, loaded
from support.decoding.drawings import drawn
from support.models.real_models import real_model
from support.models.tiny_models import BOS, byte_ids, tiny_llama
from support.processes.installed import with_plugin

import edgedec
from edgedec import plugins
from edgedec.cost_curve import CostCurve
from edgedec.drafter import DraftContext, DrafterFactory, Floor, Store
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.errors import CancelledError, CapabilityError
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet, Model
from edgedec.model_card import Capabilities
from edgedec.sampling import Noise, SamplingParams, distribution
from edgedec.scheduler import plugin_guard
from edgedec.scheduler.drafter_factories import PromisedGain, promised_gains
from edgedec.scheduler.drafter_set import Drafting, open_policy
from edgedec.scheduler.policy import Policy
from edgedec.sequence import Request, TextState
from edgedec.testing import check_drafter
from edgedec_apps.evaluation.tune_skip import part_cost
from edgedec_methods import exit as exit_drafter
from edgedec_methods.skip import SkipDrafter
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, keep_tuned_set, without

GREEDY = SamplingParams(temperature=0)
PROMPT = [BOS, *byte_ids(TEXT)]
HALF = without(4, [(1, 0), (1, 1), (2, 1)])
WHOLE = without(4, [])


def tuned(layers: LayerSet, *, share: float = 0.01, cost: float = 0.01, agreement: float = 0.9) -> TunedSet:
    """Return a set that claims to cost next to nothing, so that chains are long."""
    return TunedSet(layers, share, cost, agreement, 100)


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    """A target of four layers."""
    return tiny_llama(folder / "target.gguf", seed=1, n_layer=4, n_ff=96, n_ctx_train=1024)


@pytest.fixture(scope="module")
def model(target: Path) -> Iterator[Model]:
    """The target on the cpu runtime."""
    with loaded(target) as model:
        yield model


def drafter_for(model: Model, layers: LayerSet, params: SamplingParams = GREEDY, **options: Any) -> SkipDrafter:
    """Return a drafter whose session holds the prompt but for its last token."""
    session = model.session(256)
    session.forward(np.array(PROMPT[:-1], np.int32), n_past=0)
    context = DraftContext(session, params, Noise(3), **drawn(params, **options))
    drafter = SkipDrafter(context, tuned(layers))
    drafter.begin(PROMPT)
    return drafter


def texts(path: Path, draft: DrafterFactory | None) -> list[tuple[int, ...]]:
    """Return what is generated after TEXT in every way to draw tokens, with a drafter pinned or without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_guard, "GuardedFactory", lambda factory: factory)
        engine = edgedec.load(path, runtime="cpu", n_ctx=256, draft=draft, n_draft_max=8, n_threads=1)
    with engine:
        found = [engine.generate(TEXT, max_tokens=40, seed=5, ignore_end=True, **way) for way in SETTINGS.values()]
    assert all(one.stats.reasons == [] for one in found)
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[tuple[int, ...]]:
    """What plain decoding generates."""
    return texts(target, None)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [HALF, without(4, [(1, 0), (2, 0)])], ids=["half", "no attention"])
def test_the_text_is_plain_decodings(target: Path, plain: list[tuple[int, ...]], layers: LayerSet) -> None:
    """Greedy and with a seed, whatever is left out; some drafts are longer than one token."""
    recorded = Recorded(partial(SkipDrafter, tuned=tuned(layers)))
    assert texts(target, recorded) == plain
    assert any(max(list(draft.parents), default=-1) >= 0 for draft, _ in recorded.steps)
    assert any(len(outcome.path) < depth(draft) for draft, outcome in recorded.steps)


def test_a_set_of_all_layers_is_always_right(target: Path, plain: list[tuple[int, ...]]) -> None:
    """The same noise draws the same tokens: every chain is accepted to its end, however tokens are drawn."""
    recorded = Recorded(partial(SkipDrafter, tuned=tuned(WHOLE)))
    assert texts(target, recorded) == plain
    recorded.assert_all_accepted()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0/q4_0", "gear", "q4_0"])
def test_after_a_draft_the_session_gives_the_bits_of_one_that_never_drafted(folder: Path, kv_type: str) -> None:
    """On the cpu runtime, for every KV type, across a page of the cache."""
    path = tiny_llama(folder / "heads.gguf", n_layer=4, n_head=2, n_head_kv=1, n_ctx_train=512)
    with Cpu().load(path, LoadOptions(n_ctx=256, kv_type=kv_type, n_threads=1)) as model:
        ids = np.random.default_rng(0).integers(4, 250, 140).astype(np.int32)
        session, fresh = model.session(256), model.session(256)
        for n_past in (57, 60, 120):
            held = min(n_past - 1, session.n_cached)
            session.forward(ids[held:n_past], n_past=held)
            context = DraftContext(session, GREEDY, Noise(0))
            drafter = SkipDrafter(context, tuned(HALF, share=1e-9, cost=1e-9))
            drafter.begin(ids[: n_past + 1].tolist())
            assert len(drafter.propose(12, 1e18)) > 4
            found = session.forward(ids[n_past : n_past + 3], n_past=n_past, rows="all").logits.copy()
            expected = fresh.forward(ids[fresh.n_cached : n_past + 3], n_past=fresh.n_cached, rows="all").logits[-3:]
            assert np.array_equal(found, expected)


def test_a_chain_ends_below_the_floor(model: Model) -> None:
    """Each token but the last has a path that is probable enough, as the policy asks or, by default, for its price."""
    chain = drafter_for(model, HALF).propose(12, 1e18)
    floor = float(np.cumprod(_spine(chain))[1]) + 1e-6
    cut = drafter_for(model, HALF, floor=Floor(floor)).propose(12, 1e18)
    assert len(_spine(cut)) == 2 < len(_spine(chain))
    dear = drafter_for(model, HALF)
    dear.share = floor  # of a token's time
    assert len(_spine(dear.propose(12, 1e18))) == 2


def _spine(draft: Any) -> list[float]:
    """Return p_accept of the chain that the first child of each level makes."""
    found, parent = [], -1
    for node, above in enumerate(draft.parents):
        if above == parent:
            found.append(float(draft.p_accept[node]))
            parent = node
    return found


def test_nothing_is_drafted_late_or_beside_the_text(model: Model) -> None:
    """After the deadline, without room, without a text, and where the session holds less than the text."""
    drafter = drafter_for(model, HALF)
    assert len(drafter.propose(4, -1.0)) == 0
    assert len(drafter.propose(0, 1e18)) == 0
    drafter.begin([])
    assert len(drafter.propose(4, 1e18)) == 0
    drafter.begin([*PROMPT, 5, 6])
    assert len(drafter.propose(4, 1e18)) == 0


def test_a_cancelled_forward_ends_the_draft(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drafted before stands; the generation sees the cancelling itself."""
    drafter = drafter_for(model, WHOLE)
    session: Any = drafter.context.target
    forward, calls = session.forward, list[int]()

    def third_cancelled(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise CancelledError("cancelled")
        return forward(*args, **options)

    monkeypatch.setattr(session, "forward", third_cancelled)
    assert len(_spine(drafter.propose(12, 1e18))) == 2


@pytest.mark.parametrize("name", ["sampled", "truncated"])
def test_under_another_rule_a_chain_is_drawn_from_the_q_it_comes_with(model: Model, name: str) -> None:
    """Each q is what the remaining layers give after the nodes before."""
    params = SamplingParams(**SETTINGS[name])
    draft = drafter_for(model, HALF, params, coupled=False).propose(6, 1e18)
    assert draft.is_chain
    assert draft.q is not None
    assert len(draft) == len(draft.q) > 1
    session = model.session(256)
    session.forward(np.array(PROMPT[:-1], np.int32), n_past=0)
    for node, law in enumerate(draft.q):
        assert law is not None
        text = [*PROMPT, *draft.tokens[:node]]
        tokens = np.array(text[len(PROMPT) - 1 :], np.int32)
        logits = session.forward(tokens, n_past=len(PROMPT) - 1, layers=HALF).logits[0]
        expected = distribution(logits, params, text)
        assert law.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(law.probs, expected.probs, rtol=1e-4)


@pytest.mark.slow
def test_the_conformance_suite_passes(target: Path) -> None:
    """Every check of a drafter."""
    results = check_drafter(partial(SkipDrafter, tuned=tuned(HALF)), lambda: loaded(target), n_tokens=8)
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []


def test_a_runtime_that_runs_all_layers_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the capability's name."""
    monkeypatch.setattr(model, "capabilities", Capabilities())
    with pytest.raises(CapabilityError, match="'layers'"):
        SkipDrafter(DraftContext(model.session(8), GREEDY, Noise(0)))


# The policy

FLAT = CostCurve({1: 0.100, 2: 0.101, 4: 0.102, 8: 0.104})


def policy_for(model: Model, drafting: Drafting, curve: CostCurve = FLAT) -> tuple[Policy, TextState]:
    """Return a generation's policy, and the generation."""
    request = Request(tuple(PROMPT), GREEDY, 1)
    sequence = TextState(request, list(PROMPT))
    policy = open_policy(drafting, model.session(256), curve, sequence, Noise(1))
    assert policy is not None
    return policy, sequence


def auto(model: Model, cache_dir: Path) -> Drafting:
    """Return what `auto` drafts with."""
    gains = promised_gains(model, cache_dir)
    return Drafting({"suffix": SuffixDrafter}, 8, promised=gains, store=Store(None, cache_dir))


def test_auto_takes_a_tuned_set_only_where_it_promises_to_pay(model: Model, tmp_path: Path) -> None:
    """Not without a set, not for one that costs too much, and not where rows cost their full price."""
    assert policy_for(model, auto(model, tmp_path))[0].drafters.get("skip") is None
    dear = replace(tuned(HALF), cost=0.9)
    steep = CostCurve({1: 0.1, 2: 0.2, 4: 0.4, 8: 0.8})
    for found, curve, expected in ((tuned(HALF), FLAT, True), (dear, FLAT, False), (tuned(HALF), steep, False)):
        keep_tuned_set(tmp_path, model.card, found)
        policy, sequence = policy_for(model, auto(model, tmp_path), curve)
        assert (policy.drafters.get("skip") is not None) is expected
        assert sequence.stats.reasons == []


def doubled(model: Model, cache_dir: Path | None) -> PromisedGain:
    """Promise twice the speed of plain decoding, as a plug-in may."""
    return lambda curve, n_max: 2.0


def broken(model: Model, cache_dir: Path | None) -> PromisedGain:
    """Fail, as a plug-in may."""
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("promise", "name"), [("doubled", "recycling"), ("doubled", "unknown"), ("broken", "recycling")]
)
def test_auto_takes_what_another_package_has_prepared(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promise: str, name: str
) -> None:
    """A drafter that promises to pay drafts; a promise that fails, or of a drafter that nobody has, is passed over."""
    with_plugin(monkeypatch, tmp_path, plugins.PREPARED_DRAFTERS, name, f"{__name__}:{promise}")
    policy, sequence = policy_for(model, auto(model, tmp_path))
    assert (policy.drafters.get("recycling") is not None) is ((promise, name) == ("doubled", "recycling"))
    assert sequence.stats.reasons == []


def test_by_name_the_tuned_set_is_taken_whatever_it_costs(model: Model, tmp_path: Path) -> None:
    """Without one a sentence says what is left out instead."""
    drafting = Drafting({"skip": SkipDrafter}, 8, always=True, store=Store(None, tmp_path))
    policy, sequence = policy_for(model, drafting)
    assert sequence.stats.reasons == [
        "skip leaves out every fourth layer; edgedec tune-skip finds a better set for this model"
    ]
    keep_tuned_set(tmp_path, model.card, replace(tuned(HALF), share=0.625, cost=0.9))
    policy, sequence = policy_for(model, drafting)
    drafter = policy.drafters.get("skip")
    assert isinstance(drafter, SkipDrafter)
    assert (drafter.share, sequence.stats.reasons) == (0.625, [])


def test_the_policy_knows_what_a_draft_takes_and_is_likely_to_bring(model: Model, tmp_path: Path) -> None:
    """From what was measured and seen when the set was tuned, before anything is drafted."""
    keep_tuned_set(tmp_path, model.card, tuned(HALF, share=0.3, cost=0.4, agreement=0.85))
    drafting = auto(model, tmp_path)
    policy_for(model, drafting)
    record = drafting.records["skip"]
    assert record.price is not None
    assert record.price.level == pytest.approx(0.040)
    assert record.rate(True) == record.rate(False) == pytest.approx(0.85)


def test_forwards_through_a_part_of_the_layers_are_timed(model: Model) -> None:
    """A draft's forwards teach what they take; others of about that share are reckoned by them."""
    curve = CostCurve({1: 1e-6})
    drafter = drafter_for(model, HALF, curve=curve)
    assert drafter.parts.ratio(0.01) == 0.01  # as the set claims
    drafter.propose(8, 1e18)
    assert drafter.parts.ratio(0.01) == pytest.approx(0.04)  # cut at four times its share
    assert 0.1 < part_cost(model.session(64), without(4, [(1, 0), (1, 1)])) < 10


# A real model

WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]


@pytest.mark.slow
@pytest.mark.model
def test_on_a_real_model_the_text_is_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and with a seed: skip and exit, alone and beside another drafter."""
    monkeypatch.setattr(exit_drafter, "_LEAST_GAIN", 0.0)
    path, prompt = real_model("smollm2-135m.gguf"), "def add(a, b):\n    return"
    texts = []
    for draft in ("off", "skip", "exit", "suffix+skip"):
        with edgedec.load(path, draft=draft, runtime="cpu", offline=True, n_draft_max=7, n_ctx=512) as engine:
            found = [engine.generate(prompt, max_tokens=24, ignore_end=True, **way) for way in WAYS]
        texts.append([one.token_ids for one in found])
        assert draft == "off" or all(one.stats.n_drafts for one in found)
    assert texts[1:] == texts[:1] * 3


def test_the_default_set_leaves_out_every_fourth_layer(folder: Path) -> None:
    """Of two layers none: the first and the last always run."""
    for n_layer, share in ((2, 1.0), (4, 0.75), (8, 0.75)):
        with loaded(tiny_llama(folder / f"{n_layer}.gguf", n_layer=n_layer)) as model:
            drafter = SkipDrafter(DraftContext(model.session(8), GREEDY, Noise(0)))
            assert (drafter.share, drafter.needs.layers, drafter.needs.taps) == (share, True, ())

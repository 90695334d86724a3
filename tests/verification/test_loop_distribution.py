"""Every rule through the whole loop, with real drafters: texts come as often as plain sampling would give them.

Seeds are fixed, so a test gives one answer. Were it asked with other seeds, a rule that is right would fail one time in
10,000; rules and drafters that are wrong are shown to fail below.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.decoding.decoding_loop import (
    Hotter,
    Text,
    exact,
    generated,
    likely_alone,
    p_value,
    plugin,
    survival,
    two_paths,
)
from support.models.real_models import real_model
from support.models.tiny_models import BOS, byte_ids, tiny_llama
from support.processes.installed import with_plugin

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec.draft import Draft, Verification
from edgedec.drafter import DrafterFactory
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.drafters.suffix.suffix import SuffixDrafter
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec.plugins import RULES
from edgedec.sampling import Distribution, SamplingParams, distribution
from edgedec.scheduler import estimator
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.verification.rules import TargetRow, rule_names
from edgedec_methods.drawn.rule_tools import Uniform, sample
from edgedec_methods.drawn.rules import Rule
from edgedec_runtimes.cpu.runtime import Cpu

BOUND = 1e-4
N_TOKENS = 3
SEEDS = range(200)
ALLOWED = byte_ids("abcdef")
PROMPT = (BOS, *byte_ids("abcabdabeabcab"))


# The bias leaves so few tokens that texts can be counted; the 256 others share about 1e-10.
SETTINGS = {
    "temperature 1": SamplingParams(temperature=1.0, top_p=1.0, logit_bias=dict.fromkeys(ALLOWED[:4], 30.0)),
    "truncated and penalized": SamplingParams(
        temperature=1.0,
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.03,
        frequency_penalty=0.3,
        logit_bias=dict.fromkeys(ALLOWED, 30.0),
    ),
}


def in_turn(cases: Iterable[Any]) -> list[Any]:
    """Return each case with one of the two settings in turn; with the other it is in the lane `long`."""
    return [
        pytest.param(case, name, marks=() if i % 2 == j else pytest.mark.long)
        for i, case in enumerate(cases)
        for j, name in enumerate(SETTINGS)
    ]


def tiny(path: Path, seed: int) -> Model:
    """Load a model that is quick to run."""
    tiny_llama(path, seed=seed, n_layer=1, n_embd=32, n_ff=32, n_head=2, n_head_kv=1)
    return Cpu().load(path, LoadOptions(n_ctx=64, n_threads=1))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """The target's session."""
    with tiny(tmp_path_factory.mktemp("target") / "target.gguf", 1) as model:
        yield model.session(64)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftModel]:
    """The target once more, to draft with."""
    with tiny(tmp_path_factory.mktemp("drafter") / "drafter.gguf", 1) as model:
        yield DraftModel(model)


@pytest.fixture(scope="module")
def laws(session: Session) -> Mapping[str, Mapping[Text, float]]:
    """What plain sampling gives, exactly, by setting."""
    return {name: exact(session, PROMPT, params, N_TOKENS) for name, params in SETTINGS.items()}


@pytest.fixture(params=["suffix", "model", "plugin"])
def drafters(request: pytest.FixtureRequest, source: DraftModel) -> dict[str, DrafterFactory]:
    """A drafter that looks up, one that draws a chain, and one that draws two paths."""
    made: dict[str, DrafterFactory] = {
        "suffix": SuffixDrafter,
        "model": Hotter(source),
        "plugin": plugin(ALLOWED, two_paths),
    }
    return {request.param: made[request.param]}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "setting"), in_turn(rule_names()))
def test_every_rule_keeps_the_distribution(
    session: Session,
    laws: Mapping[str, Mapping[Text, float]],
    drafters: Mapping[str, DrafterFactory],
    rule: str,
    setting: str,
) -> None:
    """Texts of three tokens fit plain sampling's exact law, while drafts are accepted and rejected."""
    found = generated(session, PROMPT, SETTINGS[setting], rule, drafters, n_tokens=N_TOKENS, seeds=SEEDS)
    assert p_value(found.texts, laws[setting]) > BOUND
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "setting"),
    in_turn(
        [
            ("recursive", "siblings:3-2"),
            ("recursive", "beam:3"),
            ("recursive", "grow"),
            ("kseq", "paths:3"),
            ("multipath", "paths:3"),
            ("coupled", "grow"),
        ]
    ),
)
def test_trees_of_a_draft_model_keep_the_distribution(
    session: Session,
    source: DraftModel,
    laws: Mapping[str, Mapping[Text, float]],
    drawn: tuple[str, str],
    setting: str,
) -> None:
    """Trees that the draft model grows level by level, each verified by a rule that it is made for."""
    rule, shape = drawn
    drafters, tree = {"model": Hotter(source)}, shape
    found = generated(session, PROMPT, SETTINGS[setting], rule, drafters, n_tokens=N_TOKENS, seeds=SEEDS, tree=tree)
    assert p_value(found.texts, laws[setting]) > BOUND
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("names", [("cascade",), ("suffix", "model"), ("plugin", "suffix", "cascade")])
@pytest.mark.parametrize("rule", ["recursive", "block"])
def test_several_drafters_keep_the_distribution(
    session: Session, source: DraftModel, laws: Mapping[str, Mapping[Text, float]], rule: str, names: Sequence[str]
) -> None:
    """A draft that was drawn is verified whole; the draft model's rows that were evaluated ahead change nothing."""
    made: dict[str, DrafterFactory] = {
        "cascade": Hotter(CascadeModel(source)),
        "suffix": SuffixDrafter,
        "model": Hotter(source),
        "plugin": plugin(ALLOWED, two_paths),
    }
    drafters = {name: made[name] for name in names}
    name = "truncated and penalized"
    found = generated(session, PROMPT, SETTINGS[name], rule, drafters, n_tokens=N_TOKENS, seeds=SEEDS)
    assert p_value(found.texts, laws[name]) > BOUND
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("rule", rule_names()[1:])
def test_the_policy_keeps_the_distribution(
    session: Session,
    source: DraftModel,
    laws: Mapping[str, Mapping[Text, float]],
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it decides by cost between looked-up nodes and a draft model's chain, and rows are cheap."""
    curve = CostCurve({1: 1.0, 4: 1.1, 8: 1.6})
    monkeypatch.setattr(curve, "observe", lambda *args, **options: None)
    monkeypatch.setattr(estimator, "FIRST", 0)
    records = {"model": DrafterRecord(price=DraftPrice(0.05), first_s=0.0)}
    drafters: dict[str, DrafterFactory] = {"suffix": SuffixDrafter, "model": Hotter(source)}
    name = "temperature 1"
    found = generated(
        session,
        PROMPT,
        SETTINGS[name],
        rule,
        drafters,
        n_tokens=N_TOKENS,
        seeds=range(400),
        curve=curve,
        records=records,
    )
    assert p_value(found.texts, laws[name]) > BOUND
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9


def accept_always(draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform) -> Verification:
    """Accept the first path of a draft, whatever the target says: a rule that is wrong."""
    path: tuple[int, ...] = ()
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path += (node,)
    tokens = tuple(draft.tokens[node] for node in path)
    bonus = sample(target(path[-1] + 1 if path else 0, tokens), uniform(0))
    return Verification(path, (*tokens, bonus))


WRONG = Rule(accept_always)


@pytest.mark.slow
def test_a_wrong_rule_is_found_out(
    tmp_path: Path,
    session: Session,
    laws: Mapping[str, Mapping[Text, float]],
    drafters: Mapping[str, DrafterFactory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every drafter, texts of a rule that accepts all that it may are far from the law."""
    with_plugin(monkeypatch, tmp_path, RULES, "wrong", f"{__name__}:WRONG")
    name = "temperature 1"
    found = generated(session, PROMPT, SETTINGS[name], "wrong", drafters, n_tokens=N_TOKENS, seeds=SEEDS)
    assert p_value(found.texts, laws[name]) < BOUND**2


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["tokenwise", "block"])
def test_a_drafter_that_chooses_among_what_it_drew_is_found_out(
    session: Session, laws: Mapping[str, Mapping[Text, float]], rule: str
) -> None:
    """A draw is proposed or it is not, before it is known: else the rules can't be exact. Without q they are."""
    name = "temperature 1"
    drafters = {"chooses": plugin(ALLOWED, likely_alone)}
    found = generated(session, PROMPT, SETTINGS[name], rule, drafters, n_tokens=N_TOKENS, seeds=SEEDS)
    assert p_value(found.texts, laws[name]) < BOUND**2
    drafters = {"chooses": plugin(ALLOWED, lambda drafter, n_max: replace(likely_alone(drafter, n_max), q=None))}
    found = generated(session, PROMPT, SETTINGS[name], rule, drafters, n_tokens=N_TOKENS, seeds=SEEDS)
    assert p_value(found.texts, laws[name]) > BOUND


def test_the_p_value_is_that_of_the_tables() -> None:
    """The 5 % and 0.1 % points of the chi-square distribution, as tables have them."""
    for chi_square, freedom, p in [(3.841, 1, 0.05), (5.991, 2, 0.05), (18.307, 10, 0.05), (45.315, 20, 0.001)]:
        assert survival(chi_square, freedom) == pytest.approx(p, rel=2e-3)
    assert p_value({(0,): 60, (1,): 40}, {(0,): 0.5, (1,): 0.5}) == pytest.approx(0.0455, rel=1e-3)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("rule", ["block"])
def test_a_real_model_keeps_the_distribution(rule: str) -> None:
    """Two tokens of the 135M model, drafted by itself at another temperature, fit the law from two plain forwards."""
    path, options = real_model("smollm2-135m.gguf"), LoadOptions(n_ctx=64, n_threads=2)
    params = SamplingParams(temperature=1.0, top_k=4, top_p=1.0)
    with Cpu().load(path, options) as target, Cpu().load(path, options) as model:
        prompt = tuple(target.tokenizer.encode("The weather today is"))
        session = target.session(64)
        first = distribution(session.forward(np.array(prompt, np.int32), n_past=0).logits[0], params)
        next_ids = first.token_ids.astype(np.int32)
        parents = np.full(len(next_ids), -1, np.int32)
        rows = session.forward(next_ids, n_past=len(prompt), parents=parents, rows="all").logits
        law: dict[Text, float] = {
            (token, after): float(p * p_after)
            for token, p, row in zip(next_ids.tolist(), first.probs.tolist(), rows, strict=True)
            for second in [distribution(row, params)]
            for after, p_after in zip(second.token_ids.tolist(), second.probs.tolist(), strict=True)
        }
        found = generated(
            session, prompt, params, rule, {"model": Hotter(DraftModel(model))}, n_tokens=2, seeds=range(100), n_draft=2
        )
    assert p_value(found.texts, law) > BOUND
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9

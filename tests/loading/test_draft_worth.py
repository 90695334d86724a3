"""A draft model that can never pay is not loaded and named with the numbers; one that is loaded says what it did."""

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec.drafter_traits import DraftCost
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.load_options import LoadOptions
from edgedec.loading.draft_worth import best_gain, expected_time, measured_time, relative_bytes, why_it_cannot_pay
from edgedec.model import Model
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.decision_log import summary
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

FLAT = CostCurve(dict.fromkeys((1, 2, 4, 8, 16), 0.1))
STEEP = CostCurve({n: 0.1 * n for n in (1, 2, 4, 8, 16)})
TEXT = "the cat sat on the mat, the dog sat on the log, "


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("worth") / "large.gguf", n_layer=6, n_ff=256, n_ctx_train=1024)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same vocabulary that reads a fraction of the target's bytes."""
    return tiny_llama(tmp_path_factory.mktemp("worth") / "small.gguf", seed=1, n_layer=1, n_embd=32, n_ff=32)


def why_not(draft: Path, target: Path, curve: CostCurve, share: float = 1.0, n_max: int = 15) -> str | None:
    """Return what is said before the draft model is loaded, on the target's device."""
    return why_it_cannot_pay(expected_time(draft, target, curve, share), curve, n_max)


def opened(monkeypatch: pytest.MonkeyPatch, curve: CostCurve, large: Path, **options: Any) -> edgedec.Engine:
    """Load the target as if its forwards took what the curve says; the engine's own curve follows its steps."""
    monkeypatch.setattr("edgedec.api.load.cost_curve", lambda *_, **__: deepcopy(curve))
    return edgedec.load(large, runtime="cpu", n_ctx=256, n_threads=1, **options)


def test_every_token_right_is_the_bound(large: Path, small: Path) -> None:
    """The same model again gains nothing on any curve; a small one does where rows are cheap, and not where a row is
    a step.
    """
    assert relative_bytes(large, large) == 1.0
    part = relative_bytes(small, large)
    assert part is not None
    assert 0 < part < 0.2
    assert why_not(small, large, FLAT) is None
    assert why_not(large, large, FLAT) is not None
    gain = 2 * 0.1 / (0.1 * part + 0.2)
    assert why_not(small, large, STEEP) == (
        f"each of its tokens is expected to take {100 * part:.1f} ms, as it reads {part:.2f} of the model's "
        f"bytes; at best, with 1 a step that are all right, decoding is {gain:.2f} times as fast "
        "(1 row takes 100.0 ms, 2 rows 200.0)"
    )


def test_what_is_not_known_is_no_reason_against_it(large: Path, small: Path) -> None:
    """A curve that was cut short after one row, or none at all, or a file that says nothing of its weights."""
    for curve in (CostCurve({1: 0.1}), CostCurve()):
        assert why_not(large, large, curve) is None
    assert why_not(Path("nowhere.gguf"), large, STEEP) is None
    assert why_it_cannot_pay(None, STEEP, 15) is None
    assert why_not(small, large, FLAT, n_max=0) == "no two rows are known to have the bits of single steps"


def test_a_draft_model_that_overlaps_costs_only_what_is_longer() -> None:
    """Drafting while the target verifies, the same model again may still gain."""
    assert best_gain(0.1, FLAT, 4)[0] == 1.0
    assert best_gain(0.1, FLAT, 4, overlap=True) == (2.0, 1)
    token = measured_time(0.1)
    assert why_it_cannot_pay(token, FLAT, 4, overlap=True) is None
    assert why_it_cannot_pay(token, FLAT, 4) == (
        "each of its tokens takes 100.0 ms, as measured; at best, with 1 a step that are all right, decoding "
        "is 1.00 times as fast (1 row takes 100.0 ms, 2 rows 100.0)"
    )


def test_a_line_to_the_target_makes_a_draft_model_pay() -> None:
    """What a token takes here is what it takes, however far the target is; so each row that rides along gains more."""
    token = measured_time(0.03)
    near = CostCurve({n: 0.025 * n for n in (1, 2, 4, 8, 16)})
    far = CostCurve({n: 0.025 * n + 0.2 for n in (1, 2, 4, 8, 16)})
    assert why_it_cannot_pay(token, near, 15) is not None
    assert why_it_cannot_pay(token, far, 15) is None
    assert best_gain(0.03, far, 15)[0] > 3.0 > best_gain(0.03, near, 15)[0]


def test_layers_that_are_left_out_make_the_target_cheaper(large: Path, small: Path) -> None:
    """Its measured steps are those of fewer bytes, of which the draft model reads the larger part."""
    part = relative_bytes(small, large)
    assert part is not None
    assert why_not(small, large, FLAT, share=2 * part) is None
    assert why_not(small, large, FLAT, share=part) is not None


def test_one_that_cannot_pay_is_not_loaded_and_named(monkeypatch: pytest.MonkeyPatch, large: Path, small: Path) -> None:
    """Its memory is neither held nor planned, and each text says which model is left out and why, with its size."""
    loaded: list[str] = []
    load = Cpu.load

    def noted(self: Cpu, path: Path, options: LoadOptions) -> Model:
        loaded.append(path.name)
        return load(self, path, options)

    monkeypatch.setattr(Cpu, "load", noted)
    with opened(monkeypatch, STEEP, large, draft_model=small, memory="1GB") as engine:
        reasons = engine.generate(TEXT, max_tokens=4).stats.reasons
        names = [term.name for term in engine.plan.terms]
        held = engine.held_bytes
    with opened(monkeypatch, STEEP, large, memory="1GB") as alone:
        assert held == alone.held_bytes
        assert names == [term.name for term in alone.plan.terms]
    assert loaded == ["large.gguf", "large.gguf"]
    assert len(reasons) == 1
    assert re.fullmatch(r"the draft model small\.gguf \([\d.]+ .B\) is not loaded: each of its tokens .*", reasons[0])


def test_one_that_was_timed_to_be_too_slow_is_freed(monkeypatch: pytest.MonkeyPatch, large: Path, small: Path) -> None:
    """Its bytes promised a gain, and its forwards don't keep the promise: the text says what they take."""
    asked: list[LoadOptions] = []

    def timed(_source: object, options: LoadOptions) -> float:
        asked.append(options)
        return 0.15

    monkeypatch.setattr("edgedec.loading.second_model.draft_token_s", timed)
    with opened(monkeypatch, CostCurve({1: 0.1, 4: 0.1}), large, draft_model=small, memory="1GB") as engine:
        reasons = engine.generate(TEXT, max_tokens=4).stats.reasons
        assert not any(term.name.startswith("draft model: ") for term in engine.plan.terms)
    assert len(asked) == len(reasons) == 1
    assert re.fullmatch(
        r"the draft model small\.gguf \([\d.]+ .B\) is not loaded: each of its tokens takes 150\.0 ms, as .*",
        reasons[0],
    )
    with opened(monkeypatch, FLAT, large, draft="model", draft_model=small) as engine:
        assert "model" in engine.generate(TEXT, max_tokens=4, temperature=0, ignore_end=True).stats.drafters
    assert len(asked) == 1


@pytest.mark.parametrize(("overlap", "name", "ms"), [(False, "cascade", "40.0"), (True, "model", "20.4")])
def test_one_that_was_timed_is_priced_by_that(
    monkeypatch: pytest.MonkeyPatch, large: Path, small: Path, overlap: bool, name: str, ms: str
) -> None:
    """From the first decision on; of one that overlaps, the part that is expected to pass behind the target is free.

    That part is 0.7 * 0.7 of a token, as each token is expected to be right with a probability of 0.7.
    """
    monkeypatch.setattr("edgedec.loading.second_model.draft_token_s", lambda *_: 0.04)
    curve, drafting_options = CostCurve(dict.fromkeys((1, 2, 4), 0.1)), DraftOptions(overlap=overlap)
    with opened(monkeypatch, curve, large, draft_model=small, drafting=drafting_options) as engine:
        drafting = engine.pool.slots[0].drafting
        assert drafting is not None
        engine.generate(TEXT, max_tokens=4, temperature=0, ignore_end=True)
        price = drafting.records[name].price
    assert price is not None
    assert f"{1000 * price.level:.1f}" == ms


def test_one_that_may_pay_or_is_pinned_is_loaded(monkeypatch: pytest.MonkeyPatch, large: Path, small: Path) -> None:
    """A draft model that is asked for by name drafts whatever it costs."""
    for curve, draft, used in ((FLAT, "auto", "cascade"), (STEEP, "model", "model"), (STEEP, "cascade", "cascade")):
        with opened(monkeypatch, curve, large, draft=draft, draft_model=small, memory="1GB") as engine:
            stats = engine.generate(TEXT, max_tokens=4, temperature=0).stats
            assert any(term.name.startswith("draft model: ") for term in engine.plan.terms)
            assert (used in stats.drafters) == (draft != "auto")
            assert not any("is not loaded" in reason for reason in stats.reasons)


def test_one_that_no_drafter_uses_is_neither_loaded_nor_planned(large: Path, small: Path) -> None:
    """Other drafters that are asked for by name leave it out, which each text says."""
    with edgedec.load(large, runtime="cpu", n_ctx=64, draft="suffix", draft_model=small, memory="1GB") as engine:
        assert not any(term.name.startswith("draft model: ") for term in engine.plan.terms)
        assert engine.generate(TEXT, max_tokens=2).stats.reasons == [
            "the draft model small.gguf is not loaded: none of the drafters (suffix) uses a smaller model"
        ]


def test_one_that_is_kept_without_use_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, large: Path, small: Path
) -> None:
    """Under `auto`: in the reasons and in the explanation; a pinned one drafts, and is told in the explanation only."""
    with opened(monkeypatch, FLAT, large, draft_model=small) as engine:
        stats = engine.generate(TEXT, max_tokens=4, temperature=0, ignore_end=True).stats
    expected = (
        r"cascade: the draft model small \([\d.]+ .B\) was not asked: "
        "the text was too short to find out whether reading it pays"
    )
    assert re.fullmatch(expected, stats.reasons[0])
    assert stats.explanation[-1] == stats.reasons[0]
    with opened(monkeypatch, FLAT, large, draft="model", draft_model=small) as engine:
        stats = engine.generate(TEXT, max_tokens=4, temperature=0, ignore_end=True).stats
    assert stats.reasons == []
    assert re.match(r"model: the draft model small \([\d.]+ .B\) was asked \d+ times, ", stats.explanation[-1])


def test_what_is_said_of_a_draft_model() -> None:
    """Asked in vain, asked with use, or not asked and why; nothing of a drafter without one."""
    member = ActiveDrafter("cascade", None, DrafterRecord(price=DraftPrice(0.012)), DraftCost.MODEL)  # type: ignore[arg-type]
    assert summary(member) == ""
    member = replace(member, model=lambda: "the draft model X (700.0 MB)")
    asked = replace(member, n_asked=3, asked_s=0.036)
    assert summary(asked) == ("cascade: the draft model X (700.0 MB) was asked 3 times, 12.0 ms each, in vain")
    assert summary(replace(asked, n_used=2)).endswith("12.0 ms each, 2 of its answers were of use")
    assert summary(replace(member, hoped=0.9)) == (
        "cascade: the draft model X (700.0 MB) was not asked: the text was expected to come 0.90 times as fast with "
        "it, 12.0 ms for each token, which does not repay reading the text"
    )


@pytest.mark.parametrize("draft", ["auto", "model"])
def test_every_parallel_request_has_the_draft_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, large: Path, small: Path, draft: str
) -> None:
    """Each of three requests at a time has a session of the draft model, and all share the draft store."""
    kept = DraftOptions(store=None if draft == "model" else tmp_path / "kept.drafts")
    options: dict[str, Any] = {"draft": draft, "draft_model": small, "drafting": kept, "n_parallel": 3}
    with opened(monkeypatch, FLAT, large, **options) as engine:
        texts = [engine.stream(TEXT * (i + 1), max_tokens=12, ignore_end=True) for i in range(3)]
        for text in texts:
            next(text)
        for text in texts:
            list(text)
        stats = [text.generation.stats for text in texts]
        drafting = {id(slot.drafting) for slot in engine.pool.slots}
    assert len(drafting) == 1
    name = {"auto": "cascade", "model": "model"}[draft]
    if draft == "model":
        assert all(found.drafters[name]["nodes"] > 0 for found in stats)
    assert not [reason for found in stats for reason in found.reasons if "parallel" in reason]


def test_the_sources_name_their_model(large: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade is around the draft model, and tells the same of it."""
    with opened(monkeypatch, FLAT, large, draft="model+cascade", draft_model=small) as engine:
        drafting = engine.pool.slots[0].drafting
        assert drafting is not None
        model, cascade = drafting.factories["model"], drafting.factories["cascade"]
        assert isinstance(cascade, CascadeModel)
        assert cascade.source.summary() == model.summary()  # type: ignore[attr-defined]


def test_of_a_mixture_the_chosen_experts_count(tmp_path: Path) -> None:
    """A quarter of 16 experts is as many bytes as 4 of 4, but for the routers; a draft model is compared with that."""
    tiny = replace(ARCHITECTURES["qwen3moe"], types=("Q8_0",))
    many = write_tiny(tmp_path / "many.gguf", tiny)
    few = write_tiny(tmp_path / "few.gguf", replace(tiny, n_expert=4))
    routers = tiny.n_layer * 12 * tiny.n_embd * 4  # 12 experts' rows of floats, or less
    difference = layer_bytes(many).total - layer_bytes(few).total
    assert 0 < difference <= routers
    assert relative_bytes(few, many) == layer_bytes(few).total / layer_bytes(many).total > 0.95

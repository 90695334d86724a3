"""What the statistics say of a rule or a shape of trees that has nothing of its own to do."""

from pathlib import Path

import pytest
from support.decoding.draft_models import loaded, tiny

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.errors import OptionError
from edgedec.scheduler import plugin_guard
from edgedec_methods.drawn.drawn_trees import CHAIN, TreeShape, parse_shape
from edgedec_methods.drawn.rules import shape_for

PROMPT = "the cat sat on the mat, the cat sat on the "


def reasons(folder: Path, verify: str, temperature: float = 1.0, **options: object) -> list[str]:
    """Return the notes and reasons of a short text."""
    with edgedec.load(tiny(folder, 1), runtime="reference", n_ctx=256, **options) as engine:  # type: ignore[arg-type]
        found = engine.generate(PROMPT, max_tokens=4, temperature=temperature, seed=1, verify=verify)
        told = [*found.stats.notes, *found.stats.reasons]
        return [reason for reason in told if not reason.startswith("verified by")]


@pytest.mark.slow
def test_a_rule_without_a_drafter_that_draws_says_so(tmp_path: Path) -> None:
    """Looked-up tokens gain nothing from another rule, and no rule does anything at temperature 0."""
    assert "the rule kseq gains nothing" in reasons(tmp_path, "kseq", draft="suffix")[0]
    assert "changes nothing at temperature 0" in reasons(tmp_path, "block", 0.0, draft="suffix")[0]
    assert (
        "the shape grow has no effect"
        in reasons(tmp_path, "coupled", draft="suffix", drafting=DraftOptions(tree="grow"))[0]
    )
    assert "the rule multipath does what block does" in reasons(tmp_path, "multipath", draft="skip")[1]
    assert (
        "the shape grow has no effect"
        in reasons(tmp_path, "coupled", draft="skip", drafting=DraftOptions(tree="grow"))[1]
    )
    assert reasons(tmp_path, "coupled", draft="suffix") == []


@pytest.mark.slow
def test_what_drafts_nothing_says_so(tmp_path: Path) -> None:
    """Rules, shapes, stores and models for drafts, where drafting is off, for a load or for a request."""
    nothing = "the rule kseq gains nothing: nothing is drafted"
    assert reasons(tmp_path, "kseq", draft="off") == [nothing]
    assert reasons(tmp_path, "coupled", draft="off") == []
    assert reasons(tmp_path, "coupled", draft="off", drafting=DraftOptions(tree="grow")) == [
        "the shape grow has no effect: nothing is drafted"
    ]
    store = tmp_path / "earlier.drafts"
    found = reasons(tmp_path, "coupled", draft="off", drafting=DraftOptions(store=store), draft_model=tiny(tmp_path, 2))
    assert [reason.split(":")[0] for reason in found] == [
        "the draft model 2.gguf is not loaded",
        "the draft store earlier.drafts is not used",
    ]
    with edgedec.load(tiny(tmp_path, 1), runtime="reference", n_ctx=256, draft="suffix") as engine:
        found = engine.generate(PROMPT, max_tokens=4, temperature=1.0, seed=1, verify="kseq", draft=False).stats.reasons
        assert nothing in found


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "shape"), [("kseq", "beam:2"), ("coupled", "paths:2"), ("block", "grow")])
def test_a_shape_that_does_not_fit_the_rule_says_so(
    rule: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule's own shape is drafted instead."""
    monkeypatch.setattr(plugin_guard, "GuardedFactory", lambda factory: factory)
    found = reasons(tmp_path, rule, draft=DraftModel(loaded(tiny(tmp_path, 2))), drafting=DraftOptions(tree=shape))
    assert any(f"the shape {shape} is not used under the rule {rule}" in reason for reason in found)
    assert reasons(tmp_path, rule, draft=DraftModel(loaded(tiny(tmp_path, 2)))) == []


@pytest.mark.parametrize("text", ["", "tree", "paths:0", "paths:65", "paths:2-2", "grow:2", "siblings:", "beam:x", 3])
def test_other_shapes_are_refused(text: object) -> None:
    """The message names the option and what it may be."""
    with pytest.raises(OptionError, match=r"draft_tree.*siblings:K"):
        parse_shape(text)


def test_each_rule_has_a_shape_of_its_own() -> None:
    """Without a wish a rule gets what it verifies; chains where no trees may be verified, and at temperature 0."""
    shapes = {
        "coupled": "chain",
        "block": "chain",
        "tokenwise": "chain",
        "recursive": "grow",
        "kseq": "paths:2",
        "multipath": "paths:2",
    }
    for rule, shape in shapes.items():
        assert shape_for(rule, None, trees=True, greedy=False) == (parse_shape(shape), ())
        assert shape_for(rule, None, trees=True, greedy=True) == (TreeShape(CHAIN), ())
        found, why = shape_for(rule, None, trees=False, greedy=False)
        assert found.kind == CHAIN
        assert bool(why) == (shape != "chain")
    assert str(parse_shape("siblings:3-2")) == "siblings:3-2"

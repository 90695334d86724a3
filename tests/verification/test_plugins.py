"""Rules and shapes of another package: the example, a stranger's, and notes on shapes that don't fit a rule."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.decoding.draft_models import loaded, tiny
from support.decoding.rule_checks import (
    Check,
    a_drawn_chain_keeps_the_distribution,
    a_greedy_target_says_its_text_under_any_looked_up_draft,
    an_empty_draft_is_a_plain_draw,
    drawn_and_looked_up_siblings_mix,
    nodes_that_were_looked_up_keep_the_distribution,
    sampled_outcomes_fit_the_exact_ones,
    supports_that_differ_keep_the_distribution,
    where_a_path_ends_may_depend_on_its_tokens,
)
from support.decoding.tree_draws import check_drawn_tree
from support.processes.installed import with_plugin

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.api.requests import require_rule
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.errors import OptionError, PluginError
from edgedec.plugins import RULES, TREE_SHAPES
from edgedec.scheduler import plugin_guard
from edgedec.verification.rules import rule_names
from edgedec_methods.drawn.drawn_trees import (
    CHAIN,
    DrawnLevel,
    DrawnShape,
    TreePlace,
    TreeShape,
    agreement,
    parse_shape,
)
from edgedec_methods.drawn.rules import find_rule, shape_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "rule-plugin"


@pytest.fixture
def drawfirst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example."""
    if not EXAMPLE.is_dir():
        pytest.skip("the examples are not beside the tests")
    monkeypatch.syspath_prepend(EXAMPLE)
    with_plugin(monkeypatch, tmp_path, RULES, "drawfirst", "edgedec_drawfirst:RULE")


@pytest.mark.slow
@pytest.mark.usefixtures("drawfirst")
@pytest.mark.parametrize(
    "check",
    [
        a_drawn_chain_keeps_the_distribution,
        nodes_that_were_looked_up_keep_the_distribution,
        drawn_and_looked_up_siblings_mix,
        where_a_path_ends_may_depend_on_its_tokens,
        supports_that_differ_keep_the_distribution,
        sampled_outcomes_fit_the_exact_ones,
        a_greedy_target_says_its_text_under_any_looked_up_draft,
        an_empty_draft_is_a_plain_draw,
    ],
)
def test_the_example_is_exact(check: Check) -> None:
    """Over all drafts and random numbers the text is the target's."""
    check("drawfirst")


@pytest.mark.slow
@pytest.mark.usefixtures("drawfirst")
def test_the_example_verifies_texts(tmp_path: Path) -> None:
    """A request names it; greedily it changes nothing; and its module is short enough to be a tutorial."""
    assert rule_names()[-1] == "drawfirst"
    with edgedec.load(tiny(tmp_path, 1), runtime="reference", n_ctx=256, draft="suffix") as engine:
        texts = [
            engine.generate("a cat, a cat, a ", max_tokens=12, temperature=0, verify=rule, ignore_end=True).token_ids
            for rule in ("coupled", "drawfirst")
        ]
        drawn = engine.generate("a cat, a cat, a ", max_tokens=12, temperature=0.1, seed=3, verify="drawfirst")
    assert texts[0] == texts[1]
    assert not any("failed" in reason for reason in drawn.stats.reasons)
    assert len((EXAMPLE / "edgedec_drawfirst.py").read_text(encoding="utf-8").splitlines()) < 40


def _one_child(level: DrawnLevel) -> list[TreePlace]:
    """Add one child, or as many as the name says, to each place."""
    found = []
    for place, law in level.laws:
        children: Callable[[], tuple[int, float]] = level.drawn(law, place).__next__
        for _ in range(min(level.widths[0], len(law.token_ids))):
            if level.nodes.n_left:
                token, chance = children()[0], agreement(law)
                found.append(place.behind(level.nodes.add(token, place.node, chance, law), token, chance))
    return found


COMB = DrawnShape(_one_child, siblings="without replacement", n_widths=1)
NONE = "no shape"


@pytest.mark.slow
def test_a_shape_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its numbers, fits the rules that take its draws, is verified exactly, and drafts texts."""
    with pytest.raises(OptionError, match="draft_tree"):
        parse_shape("comb:2")
    with_plugin(monkeypatch, tmp_path, TREE_SHAPES, "comb", f"{__name__}:COMB")
    assert parse_shape("comb:2") == TreeShape("comb", (2,))
    assert shape_for("recursive", TreeShape("comb", (2,)), trees=True, greedy=False) == (TreeShape("comb", (2,)), ())
    _, why = shape_for("kseq", TreeShape("comb", (2,)), trees=True, greedy=False)
    assert why == ("the shape comb:2 is not used under the rule kseq, where drafts are paths or chain",)
    check_drawn_tree("recursive", "comb:2", 3, 4, 0.0)
    drafter = DraftModel(loaded(tiny(tmp_path, 2)))
    options = {"runtime": "reference", "n_ctx": 256, "draft": drafter, "drafting": DraftOptions(tree="comb:2")}
    with edgedec.load(tiny(tmp_path, 1), **options) as engine:  # type: ignore[arg-type]
        made = engine.generate("a cat", max_tokens=8, temperature=1.0, seed=1, verify="recursive", ignore_end=True)
    assert made.stats.n_draft_tokens > 0


def test_what_is_no_rule_or_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the plug-in and what it is; a rule that nobody has is an option's error; `coupled` is ours."""
    with_plugin(monkeypatch, tmp_path, RULES, "coupled", f"{__name__}:NONE")
    assert (DraftOptions(tree="grow").tree, rule_names().count("coupled")) == ("grow", 1)
    with_plugin(monkeypatch, tmp_path, RULES, "empty", f"{__name__}:NONE")
    with_plugin(monkeypatch, tmp_path / "shapes", TREE_SHAPES, "empty", f"{__name__}:NONE")
    with pytest.raises(PluginError, match="the rule 'empty' is of the type str, not Rule"):
        find_rule("empty")
    with pytest.raises(PluginError, match="the tree shape 'empty' is of the type str, not DrawnShape"):
        parse_shape("empty")
    with pytest.raises(OptionError, match=r"coupled, tokenwise, .*empty"):
        require_rule("nobody")


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

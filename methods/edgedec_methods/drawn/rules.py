"""Rules that keep the distribution: what each of them declares, and how drafts are drawn that it verifies exactly."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from edgedec.draft import Draft, Draws, RowsAfter, Verification
from edgedec.errors import PluginError
from edgedec.sampling import Distribution, Noise, SamplingParams
from edgedec.sequence import COUPLED
from edgedec.verification import rules
from edgedec.verification.rules import TargetRow
from edgedec_methods.drawn import drawn_trees, rule_tools
from edgedec_methods.drawn.drawn_trees import (
    CHAIN,
    GROW,
    DrawnShape,
    Siblings,
    TreePlace,
    TreeShape,
    find_shape,
    installed,
    parse_shape,
)
from edgedec_methods.drawn.rule_tools import Uniform

_TREES = 0x547265654B657973  # sets the keys of trees apart from the numbers of chains
_MOST_DRAWN = 1024  # tokens of a q that is drawn from: it is kept until it was verified


Verify = Callable[[Draft, Sequence[Distribution | None], TargetRow, Uniform], Verification]
"""(draft, q, target, uniform) -> a path of the draft, root first, with its tokens and one more token, drawn from p.

    draft: What was proposed.
    q: The distribution that each node was drawn from, None for a node that was looked up.
    target: Gives p at a row.
    uniform: The random numbers of this step.

A pure function, which calls `target` at most once for a row. It raises PluginError where q does not fit the draft."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule, as an entry point of `edgedec.rules` names one.

    Attributes:
        verify: Verifies a draft. Over all drafts that a drafter may draw, and all random numbers, the text that follows
            must have the target's distribution.
        siblings: How the siblings of a drawn tree must be drawn, so that the rule is exact; None for a rule that only
            verifies chains.
        shape: The name of the shape that drafts have under this rule, unless the user names another one: "chain", or a
            plug-in (edgedec.plugins.TREE_SHAPES) with its numbers.
        on_chains: The name of the rule that does the same on a chain; None where no other rule does.
    """

    verify: Verify
    siblings: Siblings | None = None
    shape: str = CHAIN
    on_chains: str | None = None

    def verified(self, draft: Draft, target: TargetRow, noise: Noise, position: int) -> Verification:
        """Verify the draft of the step whose first new token is at `position` (raises what `verify` raises)."""
        q = draft.q if draft.q is not None else (None,) * len(draft)
        return self.verify(draft, q, target, rule_tools.uniform_source(noise, position))

    @staticmethod
    def drawing(name: str, tree: str | None, sampling: SamplingParams, *, trees: bool) -> "Drawing":
        """Return how the drafts of a generation are drawn; see edgedec.verification.rules.Rule."""
        wish, greedy = None if tree is None else parse_shape(tree), sampling.greedy
        shape, why = shape_for(name, wish, trees=trees, greedy=greedy)
        return Drawing(name, shape, None if greedy or name == COUPLED else cut(sampling), why)


def find_rule(name: str) -> Rule:
    """Return the rule of that name (PluginError: there is none, or it is none of these)."""
    rule = rules.find_rule(name)
    if not isinstance(rule, Rule):
        raise PluginError(f"the rule {name!r} is a {type(rule).__name__}, which says nothing of shapes; leave them out")
    return rule


def shape_for(rule: str, wish: TreeShape | None, *, trees: bool, greedy: bool) -> tuple[TreeShape, tuple[str, ...]]:
    """Return the shape of drafts that a rule verifies exactly, and a sentence where it is not what the options say.

    Args:
        rule: The rule of verification.
        wish: The shape that the user named, or None.
        trees: Whether trees may be verified.
        greedy: Whether tokens are drawn at temperature 0, where nothing is drawn and the coupled rule's shapes hold.

    Raises:
        PluginError: The rule is not installed, or the shape that the user named is not.
    """
    coupled = greedy or rule == COUPLED
    default = TreeShape() if coupled else parse_shape(find_rule(rule).shape)
    shape, why = default if wish is None else wish, ""
    if shape.kind not in (CHAIN, default.kind) and not _fits(rule, shape.kind, find_shape(shape.kind), coupled=coupled):
        fitting = [name for name, candidate in installed() if _fits(rule, name, candidate, coupled=coupled)]
        kinds = dict.fromkeys((default.kind, *fitting, CHAIN))
        by = "at temperature 0" if greedy else f"under the rule {rule}"
        shape, why = default, f"the shape {wish} is not used {by}, where drafts are {' or '.join(kinds)}"
    if shape.kind != CHAIN and not trees:
        shape, why = TreeShape(), f"drafts are chains instead of {shape}: this runtime verifies no trees exactly"
    return shape, (why,) if why else ()


def _fits(rule: str, kind: str, shape: DrawnShape, *, coupled: bool) -> bool:
    """Return whether a rule verifies trees of a shape exactly; the coupled one takes trees of most probable tokens."""
    return kind == GROW if coupled else find_rule(rule).siblings == shape.siblings


@dataclass(frozen=True, slots=True)
class Drawing:
    """Implements edgedec.draft.Drawing.

    Attributes:
        rule: The rule of verification.
        shape: The shape of drafts.
        params: What q is made with; None where drafts are the most probable tokens.
        why: A sentence where the shape is not what the options say.
    """

    rule: str
    shape: TreeShape
    params: SamplingParams | None
    why: tuple[str, ...] = ()

    @property
    def is_tree(self) -> bool:
        """Whether drafts are trees of a shape, and no chains."""
        return self.shape.kind != CHAIN

    def numbers(self, noise: Noise, label: int) -> "Numbers":
        """Return what draws the tokens of the drafter with this label."""
        return Numbers(self, noise, label)

    def notes(self, draws: Iterable[Draws]) -> list[str]:
        """Return sentences on what the rule and the shape do not do for drafters that draw so."""
        return [*self.why, *self._of_no_use({*draws})]

    def _of_no_use(self, draws: set[Draws]) -> list[str]:
        """Return what is of no use to these drafters; nothing where rule and shape both are."""
        rule, shape = self.rule, self.shape
        on_chains, rule_name = None if rule == COUPLED else find_rule(rule).on_chains, f"the rule {rule}"
        if rule != COUPLED and self.params is None:
            return [f"{rule_name} changes nothing at temperature 0: the most probable token is taken under every rule"]
        if Draws.UNKNOWN in draws:
            return []
        if Draws.SHAPES in draws:
            same = on_chains if shape.kind == CHAIN else None
            return [f"{rule_name} does what {same} does, as drafts are chains"] if same is not None else []
        who = "only a draft model with the target's tokenizer and a trained head make trees of a shape"
        if Draws.CHAINS in draws:
            if on_chains is not None:
                return [f"{rule_name} does what {on_chains} does: {who}, others a chain"]
        elif rule != COUPLED:
            return [
                f"{rule_name} gains nothing: all guesses are looked up, and none is drawn; only a draft model, a "
                "trained head and the model's own layers draw"
            ]
        return [] if shape.kind == CHAIN else [f"the shape {shape} has no effect: {who}"]


class Numbers:
    """Implements edgedec.draft.DraftNumbers: a number for each token, which was used for nothing else.

    That is what the rules are exact for: a node is drawn from its q given the nodes before it.
    """

    def __init__(self, drawing: Drawing, noise: Noise, label: int) -> None:
        self._shape, self._draws = drawing.shape, drawing.params is not None
        self._uniform = rule_tools.uniform_source(noise, label)
        self._keys = Noise(noise.key(label) ^ _TREES)
        self._n_drawn = 0

    def begin(self) -> None:
        """Start a text: the drawn numbers begin anew."""
        self._n_drawn = 0

    def draw(self, law: Distribution) -> tuple[int, float]:
        """Return a token that is drawn from q, and the chance that it is accepted."""
        token = rule_tools.sample(law, self._uniform(self._n_drawn))
        self._n_drawn += 1  # a position that is drafted again gets another number
        return token, drawn_trees.agreement(law)

    def tree(self, rows: RowsAfter, n_max: int, least_path: float, corrected: Callable[[float], float]) -> Draft:
        """Return a tree of the shape, drawn or of the most probable tokens."""
        if not self._draws:
            return drawn_trees.grow_ranked(rows, n_max, least_path, corrected)
        return drawn_trees.draw_tree(self._shape, rows, self._without_replacement, n_max, least_path)

    def _without_replacement(self, law: Distribution, place: TreePlace) -> Iterator[tuple[int, float]]:
        """Yield tokens drawn from q without replacement, by numbers that nothing else used, and their keys."""
        self._n_drawn += 1
        return drawn_trees.drawn_without_replacement(law, place, self._keys.key(self._n_drawn))


def cut(params: SamplingParams) -> SamplingParams:
    """Return the options that q is made with: the target's, with at most 1,024 tokens.

    The rules are exact for any q. The cut keeps q small, and took 0.0005 from an acceptance of 0.71 (Qwen2.5-Coder 0.5B
    for 1.5B, temperature 1, 98 tokens of prose and code).
    """
    return replace(params, top_k=min(params.top_k or _MOST_DRAWN, _MOST_DRAWN))

"""Growing trees: nodes are added wherever the path probability is above a threshold.

A tree is grown from a model's distributions level by level: all nodes of a level need one forward of the model. Which
nodes a level gets is a matter of the shape, a plug-in (edgedec.plugins.TREE_SHAPES); the one here, "grow", takes
drawn siblings or, under the coupled rule, the most probable tokens. Tokens are drawn without replacement by Gumbel
top-k (Kool et al. 2019, arXiv:1903.06059).

How many siblings a node gets, and whether it gets children, may depend on tokens that were drawn before, never on a
token that is still to be drawn: this is what the rules are exact for.

Paper: DySpec, Xiong et al. 2024, arXiv:2410.11744
Option: `--draft-option tree=grow`
For: draft models and heads whose second guesses are often right
Measured: 61.5 tokens/s with a head at temperature 1 under `coupled`, where a chain has 54.2 (`studies/drawn_trees`,
    program at 67b59fb8)
Status: study
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import Literal

import numpy as np

from edgedec import plugins
from edgedec.draft import Draft, RowsAfter
from edgedec.drafters.draft_builder import DraftBuilder
from edgedec.errors import OptionError, PluginError
from edgedec.sampling import Distribution, gumbel

CHAIN, GROW = "chain", "grow"
_MOST_WIDE = 64
_WIDE = 2  # branches of a shape that names no number
_MOST_SIBLINGS = 32  # of a node; a further one is hardly ever right


Siblings = Literal["independent", "without replacement"]
"""How the children of a node are drawn from its distribution: it decides which rules verify a tree exactly."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a drafter that evaluates a model branches.

    Attributes:
        kind: "chain": one token after the other, under the coupled rule with the next best tokens as leaves. Any other
            kind is a plug-in (edgedec.plugins.TREE_SHAPES).
        widths: The numbers behind a kind's name, such as that of paths, or of children by level; none for a kind that
            takes no number.
    """

    kind: str = CHAIN
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *(["-".join(map(str, self.widths))] if self.widths else [])])


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A place of the tree where tokens may be added: behind a node, or behind the text.

    Attributes:
        node: The node's index; -1 for the text.
        tokens: The drafted tokens up to the node.
        chance: The estimated chance that all of them are accepted.
        log_p: The logarithm of their probability under the drafter.
        key: log_p with noise, by which paths compete in a beam.
    """

    node: int = -1
    tokens: tuple[int, ...] = ()
    chance: float = 1.0
    log_p: float = 0.0
    key: float = 0.0

    def behind(self, node: int, token: int, chance: float, log_q: float = 0.0, key: float = 0.0) -> "TreePlace":
        """Return the place behind a node that was added here.

        Args:
            node: The node's index.
            token: The node's token.
            chance: The estimated chance that the node is accepted if this place is reached.
            log_q: The logarithm of the token's probability under the drafter, for shapes whose paths compete.
            key: The path's key, for the same.
        """
        return TreePlace(node, (*self.tokens, token), self.chance * chance, self.log_p + log_q, key)


Drawn = Callable[[Distribution, TreePlace], Iterator[tuple[int, float]]]
"""(q, place) -> tokens drawn from q without replacement, the first one drawn first, each with its key in a beam."""


def drawn_without_replacement(law: Distribution, place: TreePlace, key: int) -> Iterator[tuple[int, float]]:
    """Yield tokens by Gumbel top-k: the largest log q + noise first, each with its key.

    The keys are those of stochastic beam search: given that the largest key among a place's children is the key of the
    place itself. So they say nothing about the tokens that are still to come.

    Args:
        law: What is drawn from.
        place: Where the tokens follow.
        key: Of the noise; one that was used for nothing else.
    """
    keys = place.log_p + np.log(law.probs) + gumbel(key, law.token_ids)
    order = np.argsort(-keys)[:_MOST_SIBLINGS]
    most = keys[order[0]]
    with np.errstate(divide="ignore"):
        behind = place.key - keys[order] + np.log1p(-np.exp(keys[order] - most))
    lowered = place.key - np.maximum(behind, 0.0) - np.log1p(np.exp(-np.abs(behind)))
    yield from zip(law.token_ids[order].tolist(), lowered.tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class DrawnLevel:
    """A level of a tree that is being drawn.

    Attributes:
        nodes: The draft, to which nodes are added.
        laws: The places that may get children, each with the drafter's distribution there. Behind the text it is one.
        drawn: Draws from a distribution.
        depth: How many levels the tree has: 0 behind the text.
        widths: The numbers that the shape's name has.
        least: Places of a smaller chance get no children.
    """

    nodes: DraftBuilder
    laws: Sequence[tuple[TreePlace, Distribution]]
    drawn: Drawn
    depth: int
    widths: tuple[int, ...]
    least: float


@dataclass(frozen=True, slots=True)
class DrawnShape:
    """A shape of drawn trees, as an entry point `tree_shape.NAME` of `edgedec.rules` names one.

    Attributes:
        add: Adds the nodes of a level, as many as there is room for, and returns the places behind those that may get
            children.
        siblings: How the children of a node are drawn; a rule verifies the shapes that draw as it assumes.
        n_widths: How many numbers the shape's name may have, as "siblings:3-2" has two; 0 for none.
    """

    add: Callable[[DrawnLevel], Sequence[TreePlace]]
    siblings: Siblings
    n_widths: int = 0


def find_shape(kind: str) -> DrawnShape:
    """Return the shape of that name, which is not "chain".

    Raises:
        PluginError: No such shape is installed, it does not import, or it is no DrawnShape.
    """
    return plugins.load_of_type(plugins.TREE_SHAPES, kind, DrawnShape)


def installed() -> Iterator[tuple[str, DrawnShape]]:
    """Yield the shapes that are installed and work, by name."""
    for name in plugins.plugins(plugins.TREE_SHAPES):
        with suppress(PluginError):
            yield name, find_shape(name)


def parse_shape(text: object) -> TreeShape:
    """Return the shape that a text names, such as "grow" or, where these shapes are installed, "siblings:3-2".

    >>> parse_shape("siblings:3-2").widths
    (3, 2)

    Raises:
        OptionError: The text names no shape.
        PluginError: The shape does not import.
    """
    kind, colon, numbers = text.partition(":") if isinstance(text, str) else ("", "", "")
    is_known = plugins.is_installed(plugins.TREE_SHAPES, kind)
    n_widths = find_shape(kind).n_widths if is_known else 0
    parts = numbers.split("-") if colon else [str(_WIDE)] * min(n_widths, 1)
    holds = all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= _MOST_WIDE for part in parts)
    if not (is_known or kind == CHAIN) or not holds or len(parts) > n_widths:
        spellings = [name + ("", ":K", ":K-L")[min(shape.n_widths, 2)] for name, shape in installed()]
        expected = f"it must be one of {', '.join([CHAIN, *spellings])}, with numbers from 1 to {_MOST_WIDE}"
        raise OptionError("draft_tree", text, expected)
    return TreeShape(kind, tuple(map(int, parts)))


def draw_tree(
    shape: TreeShape,
    laws: RowsAfter,
    drawn: Drawn,
    n_max: int,
    least_path: float,
) -> Draft:
    """Return a drawn tree of at most `n_max` nodes, each with its q.

    Args:
        shape: Any shape but a chain.
        laws: Evaluates the drafter's model; called once a level.
        drawn: Draws.
        n_max: Most nodes.
        least_path: Places of a smaller chance get no children.
    """
    nodes, add = DraftBuilder(n_max), find_shape(shape.kind).add
    places, depth = [TreePlace()], 0
    while places and nodes.n_left:
        with_laws = zip(places, laws([place.tokens for place in places]), strict=True)
        with_law = [(place, law) for place, law in with_laws if law is not None]
        level = DrawnLevel(nodes, with_law, drawn, depth, shape.widths, least_path)
        places = [place for place in add(level) if place.chance >= least_path]
        depth += 1
    return nodes.build()


def least_grown(n_max: int) -> float:
    """Return the path probability above which a tree grows where no cost sets it: the share of one of the nodes."""
    return 0.5 / n_max


def _add_grown(level: DrawnLevel) -> list[TreePlace]:
    """Add children wherever the chance that one is reached is at least `least`, the greatest chance first.

    A child is reached when its place was and the siblings before it were rejected; it is taken to be accepted as
    often as the drafter draws it.
    """
    nodes, laws = level.nodes, level.laws
    least = max(level.least, least_grown(nodes.n_max))
    children, families = [], [level.drawn(law, place) for place, law in laws]
    left = [1.0] * len(laws)  # of each law, the mass that was not drawn yet
    waiting = [(-place.chance, family) for family, (place, _) in enumerate(laws)]
    waiting.sort()
    while waiting and nodes.n_left and -waiting[0][0] >= least:
        negative, family = heappop(waiting)
        place, law = laws[family]
        token = next(families[family], (None, -inf))[0]
        if token is None:
            continue
        mass = mass_of(law, token)
        share = min(1.0, mass / left[family])
        node = nodes.add(token, place.node, min(1.0, -negative * share / place.chance), law)
        children.append(replace(place.behind(node, token, 1.0), chance=-negative * share))
        left[family] -= mass
        if left[family] > 1e-9:
            heappush(waiting, (negative * (1 - share), family))
    return [place for place in children if place.chance >= least]


GROWN = DrawnShape(_add_grown, siblings="without replacement")


def agreement(q: Distribution) -> float:
    """Return an estimate of the sum of min(p, q), the chance that a token drawn from q is accepted, from q alone.

    It is (1 + sum of q^2) / 2. Where the log-probabilities of two models differ by about s, the distributions are about
    0.4 s (1 - sum of q^2) apart: the surer the drafter, the less room there is to differ. The estimate does not look at
    the token that was drawn, so what is decided by it is decided without looking at the node.

    >>> agreement(Distribution(np.array([3, 4]), np.array([0.5, 0.5])))
    0.75
    """
    return (1.0 + float(q.probs @ q.probs)) / 2


def mass_of(law: Distribution, token: int) -> float:
    """Return the probability of a token that the distribution holds."""
    return float(law.probs[np.searchsorted(law.token_ids, token)])


def grow_ranked(levels: RowsAfter, n_max: int, least_path: float, corrected: Callable[[float], float] = float) -> Draft:
    """Return a tree of at most `n_max` nodes of the most probable tokens, level by level.

    Nodes of at least the threshold get children; those of a third of it are leaves. Where a level has more nodes than
    there is room for, the most probable paths stay.

    Args:
        levels: Evaluates the drafter's model; called once a level.
        n_max: Most nodes.
        least_path: The path probability below which a node's forward does not pay; 0 for a threshold by `n_max`.
        corrected: P that the drafter gives to a token -> P by which the path probability goes.
    """
    nodes, least = DraftBuilder(n_max), max(least_path, least_grown(n_max))
    places = [TreePlace()]
    while places and nodes.n_left:
        ranked: list[tuple[float, int, TreePlace, int, float]] = []
        for place, level in zip(places, levels([place.tokens for place in places]), strict=True):
            if level is not None:
                for token, p in zip(level.tokens, level.p, strict=True):
                    ranked.append((place.chance * corrected(p), len(ranked), place, token, p))
        ranked.sort(key=lambda child: (-child[0], child[1]))
        places = []
        for chance, _, place, token, p in ranked[: nodes.n_left]:
            if chance < least / 3:
                break
            node = nodes.add(token, place.node, p)
            if chance >= least:
                places.append(TreePlace(node, (*place.tokens, token), chance))
    return nodes.build()

"""Growing trees from a model's distributions, level by level: all nodes of a level need one forward of the model.

Five ways, by edgedec.tree_shapes: independent paths (SpecTr, Sun et al. 2023, arXiv:2310.15141); siblings drawn without
replacement (RSD-C) and beams of them (RSD-S, both Jeon et al. 2024, arXiv:2402.14160); and growth where the path
probability is above a threshold (DySpec, Xiong et al. 2024, arXiv:2410.11744), of drawn siblings or of the most
probable tokens. Tokens are drawn without replacement by Gumbel top-k (Kool et al. 2019, arXiv:1903.06059).

How many siblings a node gets, and whether it gets children, may depend on tokens that were drawn before, never on a
token that is still to be drawn: this is what the rules are exact for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, merge
from itertools import islice
from math import inf, log

import numpy as np

from edgedec.draft import Draft
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.noise import gumbel
from edgedec.sampling import Distribution
from edgedec.tree_shapes import BEAM, GROW, PATHS, SIBLINGS, TreeShape

_MOST_SIBLINGS = 32  # of a node; a further one is hardly ever right


@dataclass(frozen=True, slots=True)
class Place:
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


LawsAfter = Callable[[Sequence[tuple[int, ...]]], Sequence[Distribution | None]]
"""Drafted paths, all of one length -> the drafter's distribution after each, one object for equal paths; None where
nothing can follow."""

LevelsAfter = Callable[[Sequence[tuple[int, ...]]], Sequence[Level | None]]
"""Drafted paths, all of one length -> the most probable tokens after each; None where nothing can follow."""

Drawn = Callable[[Distribution, Place], Iterator[tuple[int, float]]]
"""(q, place) -> tokens drawn from q without replacement, the first one drawn first, each with its key in a beam."""


def drawn_without_replacement(law: Distribution, place: Place, key: int) -> Iterator[tuple[int, float]]:
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


def draw_tree(
    shape: TreeShape, laws: LawsAfter, drawn: Drawn, n_max: int, least_path: float, agreement: Callable[..., float]
) -> Draft:
    """Return a drawn tree of at most `n_max` nodes, each with its q.

    Args:
        shape: Any shape but a chain.
        laws: Evaluates the drafter's model; called once a level.
        drawn: Draws.
        n_max: Most nodes.
        least_path: Places of a smaller chance get no children.
        agreement: q -> an estimate of the chance that a token drawn from it is accepted.
    """
    nodes = DraftBuilder(n_max)
    places, depth = [Place()] * (shape.widths[0] if shape.kind == PATHS else 1), 0
    add = {PATHS: _add_paths, SIBLINGS: _add_siblings, BEAM: _add_beam, GROW: _add_grown}[shape.kind]
    least = max(least_path, least_grown(n_max)) if shape.kind == GROW else least_path
    while places and nodes.n_left:
        known = [
            (place, law)
            for place, law in zip(places, laws([place.tokens for place in places]), strict=True)
            if law is not None
        ]
        width = shape.widths[min(depth, len(shape.widths) - 1)] if shape.widths else 0
        if shape.kind == SIBLINGS and depth >= len(shape.widths):
            width = 1
        places = [place for place in add(nodes, known, drawn, width, least, agreement) if place.chance >= least]
        depth += 1
    return nodes.build()


def least_grown(n_max: int) -> float:
    """Return the path probability above which a tree grows where no cost sets it: the share of one of the nodes."""
    return 0.5 / n_max


Known = Sequence[tuple[Place, Distribution]]


def _below(place: Place, node: int, token: int, p: float, log_q: float = 0.0, key: float = 0.0) -> Place:
    return Place(node, (*place.tokens, token), place.chance * p, place.log_p + log_q, key)


def _add_paths(
    nodes: DraftBuilder, known: Known, drawn: Drawn, width: int, least: float, agreement: Callable[..., float]
) -> list[Place]:
    """Add the next token of each path, a draw of its own."""
    found: list[Place] = []
    n_tried: dict[tuple[int, ...], int] = {}
    for place, law in known[: nodes.n_left]:
        token, _ = next(drawn(law, place))
        p, nth = agreement(law), n_tried.get(place.tokens, 0)
        n_tried[place.tokens] = nth + 1
        node = nodes.add(token, place.node, p * (1 - p) ** nth, law)
        found.append(_below(place, node, token, p))
    return found


def _add_siblings(
    nodes: DraftBuilder, known: Known, drawn: Drawn, width: int, least: float, agreement: Callable[..., float]
) -> list[Place]:
    """Add as many children to each place."""
    found = []
    for place, law in known:
        p = agreement(law)
        for nth, (token, _) in enumerate(islice(drawn(law, place), min(width, nodes.n_left))):
            chance = p * (1 - p) ** nth
            found.append(_below(place, nodes.add(token, place.node, chance, law), token, chance))
    return found


def _add_beam(
    nodes: DraftBuilder, known: Known, drawn: Drawn, width: int, least: float, agreement: Callable[..., float]
) -> list[Place]:
    """Add the children with the largest keys, of all places together."""

    def keyed(family: int) -> Iterator[tuple[float, int, int]]:
        place, law = known[family]
        for token, key in drawn(law, place):
            yield -key, family, token

    found, n_tried = [], [0] * len(known)
    for negative, family, token in islice(merge(*map(keyed, range(len(known)))), min(width, nodes.n_left)):
        place, law = known[family]
        p = agreement(law)
        chance = p * (1 - p) ** n_tried[family]
        n_tried[family] += 1
        node = nodes.add(token, place.node, chance, law)
        found.append(_below(place, node, token, chance, log(_mass(law, token)), -negative))
    return found


def _add_grown(
    nodes: DraftBuilder, known: Known, drawn: Drawn, width: int, least: float, agreement: Callable[..., float]
) -> list[Place]:
    """Add children wherever the chance that one is reached is at least `least`, the greatest chance first.

    A child is reached when its place was and the siblings before it were rejected; it is taken to be accepted as
    often as the drafter draws it.
    """
    found, families = [], [drawn(law, place) for place, law in known]
    left = [1.0] * len(known)  # of each law, the mass that was not drawn yet
    waiting = [(-place.chance, family) for family, (place, _) in enumerate(known)]
    waiting.sort()
    while waiting and nodes.n_left and -waiting[0][0] >= least:
        negative, family = heappop(waiting)
        place, law = known[family]
        token = next(families[family], (None, -inf))[0]
        if token is None:
            continue
        mass = _mass(law, token)
        share = min(1.0, mass / left[family])
        node = nodes.add(token, place.node, min(1.0, -negative * share / place.chance), law)
        found.append(replace(_below(place, node, token, 1.0), chance=-negative * share))
        left[family] -= mass
        if left[family] > 1e-9:
            heappush(waiting, (negative * (1 - share), family))
    return found


def _mass(law: Distribution, token: int) -> float:
    return float(law.probs[np.searchsorted(law.token_ids, token)])


def grow_ranked(
    levels: LevelsAfter, n_max: int, least_path: float, corrected: Callable[[float], float] = float
) -> Draft:
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
    places = [Place()]
    while places and nodes.n_left:
        found: list[tuple[float, int, Place, int, float]] = []
        for place, level in zip(places, levels([place.tokens for place in places]), strict=True):
            if level is not None:
                for token, p in zip(level.tokens, level.p, strict=True):
                    found.append((place.chance * corrected(p), len(found), place, token, p))
        found.sort(key=lambda child: (-child[0], child[1]))
        places = []
        for chance, _, place, token, p in found[: nodes.n_left]:
            if chance < least / 3:
                break
            node = nodes.add(token, place.node, p)
            if chance >= least:
                places.append(Place(node, (*place.tokens, token), chance))
    return nodes.build()

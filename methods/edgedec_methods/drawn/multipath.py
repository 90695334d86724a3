"""Block verification of paths (after GBV): one of several drawn paths is chosen, then verified as a block.

Block verification (Sun et al. 2024, arXiv:2403.10444) is exact for any path whose distribution is known, and so for
one that is chosen among K. Here the path is chosen node by node. Some of the tokens that p holds more often than q are
favoured: the first path with one of them is taken, or the first path of all where there is none. The favoured tokens
are those with the largest p / q, as many as make the distribution of the chosen token cover most of p at this node.
Paths that agree with the one taken remain candidates.

Ranking all tokens by p / q instead, and taking the path that is largest in the order of the ranks, was tried: it
accepts as many tokens where p and q are far apart, but fewer than one path alone where they are close.

Paper: after Greedy Multi-Path Block Verification, arXiv:2602.16961, which chooses the path in another way
Option: `--draft-option rule=multipath`
For: comparing rules that keep the distribution, not the text
Measured: 54.6 tokens/s with a head at temperature 1, where `coupled` has 54.2, or 61.5 with its trees
    (`studies/drawn_trees`, program at 67b59fb8)
Status: study
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec.verification.rules import TargetRow
from edgedec_methods.drawn.block import Drawn, verify_block, verify_path
from edgedec_methods.drawn.kseq import geometric, same, verify_kseq
from edgedec_methods.drawn.rule_tools import Uniform, children_of, in_turn, laws_of, probabilities
from edgedec_methods.drawn.rules import Rule


def verify_multipath(
    draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform
) -> Verification:
    """Choose one of the draft's paths by p / q, and verify it as a block with the distribution of the choice.

    The rule assumes that every node is a draw of its own, independent of its siblings: K paths side by side, not merged
    where they agree, with random numbers that no earlier step looked at. A chain is passed on to verify_block, and
    several paths with a node that was looked up to verify_kseq, which accepts more of them.

    `target` is called for the rows of the chosen path, up to the first token that p rules out; else it is as Verify.
    """
    if draft.is_chain:
        return verify_block(draft, q, target, uniform)
    if any(law is None for law in q):
        return verify_kseq(draft, q, target, uniform)
    return verify_path(draft, chosen_path(draft, laws_of(draft, q), target), target, in_turn(uniform))


def chosen_path(draft: Draft, laws: Sequence[Distribution], target: TargetRow) -> list[Drawn]:
    """Return the path to verify, each node with the distribution that its token was, in effect, drawn from."""
    children, tokens = children_of(draft), draft.tokens
    path: list[Drawn] = []
    row, weight, candidates = 0, 1.0, children[-1]
    while candidates and weight > 0:
        p, law = target(row, tuple(drawn.token for drawn in path)), laws[candidates[0]]
        candidates = [
            node for node in candidates if same(laws[node], law)
        ]  # nodes of another q would have no single law
        favoured, law = choice(p, law, weight, len(candidates))
        node = next((node for node in candidates if tokens[node] in favoured), candidates[0])
        path.append(Drawn(node, tokens[node], p, law, weight))
        standing = [other for other in candidates if tokens[other] == tokens[node]]
        candidates = [child for other in standing for child in children[other]]
        row, weight = node + 1, path[-1].weight_after
    return path


def choice(p: Distribution, q: Distribution, weight: float, k: int) -> tuple[frozenset[int], Distribution]:
    """Return the favoured tokens among k draws from q, and the distribution of the token that is then chosen.

    A favoured token is chosen with the probability q (1 + m + ... + m^(k - 1)), where m is the mass of q that is not
    favoured, and another token with q m^(k - 1). The favoured tokens are those with the largest p / q, as many as make
    the sum of min(weight p, that probability) largest. Where nothing is gained, all tokens are favoured, which leaves q
    as it is.
    """
    if k == 1:
        return frozenset(), q
    with np.errstate(over="ignore"):
        ratio = probabilities(p, q.token_ids) / q.probs
    order = np.argsort(ratio, kind="stable")
    missed = np.concatenate([[0.0], np.cumsum(q.probs[order])[:-1]])
    often, seldom = geometric(missed, k), missed ** (k - 1)
    best = int(np.argmax(_covered(weight * ratio[order], q.probs[order], often, seldom)))
    probs = q.probs * seldom[best]
    probs[order[best:]] = q.probs[order[best:]] * often[best]
    positive = probs > 0
    return frozenset(q.token_ids[order[best:]].tolist()), Distribution(q.token_ids[positive], probs[positive])


def _covered(
    ratio: NDArray[np.float64], q: NDArray[np.float64], often: NDArray[np.float64], seldom: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return f64[n]: for each place, the sum of q min(ratio, seldom) before it and of q min(ratio, often) from it on.

    Args:
        ratio: f64[n], ascending.
        q: f64[n], the tokens' masses.
        often: f64[n], the factor of the masses from each place on.
        seldom: f64[n], the factor of the masses before each place.
    """
    mass = np.concatenate([[0.0], np.cumsum(q)])
    capped = np.concatenate([[0.0], np.cumsum(q * ratio)])
    place = np.arange(len(q))
    low = np.minimum(np.searchsorted(ratio, seldom, "right"), place)
    high = np.maximum(np.searchsorted(ratio, often, "right"), place)
    below = capped[low] + seldom * (mass[place] - mass[low])
    above = capped[high] - capped[place] + often * (mass[-1] - mass[high])
    covered: NDArray[np.float64] = below + above
    return covered


RULE = Rule(verify_multipath, siblings="independent", shape="paths", on_chains="block")

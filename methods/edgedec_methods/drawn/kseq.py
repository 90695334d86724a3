"""K-SEQ: the next tokens of several independent paths are tested in order, each accepted as often as exactness allows.

It verifies the drafts that SpecTr draws: K paths side by side.

Paper: SpecTr, Sun et al. 2023, arXiv:2310.15141
Option: `--draft-option rule=kseq`
For: comparing rules that keep the distribution, not the text
Measured: 50.2 tokens/s with a head at temperature 1, where `coupled` has 54.2 (`studies/drawn_trees`, program at
    67b59fb8)
Status: study
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec.verification.rules import TargetRow
from edgedec_methods.drawn.rule_tools import (
    Uniform,
    in_turn,
    laws_of,
    probabilities,
    probability,
    rescaled,
    sample,
    walk,
)
from edgedec_methods.drawn.rules import Rule

_N_HALVINGS = 30


def verify_kseq(draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform) -> Verification:
    """Test k candidates in order: accept x with min(1, p(x) / (rho q(x))), rho as small as exactness allows.

    The rule assumes that every node is a draw of its own, independent of its siblings: K paths side by side, not merged
    where they agree. After an accepted prefix, the k candidates are the next nodes of the paths that begin with it.
    Candidates with equal q are tested together. The others, such as a node that was looked up, are tested in turn
    against the part of p that is left.

    `target` is called for the rows of the path; the rest is as of Verify.
    """
    laws, tokens, numbers = laws_of(draft, q), draft.tokens, in_turn(uniform)

    def draw_token(row: int, accepted: tuple[int, ...], candidates: Sequence[int]) -> int:
        p = target(row, accepted)
        for group in groups(candidates, laws):
            law, k = laws[group[0]], len(group)
            drawn = probabilities(law, p.token_ids)
            rho = strictness(p.probs, drawn, k)
            for node in group:
                token: int = tokens[node]
                if next(numbers) < probability(p, token) / (rho * probability(law, token)):
                    return token
            once = np.minimum(p.probs / rho, drawn)
            p = rescaled(p, np.maximum(p.probs - _n_tests(p.probs, drawn, k, rho) * once, 0.0))
        return sample(p, next(numbers))

    return walk(draft, draw_token)


def groups(candidates: Sequence[int], laws: Sequence[Distribution]) -> list[list[int]]:
    """Return the candidates grouped by the distribution they were drawn from, in the order of each one's first node."""
    parts: list[list[int]] = []
    for node in candidates:
        group = next((group for group in parts if same(laws[group[0]], laws[node])), None)
        if group is None:
            parts.append([node])
        else:
            group.append(node)
    return parts


def strictness(p: NDArray[np.float64], q: NDArray[np.float64], k: int) -> float:
    """Return rho: the least number from 1 to k by which p may be divided in the test, found by halving an interval.

    A token is accepted with the probability min(q, p / rho) times 1 + (1 - b) + ... + (1 - b)^(k - 1), where b is the
    chance that one test accepts. That is at most p as long as the sum is at most rho. The upper end of the interval,
    which is returned, fulfils this, so the rule is exact however few halvings there are.

    Args:
        p: f64[n], the target's probabilities of some tokens, among them all that p and q share.
        q: f64[n], the drafter's probabilities of the same tokens.
        k: How many candidates there are.
    """
    low, high = 1.0, float(k)
    if _n_tests(p, q, k, low) <= low:
        return low
    for _ in range(_N_HALVINGS):
        middle = (low + high) / 2
        if _n_tests(p, q, k, middle) <= middle:
            high = middle
        else:
            low = middle
    return high


def _n_tests(p: NDArray[np.float64], q: NDArray[np.float64], k: int, rho: float) -> float:
    """Return the mean number of the k tests that are made."""
    return float(geometric(1.0 - float(np.minimum(p / rho, q).sum()), k))


def same(first: Distribution, second: Distribution) -> bool:
    """Return whether two distributions hold the same tokens with the same probabilities."""
    return first is second or (
        np.array_equal(first.token_ids, second.token_ids) and np.array_equal(first.probs, second.probs)
    )


def geometric(ratio: NDArray[np.float64] | float, n: int) -> NDArray[np.float64]:
    """Return 1 + ratio + ... + ratio^(n - 1): the mean number of n tries that are made if each fails with `ratio`."""
    powers: NDArray[np.float64] = np.power.outer(np.asarray(ratio, np.float64), np.arange(n))
    return np.asarray(powers.sum(axis=-1))


RULE = Rule(verify_kseq, siblings="independent", shape="paths", on_chains="tokenwise")

"""The search for the half-layers that the target drafts best without.

The search begins with the whole model. Each half-layer is scored alone; then the one that costs least for its bytes is
left out, and the next, where a score that is older than the set is made anew before it counts (lazy greedy: Minoux
1978; Leskovec et al. 2007). SWIFT (Xia et al. 2024, arXiv:2410.06161) proposes whole sets at random and by Bayesian
optimisation, which takes hundreds of evaluations.

The search counts tokens, never seconds, and every number is the runtime's: a search that its limit did not end finds
the same set again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from edgedec.gguf.layer_bytes import LayerBytes
from edgedec.model import LayerSet
from edgedec_apps.evaluation.layer_judge import Judge, Trace
from edgedec_apps.evaluation.layer_score import Score
from edgedec_runtimes.layer_skip.layer_sets import Half, without

_FIRST_ROWS = 28  # rows of each window that half-layers are scored on alone
_LEAST_WORTH = 0.005  # share of a token's bytes: a half-layer that saves less is not looked at


def late_layers(n_layer: int, n_out: int) -> LayerSet:
    """Return the set that leaves out the `n_out` layers before the last."""
    out = range(max(1, n_layer - 1 - n_out), n_layer - 1)
    return without(n_layer, [(layer, half) for layer in out for half in (0, 1)])


def first_layers(n_layer: int, n_run: int) -> LayerSet:
    """Return the set of the first `n_run` layers: an early exit."""
    return LayerSet.of(n_layer, range(min(max(1, n_run), n_layer)))


def n_searched(n_bytes: int) -> int:
    """Return on how many tokens a model is searched by the bytes that a token reads: on more for smaller models.

    >>> n_searched(980_000_000), n_searched(400_000_000), n_searched(100_000_000)
    (128, 192, 256)
    """
    return 256 if n_bytes < 200_000_000 else 192 if n_bytes < 600_000_000 else 128


@dataclass(frozen=True, slots=True)
class FoundSet:
    """What a search found.

    Attributes:
        score: The set's score on the text that was searched on.
        n_scored: How many sets were scored.
        ended: Whether the limit ended the search before its effort was spent.
    """

    layers: LayerSet
    score: Score
    n_scored: int
    ended: bool


@dataclass(slots=True)
class _Search:
    """A search under way.

    Attributes:
        judge: Scores sets.
        sizes: Bytes of each half-layer.
        on_scored: Called with the number of sets scored.
        out: The half-layers that are left out.
        prices: By half-layer that runs and may be left out, the KL divergence that leaving it out adds for each byte
            that it saves, as scored last.
        n_scored: Sets scored so far.
    """

    judge: Judge
    sizes: LayerBytes
    on_scored: Callable[[int], None]
    out: list[Half] = field(default_factory=list)
    prices: dict[Half, float] = field(default_factory=dict)
    n_scored: int = 0

    def set_without(self, half: Half) -> LayerSet:
        """Return the set that leaves out one more half-layer."""
        return without(self.sizes.n_layer, [*self.out, half])

    def look(self, half: Half, base: Trace, n_rows: int | None = None) -> None:
        """Score the set that leaves out one more half-layer, and note the half-layer's price.

        Args:
            half: The half-layer.
            base: The set as it is.
            n_rows: Compare only so many rows of each window; None for all.
        """
        self.n_scored += 1
        score = self.judge.score(self.set_without(half), base, n_rows)
        self.on_scored(self.n_scored)
        self.prices[half] = (score.kl - base.score.kl) / float(self.sizes.halves[half])

    def cheapest(self, halves: Iterable[Half]) -> Half:
        """Return the half-layer of the lowest price; of equal ones the first."""
        return min(halves, key=lambda half: (self.prices[half], half))


def rate(score: Score, share: float) -> float:
    """Return the tokens per whole forward that drafts of one token would give if reading bytes took all the time.

    A drawn token is accepted with the overlap's chance, and a greedy one about as often; the overlap is steadier.

    Args:
        score: The drafting set's.
        share: The share of a whole token's bytes that a token through the set reads.

    >>> round(rate(Score(0.9, 0.8, 0.1, 100), 0.8), 3)
    1.0
    """
    return (1 + score.overlap) / (1 + share)


def search(
    judge: Judge,
    sizes: LayerBytes,
    *,
    n_anew: int = 2,
    least_saved: float = 0.2,
    is_over: Callable[[], bool] = lambda: False,
    on_scored: Callable[[int], None] = lambda n_scored: None,
) -> FoundSet:
    """Search for the set that drafts best among those that leave out at least some share of a token's bytes.

    Args:
        judge: Scores sets.
        sizes: Bytes of each half-layer.
        n_anew: Most half-layers that are scored anew before one of them is left out.
        least_saved: The least share of a token's bytes that the set leaves out, as far as half-layers can be left out.
        is_over: Called now and then: whether to end with what was found so far.
        on_scored: Called with the number of sets scored.

    Raises:
        EdgedecError: As Session.forward, and what the judge's check raises.
    """
    state = _Search(judge, sizes, on_scored)
    base = judge.trace(without(sizes.n_layer, ()))
    for half in [(layer, i) for layer in range(1, sizes.n_layer - 1) for i in (0, 1)]:
        if sizes.halves[half] < _LEAST_WORTH * sizes.total:
            continue
        if is_over():
            break
        state.look(half, base, _FIRST_ROWS)
    while state.prices:
        next_half = _next(state, base, n_anew, is_over)
        if next_half is None:
            break
        following = judge.trace(state.set_without(next_half), base)
        if not _pays(sizes, base, following, least_saved):
            break
        state.out.append(next_half)
        del state.prices[next_half]
        base = following
    return FoundSet(base.layers, base.score, state.n_scored, is_over())


def _next(state: _Search, base: Trace, n_anew: int, is_over: Callable[[], bool]) -> Half | None:
    """Return the half-layer of the lowest price, at most `n_anew` prices made anew; None when the search is over."""
    anew: list[Half] = []
    while len(anew) < n_anew:
        best = state.cheapest(state.prices)
        if best in anew:
            return best
        if is_over():
            return None
        state.look(best, base)
        anew.append(best)
    return state.cheapest(anew)


def _pays(sizes: LayerBytes, base: Trace, following: Trace, least_saved: float) -> bool:
    """Return whether to go on to a set: as long as too little is saved, then while half of a saving is really won."""
    share, next_share = sizes.share(base.layers), sizes.share(following.layers)
    if share > 1 - least_saved:
        return True
    for_nothing = rate(base.score, next_share)  # what the set would give if it cost no agreement
    return rate(following.score, next_share) >= (rate(base.score, share) + for_nothing) / 2

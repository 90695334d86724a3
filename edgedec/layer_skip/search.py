"""The search for the half-layers that the target drafts best without.

A set is scored on a text that is given to the model (SWIFT, Xia et al. 2024, arXiv:2410.06161, scores on what was
generated last): how far its distributions are from the whole model's, position by position. For drafting each position
is a draft's first token: what stands before it has the whole model's keys and values, as the verification of earlier
drafts left them. The search begins with the whole model. Each half-layer is scored alone; then the one that costs least
for its bytes goes, and the next, where a score that is older than the set is made anew before it counts (lazy greedy:
Minoux 1978; Leskovec et al. 2007). SWIFT proposes whole sets at random and by Bayesian optimisation, which takes
hundreds of evaluations.

A forward for a set goes on from the hidden states that it shares with the set before: those before the first layer in
which the two differ. All of it counts in tokens, never in seconds, and every number is the runtime's: a search that was
not ended by its limit finds the same set again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.layer_skip.layer_sets import Half, LayerBytes, without
from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, ForwardItem, LayerSet, Session

_ROWS = 64  # of a forward
SKIPPED_ROWS = 8
"""Rows at a window's start that count for nothing, as they have next to no context."""

_TOP = 64  # most probable tokens of the whole model that a distance looks at, and the rest as one
_FLOOR = 1e-12
_FIRST_ROWS = 28  # of each window that half-layers are scored on alone
_LEAST_WORTH = 0.005  # of a token's bytes: what saves less is not worth a look


@dataclass(frozen=True, slots=True)
class Score:
    """How near a set is to the whole model.

    Attributes:
        agreement: Share of the positions where both take the same token for the most probable one.
        overlap: Mean of the sum of min(p, q), the chance that a token drawn from q is accepted.
        kl: Mean of KL(p || q) in nats, over the whole model's 64 most probable tokens and the rest as one.
        n_positions: How many positions.
    """

    agreement: float
    overlap: float
    kl: float
    n_positions: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A set's way through the windows.

    Attributes:
        layers: The set.
        score: How near it is.
        hidden: For each window f32[n_layer, n, n_embd], the hidden states after each layer (for drafts: of the rows
            that count).
    """

    layers: LayerSet
    score: Score
    hidden: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """How rows go through a set: from layer `first` on, behind the states of one that begins alike; what is tapped."""

    layers: LayerSet | None
    shared: Trace | None = None
    first: int = 0
    taps: tuple[int, ...] = ()

    def begun(self, index: int) -> NDArray[np.float32] | None:
        """Return f32[n, n_embd], the states of a window's rows before the first layer; None for its tokens."""
        return None if self.shared is None or self.first == 0 else self.shared.hidden[index][self.first - 1]


@dataclass(frozen=True, slots=True)
class _Top:
    """The whole model's most probable tokens after a position: the first, int64[k] ids in order, and their f64[k] p."""

    best: int
    ids: NDArray[np.int64]
    p: NDArray[np.float64]


class Judge:
    """Scores sets against the whole model on windows of a text.

    Args:
        session: Of the model; what it holds is dropped.
        windows: int32[n] each, with more than 8 tokens; the first 8 rows of each count for nothing.
        check: Called before every forward; may raise.
        as_drafts: Each row reads the keys and values that the whole model wrote for the tokens before it, and its own:
            what a draft's first token does. Otherwise all rows of a window go through the set, as where nothing
            verifies (--layer-skip), and read what it wrote.

    Attributes:
        n_tokens: Tokens of all windows.
        spent: Evaluated so far, in tokens through the whole model: a forward that goes on from half-way costs half.

    Raises:
        CapabilityError: The runtime can't leave out layers, tap them, go on from hidden states, or (for drafts) fork.
    """

    def __init__(
        self,
        session: Session,
        windows: Sequence[NDArray[np.int32]],
        check: Callable[[], None] = lambda: None,
        *,
        as_drafts: bool = False,
    ) -> None:
        model = session.model
        for name in ("layers", "taps", "hidden_input", *(["fork"] if as_drafts else [])):
            model.capabilities.require(name, model.card.runtime)
        self._session = session
        self._windows = windows
        self._check = check
        self._n_layer = model.card.n_layer
        self._n_rows = min(_ROWS, model.capabilities.max_rows)
        self.n_tokens = sum(len(window) for window in windows)
        self.spent = 0.0
        self._tops: list[list[_Top]] = []
        self._held: list[Session] = []  # for drafts: each window as the whole model holds it
        self._running: Session | None = None  # one of those in a forward over forks
        for index in range(len(windows)):
            self._tops.append(list(self._whole(index)))
            if as_drafts:
                self._held.append(session.fork())

    def close(self) -> None:
        """Free what the whole model holds of the windows; the session stays open."""
        for held in self._held:
            held.close()

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        running = self._running
        if running is not None:
            running.cancel()

    def _whole(self, index: int) -> Iterator[_Top]:
        for start, forward in self._chain(index, len(self._windows[index]), _Way(None)):
            for i, row in enumerate(forward.logits):
                if start + i >= SKIPPED_ROWS:
                    yield _top_of(row, forward.ops)

    def score(self, layers: LayerSet, shared: Trace | None = None, n_rows: int | None = None) -> Score:
        """Return how near a set is.

        Args:
            layers: The set.
            shared: The way of one that begins alike, of which that beginning is used.
            n_rows: Look only at so many of those rows of each window that count.
        """
        first = 0 if shared is None else _first_difference(layers, shared.layers)
        way, found = _Way(layers, shared, first), _Sums()
        for index, window in enumerate(self._windows):
            n = len(window) if n_rows is None else min(len(window), SKIPPED_ROWS + n_rows)
            self._compare(index, self._forwards(index, n, way), found)
        return found.score()

    def trace(self, layers: LayerSet, shared: Trace | None = None) -> Trace:
        """Return a set's score with the hidden states on its way; the arguments are those of score()."""
        first = 0 if shared is None else _first_difference(layers, shared.layers)
        way = _Way(layers, shared, first, tuple(range(first, self._n_layer)))
        found, hidden = _Sums(), []
        for index, window in enumerate(self._windows):
            states = np.zeros((self._n_layer, len(window), self._session.model.card.n_embd), np.float32)
            if shared is not None:
                states[:first] = shared.hidden[index][:first]

            def noted(
                index: int = index, n: int = len(window), states: NDArray[np.float32] = states
            ) -> Iterator[tuple[int, Forward]]:
                for start, forward in self._forwards(index, n, way):
                    for layer in way.taps:
                        states[layer, start : start + len(forward.hidden[layer])] = forward.hidden[layer]
                    yield start, forward

            self._compare(index, noted(), found)
            hidden.append(states)
        return Trace(layers, found.score(), tuple(hidden))

    def _compare(self, index: int, forwards: Iterator[tuple[int, Forward]], into: "_Sums") -> None:
        tops = self._tops[index]
        for start, forward in forwards:
            for i, row in enumerate(forward.logits):
                if start + i >= SKIPPED_ROWS:
                    into.add(tops[start + i - SKIPPED_ROWS], row, forward.ops)

    def _forwards(self, index: int, n: int, way: _Way) -> Iterator[tuple[int, Forward]]:
        """Yield the forwards of a window's first n rows, each with its first row."""
        return self._drafts(index, n, way) if self._held else self._chain(index, n, way)

    def _chain(self, index: int, n: int, way: _Way) -> Iterator[tuple[int, Forward]]:
        """Yield the forwards of a window, some rows at a time."""
        window, hidden = self._windows[index], way.begun(index)
        for start, stop in self._parts(0, n, way.first):
            yield (
                start,
                self._session.forward(
                    window[start:stop] if hidden is None else None,
                    n_past=start,
                    hidden=None if hidden is None else hidden[start:stop],
                    resume_after=None if hidden is None else way.first - 1,
                    layers=way.layers,
                    rows="all",
                    taps=way.taps,
                ),
            )

    def _drafts(self, index: int, n: int, way: _Way) -> Iterator[tuple[int, Forward]]:
        """Yield a forward for each row that counts: one in a session of its own, in company of others'."""
        window, held, hidden = self._windows[index], self._held[index], way.begun(index)
        for start, stop in self._parts(SKIPPED_ROWS, n, way.first):
            with ExitStack() as stack:
                items = [
                    ForwardItem(
                        stack.enter_context(closing(held.fork())),
                        n_past=row,
                        tokens=window[row : row + 1] if hidden is None else None,
                        hidden=None if hidden is None else hidden[row : row + 1],
                        resume_after=None if hidden is None else way.first - 1,
                        layers=way.layers,
                        taps=way.taps,
                    )
                    for row in range(start, stop)
                ]
                self._running = items[0].session
                try:
                    forwards = self._session.model.forward(items)
                finally:
                    self._running = None
                yield from enumerate(forwards, start)

    def _parts(self, start: int, stop: int, first: int) -> Iterator[tuple[int, int]]:
        """Cut rows into those of a forward each, and count what they cost from a layer on."""
        for begin in range(start, stop, self._n_rows):
            self._check()
            end = min(begin + self._n_rows, stop)
            self.spent += (end - begin) * (1 - first / self._n_layer)
            yield begin, end


@dataclass(slots=True)
class _Sums:
    """Sums over positions."""

    n: int = 0
    same: int = 0
    overlap: float = 0.0
    kl: float = 0.0

    def add(self, top: _Top, row: NDArray[np.float32], ops: LogitOps) -> None:
        """Compare a row of logits with the whole model's."""
        total = ops.total(row)
        q = np.exp(row[top.ids].astype(np.float64) - total.most) / total.weight
        rest_p, rest_q = max(0.0, 1 - float(top.p.sum())), max(0.0, 1 - float(q.sum()))
        self.n += 1
        self.same += ops.argmax(row) == top.best
        self.overlap += float(np.minimum(top.p, q).sum()) + min(rest_p, rest_q)
        self.kl += float((top.p * np.log(np.maximum(top.p, _FLOOR) / np.maximum(q, _FLOOR))).sum())
        self.kl += rest_p * float(np.log(max(rest_p, _FLOOR) / max(rest_q, _FLOOR)))

    def score(self) -> Score:
        """Return the means."""
        n = max(1, self.n)
        return Score(self.same / n, self.overlap / n, self.kl / n, self.n)


def _top_of(row: NDArray[np.float32], ops: LogitOps) -> _Top:
    ids = ops.top_k(row, min(_TOP, len(row)))
    total = ops.total(row)
    return _Top(ops.argmax(row), ids, np.exp(row[ids].astype(np.float64) - total.most) / total.weight)


def _first_difference(some: LayerSet, other: LayerSet) -> int:
    """Return the first layer in which two sets differ."""
    differ = (some.attn != other.attn) | (some.mlp != other.mlp)
    return int(differ.argmax()) if differ.any() else len(differ)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is evaluated.

    Attributes:
        n_tokens: Of the text that sets are scored on.
        n_anew: Most half-layers that are scored anew before one of them goes.
    """

    n_tokens: int = 128
    n_anew: int = 2


def effort_for(n_bytes: int) -> Effort:
    """Return the effort for a model by the bytes that a token reads: more text for smaller ones.

    >>> effort_for(980_000_000), effort_for(100_000_000)
    (Effort(n_tokens=128, n_anew=2), Effort(n_tokens=256, n_anew=2))
    """
    if n_bytes < 200_000_000:
        return Effort(256)
    if n_bytes < 600_000_000:
        return Effort(192)
    return Effort()


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        layers: The set.
        score: Of it, on the text that was searched on.
        n_scored: Sets that were scored.
        ended: Whether the limit ended the search before its effort was spent.
    """

    layers: LayerSet
    score: Score
    n_scored: int
    ended: bool


@dataclass(slots=True)
class _Search:
    """A search under way: what is left out, and how the others looked when they were scored last."""

    judge: Judge
    sizes: LayerBytes
    effort: Effort
    is_over: Callable[[], bool]
    on_scored: Callable[[int], None]
    out: list[Half] = field(default_factory=list)
    looks: dict[Half, float] = field(default_factory=dict)  # what each half-layer costs: KL per byte, lower is better
    n_scored: int = 0

    @property
    def by_looks(self) -> list[Half]:
        """The half-layers that run and may go, those that cost least first."""
        return sorted(self.looks, key=lambda half: (self.looks[half], half))

    def set_without(self, halves: Sequence[Half]) -> LayerSet:
        """Return the set of all but these."""
        return without(self.sizes.n_layer, halves)

    def scored(self, halves: Sequence[Half], shared: Trace, n_rows: int | None = None) -> Score:
        """Score the set of all but these."""
        self.n_scored += 1
        score = self.judge.score(self.set_without(halves), shared, n_rows)
        self.on_scored(self.n_scored)
        return score

    def price(self, half: Half, score: Score, base: Trace) -> float:
        """Return what leaving out a half-layer adds to the distance for each byte that it saves."""
        return (score.kl - base.score.kl) / float(self.sizes.halves[half])


def rate(score: Score, share: float) -> float:
    """Return the tokens per whole forward that drafts of one token would give, were bytes all that takes time.

    A token that is drawn is accepted with the overlap's chance, a greedy one about as often; the overlap is steadier.

    >>> round(rate(Score(0.9, 0.8, 0.1, 100), 0.8), 3)
    1.0
    """
    return (1 + score.overlap) / (1 + share)


def search(
    judge: Judge,
    sizes: LayerBytes,
    *,
    effort: Effort,
    least_saved: float = 0.2,
    is_over: Callable[[], bool] = lambda: False,
    on_scored: Callable[[int], None] = lambda n_scored: None,
) -> Found:
    """Search for the set that drafts best among those that leave out at least some share of a token's bytes.

    Args:
        judge: Scores sets.
        sizes: Bytes of each half-layer.
        effort: How much is evaluated.
        least_saved: Share of the bytes of a token that the set leaves out at least, as far as there are so many.
        is_over: Asked now and then whether to end with what was found so far.
        on_scored: Told how many sets were scored.

    Raises:
        EdgedecError: As Session.forward, and what the judge's check raises.
    """
    state = _Search(judge, sizes, effort, is_over, on_scored)
    base = judge.trace(state.set_without(()))
    for half in [(layer, i) for layer in range(1, sizes.n_layer - 1) for i in (0, 1)]:
        if sizes.halves[half] < _LEAST_WORTH * sizes.total:
            continue
        if is_over():
            break
        state.looks[half] = state.price(half, state.scored([half], base, _FIRST_ROWS), base)
    base = _leave_out(state, base, least_saved)
    return Found(base.layers, base.score, state.n_scored, is_over())


def _leave_out(state: _Search, base: Trace, least_saved: float) -> Trace:
    """Leave out one half-layer after the other: until enough is saved, then while half of a saving is really won."""
    while state.looks:
        half = _next(state, base)
        if half is None:
            break
        following = state.judge.trace(state.set_without([*state.out, half]), base)
        share, next_share = state.sizes.share(base.layers), state.sizes.share(following.layers)
        if share <= 1 - least_saved:
            for_nothing = rate(base.score, next_share)  # had leaving it out cost no agreement
            if rate(following.score, next_share) < (rate(base.score, share) + for_nothing) / 2:
                break
        state.out.append(half)
        del state.looks[half]
        base = following
    return base


def _next(state: _Search, base: Trace) -> Half | None:
    """Return the half-layer that costs least beside those left out already, None when it is over."""
    anew: list[Half] = []
    while len(anew) < state.effort.n_anew:
        best = state.by_looks[0]
        if best in anew:
            return best
        if state.is_over():
            return None
        state.looks[best] = state.price(best, state.scored([*state.out, best], base), base)
        anew.append(best)
    return min(anew, key=lambda half: (state.looks[half], half))

"""Scores sets of half-layers: how near each comes to the whole model on windows of a text.

A set is scored on a text that is given to the model (SWIFT, Xia et al. 2024, arXiv:2410.06161, scores on the text that
was generated last): how far its distributions are from the whole model's, position by position. For drafting, each
position is a draft's first token: the tokens before it have the whole model's keys and values, as the verification of
earlier drafts left them.

A forward for a set goes on from the hidden states that the set shares with an earlier one: those before the first layer
in which the two differ.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Forward, ForwardItem, LayerSet, RowGroup, Session, Span
from edgedec_apps.evaluation.layer_score import Score, ScoreSums, Top

SKIPPED_ROWS = 8
"""Rows at a window's start that are not compared, as they have next to no context."""

_ROWS = 64  # most rows of a forward


@dataclass(frozen=True, slots=True)
class Trace:
    """What the windows gave when they went through a set.

    Attributes:
        score: How near the set is to the whole model.
        hidden: For each window f32[n_layer, n, n_embd], the hidden states after each layer (where sets are scored as
            drafts: of the rows that are compared, and 0 elsewhere); nothing where the states were not requested.
    """

    layers: LayerSet
    score: Score
    hidden: tuple[NDArray[np.float32], ...] = ()


@dataclass(frozen=True, slots=True)
class _Way:
    """How the rows of a window go through a set.

    Attributes:
        layers: The set; None for the whole model.
        before: f32[n, n_embd], the hidden states before the first layer that is evaluated; None for the tokens.
        first: The first layer that is evaluated.
        taps: Layers whose hidden states are requested.
    """

    layers: LayerSet | None = None
    before: NDArray[np.float32] | None = None
    first: int = 0
    taps: tuple[int, ...] = ()

    def item(self, session: Session, window: NDArray[np.int32], start: int, stop: int) -> ForwardItem:
        """Return a forward of these rows of a window, of which the session holds the rows before."""
        part, span = slice(start, stop), Span(self.first, None, self.layers)
        if self.before is None:
            group = RowGroup(window[part], span=span)
        else:
            group = RowGroup(vectors=self.before[part], span=span)
        return ForwardItem(session, start, (group,), "all", self.taps)


class Judge:
    """Scores sets against the whole model on windows of a text.

    Args:
        session: The model's; what it holds is dropped.
        windows: int32[n] each, with more than 8 tokens; the first 8 rows of each are not compared.
        check: Called before every forward; may raise.
        as_drafts: Whether each row alone goes through the set, and reads the keys and values that the whole model wrote
            for the tokens before it: what a draft's first token does. Otherwise all rows of a window go through the
            set, and read what it wrote, as where nothing is verified (--method layer-skip).

    Attributes:
        n_tokens: Tokens of all windows.
        spent: Evaluated so far, in tokens through the whole model: a forward that begins half-way costs half.

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
        self._tops: list[list[Top]] = []
        self._held: list[Session] = []  # for drafts: each window as the whole model holds it
        self._running: Session | None = None  # one of those in the forward that is running
        for window in windows:
            forwards = self._forwards(window, len(window), _Way(), None)
            self._tops.append(
                [Top.of(row, forward.ops) for start, forward in forwards for row in _compared(start, forward)]
            )
            if as_drafts:
                self._held.append(session.fork())

    def close(self) -> None:
        """Free the sessions that hold the windows; the session that was given stays open."""
        for held in self._held:
            held.close()

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        running = self._running
        if running is not None:
            running.cancel()

    def score(self, layers: LayerSet, shared: Trace | None = None, n_rows: int | None = None) -> Score:
        """Return how near a set is to the whole model.

        Args:
            layers: The set.
            shared: The trace of a set that begins alike; its hidden states take the place of that beginning.
            n_rows: Compare only so many rows of each window; None for all.
        """
        return self._judged(layers, shared, n_rows, traced=False).score

    def trace(self, layers: LayerSet, shared: Trace | None = None) -> Trace:
        """Return a set's score with the hidden states after each layer; the arguments are those of score()."""
        return self._judged(layers, shared, None, traced=True)

    def _judged(self, layers: LayerSet, shared: Trace | None, n_rows: int | None, *, traced: bool) -> Trace:
        """Return a set's trace, with hidden states only where it is `traced`."""
        first = 0 if shared is None else _first_difference(layers, shared.layers)
        taps = tuple(range(first, self._n_layer)) if traced else ()
        sums, hidden = ScoreSums(), list[NDArray[np.float32]]()
        for index, window in enumerate(self._windows):
            n = len(window) if n_rows is None else min(len(window), SKIPPED_ROWS + n_rows)
            shared_hidden = None if shared is None or first == 0 else shared.hidden[index][:first]
            way = _Way(layers, None if shared_hidden is None else shared_hidden[-1], first, taps)
            if traced:
                hidden.append(np.zeros((self._n_layer, n, self._session.model.card.n_embd), np.float32))
                if shared_hidden is not None:
                    hidden[-1][:first] = shared_hidden
            tops = iter(self._tops[index])
            for start, forward in self._forwards(window, n, way, self._held[index] if self._held else None):
                for layer in taps:
                    hidden[-1][layer, start : start + len(forward.hidden[layer])] = forward.hidden[layer]
                for row in _compared(start, forward):
                    sums.add(next(tops), row, forward.ops)
        return Trace(layers, sums.score(), tuple(hidden))

    def _forwards(
        self, window: NDArray[np.int32], n: int, way: _Way, held: Session | None
    ) -> Iterator[tuple[int, Forward]]:
        """Yield the forwards of a window's first n rows, each with the place of its first row.

        Args:
            window: int32[n] or longer.
            n: How many of its rows are evaluated.
            way: How they go through the set.
            held: The window as the whole model holds it: each row that is compared is then a forward in a fork of this
                session, in company of others. None where all rows go through the set in the judge's own session.
        """
        for start in range(0 if held is None else SKIPPED_ROWS, n, self._n_rows):
            self._check()
            stop = min(start + self._n_rows, n)
            self.spent += (stop - start) * (1 - way.first / self._n_layer)
            with ExitStack() as stack:
                if held is None:
                    items = [way.item(self._session, window, start, stop)]
                else:
                    forks = [stack.enter_context(closing(held.fork())) for _ in range(start, stop)]
                    items = [way.item(fork, window, row, row + 1) for row, fork in enumerate(forks, start)]
                self._running = items[0].session
                try:
                    forwards = self._session.model.forward(items)
                finally:
                    self._running = None
                yield from enumerate(forwards, start)


def _compared(start: int, forward: Forward) -> NDArray[np.float32]:
    """Return the rows of logits that are compared, of a forward that begins with that row of a window."""
    return forward.logits[max(0, SKIPPED_ROWS - start) :]


def _first_difference(some: LayerSet, other: LayerSet) -> int:
    """Return the first layer in which two sets differ."""
    differ = (some.attn != other.attn) | (some.mlp != other.mlp)
    return int(differ.argmax()) if differ.any() else len(differ)

"""Padded steps: forwards have a least number of rows, so that the rows of drafts have the bits of steps without one.

A library's kernels for one row and for several often add up in another order, while those for 2 to 4 rows, say, agree
among themselves: they are one kernel. A model that pads every shorter forward to the least number of rows of such a
class writes texts in which drafts change no bit. Its text is another one than that of unpadded steps, in near-ties, and
it is the same with and without drafts. What the padding costs is measured like any other forward, as every step has it.

Paper: none; kernels of libraries for one row and for several add up in another order
Option: `--draft-option numerics=padded`
For: runtimes whose rows are not bit-equal to single steps, such as a GPU, where texts repeat themselves
Measured: nothing yet (`edgedec bench MODEL --draft-option numerics=padded` tells)
Status: opt-in
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgedec.errors import ModelFormatError, RequestError, SessionError
from edgedec.model import ExactRows, Forward, ForwardItem, Model, Session
from edgedec.progress import OnProgress
from edgedec.sessions.joined_work import owned
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec_methods.sliding_window import with_tokens
from edgedec_runtimes.shared.invariance import N_PREFIX, RANGE_TOKENS, MeasuredRows, measured_invariance

LEAST_ROWS = (2, 3, 4, 5, 8)
"""The least numbers of rows that are tried; libraries change kernels there."""
_ENOUGH = 4  # rows: drafts of three tokens; for longer ones every step would have more padding
_LONG = 2 * RANGE_TOKENS + N_PREFIX
"""Tokens before the rows that are compared in a long context: llama.cpp on CPUs changes kernels at 512 cells."""
_ROOM = 32  # tokens that comparing takes behind the prefix
_COUNTS = struct.Struct("<II")  # tokens that a session has cached, without and with those that padded


class PaddedModel(OuterModel):
    """Implements edgedec.model.Model over another one, with forwards of at least `n_least` rows.

    A forward at the end of the context, where the padding has no room, is not padded; rows of drafts are never called
    exact there. Trees are refused, as a runtime may evaluate the nodes of a kept path again in single steps.

    Args:
        inner: The model inside, whose sessions go back (Capabilities.rollback).
        n_least: The least number of rows of a forward.
        cache_dir: Where is kept how many rows are bit-equal to padded steps, or None.
    """

    def __init__(self, inner: Model, n_least: int, cache_dir: Path | None) -> None:
        fingerprint = hashlib.sha256(f"{inner.card.fingerprint} {n_least} rows at least".encode()).hexdigest()
        super().__init__(inner, replace(inner.card, fingerprint=fingerprint), replace(inner.capabilities, trees=False))
        self.n_least = n_least
        self._cache_dir = cache_dir

    @cached_property
    def batch_invariant(self) -> int:
        """The most rows of a forward that were found to be bit-equal to padded steps, in a short context."""
        return self.rows_after(N_PREFIX)

    def rows_after(self, n_prefix: int) -> int:
        """Return the most rows after `n_prefix` tokens that were found to be bit-equal to padded steps."""
        return measured_invariance(self, self._cache_dir, n_prefix=n_prefix, n_room=self.n_least)

    @cached_property
    def exact(self) -> MeasuredRows:
        """What is known of bit-equal rows in longer contexts."""
        return MeasuredRows(self, self._cache_dir)

    def session(self, n_ctx: int) -> "PaddedSession":
        """Open an empty session of that many tokens (raises what Model.session raises)."""
        return PaddedSession(self.inner.session(n_ctx), self)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate items one after another, as rows may depend on what else is in a forward."""
        sessions: list[Any] = [item.session for item in items]
        if any(session.model is not self for session in sessions) or len({*map(id, sessions)}) < len(sessions):
            raise SessionError("a forward was given a session twice or one of another model; each is one of this model")
        return [owned(session.evaluate(item)) for session, item in zip(sessions, items, strict=True)]


class PaddedSession(OuterSession):
    """Implements edgedec.model.Session: a session whose forwards are padded; what pads a forward is never cached."""

    model: PaddedModel

    def __init__(self, inner: Session, model: PaddedModel, n_cached: int = 0) -> None:
        super().__init__(inner, model)
        self._n_cached = n_cached

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, without those that padded the latest forward."""
        return self._n_cached

    def _emptied(self) -> None:
        self._n_cached = 0

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return how many rows are bit-equal to padded steps; see edgedec.model.Session."""
        n_alike = max(1, self._n_alike(n_past))
        sure, possible = self.model.exact.at(self, n_past, measure if measure <= n_alike else 0)
        return ExactRows(min(sure, n_alike), None if possible is None else min(possible, n_alike))

    def _n_alike(self, n_past: int) -> int:
        """Return how many positions follow whose padded steps end in the same range of positions and the context."""
        end = min(self.n_ctx, (n_past // RANGE_TOKENS + 1) * RANGE_TOKENS)
        return end - n_past - (self.model.n_least - 1)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item, padded where it has too few rows; see Session.forward."""
        if not 0 <= item.n_past <= self._n_cached:
            raise SessionError(f"n_past is {item.n_past}; the session has cached {self._n_cached} tokens")
        if item.is_tree:
            self.model.capabilities.require("trees", self.model.card.runtime)
        n_held, padded, n_rows = self.inner.n_cached, self._padded(item), item.n_rows
        try:
            forward = super().evaluate(padded, on_progress)
        except BaseException:  # KeyboardInterrupt too
            if self.inner.n_cached != n_held:  # else nothing was evaluated
                self._n_cached = min(self.inner.n_cached, item.n_past + n_rows)
            raise
        self._n_cached = item.n_past + n_rows
        if padded is item:
            return forward
        return replace(forward, hidden={layer: states[:n_rows] for layer, states in forward.hidden.items()})

    def _padded(self, item: ForwardItem) -> ForwardItem:
        """Return a chain of tokens with its last token repeated up to the least number of rows, where there is room."""
        tokens = item.groups[0].tokens if len(item.groups) == 1 else None
        n_least = self.model.n_least
        if tokens is None or not 0 < len(tokens) < n_least or item.n_past + n_least > self.n_ctx:
            return item
        n, rows = len(tokens), item.logit_rows
        if np.any(rows >= n):
            raise RequestError(f"row {int(rows.max())} is wanted of a forward of {n} rows")
        return replace(with_tokens(item, np.concatenate([tokens, np.repeat(tokens[-1:], n_least - n)])), rows=rows)

    def fork(self) -> "PaddedSession":
        """Open a second session that shares this one's cached prefix."""
        return PaddedSession(self.inner.fork(), self.model, self._n_cached)

    def save(self) -> bytes:
        """Return the cached KV as bytes, marked with the model; what padded the latest forward is among it."""
        return self._mark + _COUNTS.pack(self._n_cached, self.inner.n_cached) + self.inner.save()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned (raises ModelFormatError where it was saved without this padding)."""
        begin = len(self._mark) + _COUNTS.size
        sound, n_saved, n_held = data.startswith(self._mark) and len(data) >= begin, -1, n_tokens
        if sound:
            n_saved, n_held = _COUNTS.unpack_from(data, len(self._mark))
        self._n_cached = 0
        self.inner.load(data[begin:] if sound else b"", n_held)  # refuses no bytes, and a closed session
        if n_saved != n_tokens:
            raise ModelFormatError(f"the saved state holds no {n_tokens} tokens of this model; evaluate them again")
        self._n_cached = n_tokens


def with_padded_steps(model: Model, n_ctx: int, cache_dir: Path | None) -> tuple[Model, str | None]:
    """Return a model whose drafts are exact by padding, and a sentence on what it costs; the model where none helps.

    Where the model has exact rows in any number already, it is returned without a sentence.

    Args:
        n_ctx: Tokens of its sessions; in those that are long enough, rows are compared in a long context too.
        cache_dir: Where measured facts are kept, or None.
    """
    if model.batch_invariant is True:
        return model, None
    runtime = model.card.runtime
    if not model.capabilities.rollback:
        return model, f"steps are not padded: the {runtime} runtime can't go back"
    lengths = [n for n in (N_PREFIX, _LONG) if n + _ROOM <= n_ctx]
    most = unpadded = min((measured_invariance(model, cache_dir, n_prefix=n) for n in lengths), default=1)
    best: PaddedModel | None = None
    for n_least in LEAST_ROWS:
        if most >= _ENOUGH or n_least > model.capabilities.max_rows:
            break
        padded = PaddedModel(model, n_least, cache_dir)
        n_exact = min((padded.rows_after(n) for n in lengths), default=1)
        if n_exact > most:
            best, most = padded, n_exact
    if best is None:
        rows = "1 row is" if unpadded == 1 else f"{unpadded} rows are"
        return model, f"steps are not padded: on the {runtime} runtime {rows} exact without, and no more with padding"
    return best, (
        f"every step has at least {best.n_least} rows, so up to {most} rows of a draft are exact; "
        f"a padded step costs {_cost(best):.2f} of an unpadded one"
    )


def _cost(model: PaddedModel) -> float:
    """Return how many times a padded step takes the time of an unpadded one; the median of seven pairs."""
    one, ratios = np.zeros(1, np.int32), []
    session = model.session(RANGE_TOKENS)
    try:
        for _ in range(8):
            begun = perf_counter()
            session.inner.forward(one, n_past=0)
            middle = perf_counter()
            session.forward(one, n_past=0)
            ratios.append((perf_counter() - middle) / max(middle - begun, 1e-9))
    finally:
        session.close()
    return float(np.median(ratios[1:]))

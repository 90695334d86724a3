"""The model under test, and what the checks of a runtime share."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.model import Model, Session
from edgedec.testing.drafting import HeldSessions
from edgedec.testing.results import NotApplicableError
from support.conformance.requirements import require_close, require_equal

N_PREFIX = 24
MOST_ROWS = 16
Tokens = NDArray[np.int32]
_TEXT = (
    "The river was high that morning, and the ferryman had already crossed it twice before the sun came up. He counted "
    "the coins in his pocket, looked at the sky, and decided that one more trip would be enough. On the other side a "
    'woman with two children and a goat was waiting. "How much for all of us?" she asked.'
)
Floats = NDArray[np.float32]


class Subject(HeldSessions):
    """The model under test; sessions opened through it are closed after each check.

    Args:
        load: Loads the model; called again after a failed check, so that no check spoils the next one.
        n_ctx: Most tokens of the sessions that the checks open.
        tolerance: By how much rows may differ that need not have equal bits, as a share of a row's spread.
        memory_probe: A command that measures the model in a process of its own, or None.
    """

    def __init__(
        self, load: Callable[[], Model], n_ctx: int, tolerance: float, memory_probe: Sequence[str] | None
    ) -> None:
        self.load = load
        self.tolerance = tolerance
        self.memory_probe = memory_probe
        self._n_ctx = n_ctx
        self._model: Model | None = None
        super().__init__()

    @property
    def model(self) -> Model:
        """The model, loaded at the first use."""
        if self._model is None:
            self._model = self.load()
        return self._model

    @property
    def n_ctx(self) -> int:
        """Most tokens of a session: at most as many as the model was trained for."""
        n_ctx_train = self.model.card.n_ctx_train
        return min(self._n_ctx, n_ctx_train) if n_ctx_train > 0 else self._n_ctx

    def session(self, n_ctx: int | None = None) -> Session:
        """Open a session that is closed when the check is over."""
        return self.adopt(self.model.session(n_ctx or self.n_ctx))

    def prefixed(self, *pieces: Tokens) -> Session:
        """Open a session that holds the prefix, then these pieces."""
        session = self.session()
        for piece in (self.prefix, *pieces):
            session.forward(piece, n_past=session.n_cached)
        return session

    def clean_up(self, *, failed: bool) -> None:
        """Close the check's sessions; after a failed check close the whole model, which is then loaded again."""
        if failed:
            self.close()
        else:
            self.close_sessions()

    def close(self) -> None:
        """Close the model; the next use loads it again."""
        model, self._model = self._model, None
        self._held.pop_all()
        if model is not None:
            model.close()

    def tokens(self, n: int, seed: int = 0) -> Tokens:
        """Return int32[n], a stretch of text that begins in another place for each seed.

        It is text because on random tokens some models magnify the rounding of a batch as much as a wrong token would
        change the logits.
        """
        return np.resize(np.roll(self._text(), -17 * seed), n)

    def _text(self) -> Tokens:
        try:
            ids = self.model.tokenizer.encode(_TEXT, add_special=False)
        except UnsupportedModelError:  # the runtime reads this vocabulary only by ids
            ids = np.random.default_rng(0).integers(0, self.model.card.n_vocab, 200).tolist()
        return np.array(ids, dtype=np.int32)

    def require(self, capability: str) -> None:
        """Skip the check unless the model declares that capability."""
        if not getattr(self.model.capabilities, capability):
            raise NotApplicableError(f"the model declares no {capability!r}")

    def require_rows(self, n: int) -> None:
        """Skip the check unless a forward returns that many rows."""
        max_rows = self.model.capabilities.max_rows
        if max_rows < n:
            raise NotApplicableError(f"needs {n} rows of logits, max_rows is {max_rows}")

    @property
    def prefix(self) -> Tokens:
        """The tokens that most checks begin with."""
        return self.tokens(N_PREFIX)

    def is_invariant(self, n: int) -> bool:
        """Return whether the model claims that the rows of a forward of n rows have the bits of single steps."""
        claim = self.model.batch_invariant
        return claim is True or n <= claim

    def is_invariant_tree(self, n: int) -> bool:
        """Return whether the model claims that the rows of a tree of n nodes have the bits of single steps."""
        return self.model.capabilities.exact_trees and self.is_invariant(n)

    def is_exact(self) -> bool:
        """Return whether the model claims that nothing around a row changes its bits."""
        return self.model.batch_invariant is True

    def require_same(self, found: Floats, expected: Floats, what: str, *, exact: bool) -> None:
        """Fail the check unless rows of logits are equal: bit for bit where `exact`, else within the tolerance."""
        if exact:
            require_equal(found, expected, what)
        else:
            require_close(found, expected, self.tolerance, what)

    def replay(self, *pieces: Tokens) -> Floats:
        """Evaluate the pieces one after another in a new session; return the logits of all rows of the last piece."""
        session = self.model.session(self.n_ctx)
        try:
            return extend(session, *pieces)
        finally:
            session.close()


def extend(session: Session, *pieces: Tokens) -> Floats:
    """Evaluate the pieces after what the session holds; return the logits of all rows of the last piece, as a copy."""
    *first, last = pieces
    for piece in first:
        session.forward(piece, n_past=session.n_cached)
    return session.forward(last, n_past=session.n_cached, rows="all").logits.copy()


def chain(*token_ids: int) -> Tokens:
    """Return int32[n], these token ids or rows as an array."""
    return np.array(token_ids, dtype=np.int32)

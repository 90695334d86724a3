"""The reference model: weights, sessions, and forwards that go row by row."""

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import numpy as np

from edgedec.counted import counted
from edgedec.errors import MemoryCapError, RequestError, SessionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard, Session
from edgedec.progress import OnProgress, Progress
from edgedec_runtimes.reference.network import KVCache, Row, evaluate, logits
from edgedec_runtimes.reference.session import ReferenceSession
from edgedec_runtimes.reference.tokenizer import ReferenceTokenizer
from edgedec_runtimes.reference.weights import Hyperparameters, Weights
from edgedec_runtimes.shared.bookkeeping import Checked, ModelLock, Shape, Stop, check_items

MAX_ROWS = 256
_VOCABULARY_BYTES_PER_TOKEN = 350


@dataclass(frozen=True, slots=True)
class Needs:
    """What the memory plan is made from.

    Attributes:
        weight_bytes: Of all weights as float32.
        kv_dtype: Element type of the KV cache.
        base_bytes: What the process held before loading.
        n_parallel: Sessions of the planned size.
    """

    hyper: Hyperparameters
    weight_bytes: int
    kv_dtype: np.dtype[np.floating]
    base_bytes: int
    n_parallel: int = 1


class ReferenceModel:
    """Implements edgedec.model.Model.

    Attributes:
        lock: Held by whatever touches weights and sessions.
        stop: What cancels a forward.
    """

    def __init__(
        self,
        weights: Weights,
        tokenizer: ReferenceTokenizer,
        card: ModelCard,
        needs: Needs,
    ) -> None:
        self._loaded: Weights | None = weights
        self._tokenizer = tokenizer
        self._card = card
        self._needs = needs
        self._shape = Shape(card.n_vocab, card.n_embd, card.n_layer, MAX_ROWS)
        self.lock = ModelLock()
        self.stop = Stop()
        self._sessions: weakref.WeakSet[ReferenceSession] = weakref.WeakSet()

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return Capabilities(
            rollback=True,
            trees=True,
            fork=True,
            layers=True,
            taps=True,
            hidden_input=True,
            max_rows=MAX_ROWS,
            prefill_chunk=1,
        )

    @property
    def tokenizer(self) -> ReferenceTokenizer:
        """The vocabulary of the file."""
        return self._tokenizer

    @property
    def batch_invariant(self) -> Literal[True]:
        """True by construction: see edgedec_runtimes.reference.network."""
        return True

    @property
    def hyper(self) -> Hyperparameters:
        """The model's shape."""
        return self._needs.hyper

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return memory_terms(self._needs, n_ctx, n_rows)

    def session(self, n_ctx: int) -> ReferenceSession:
        """Open an empty session of that many tokens."""
        self._weights()
        if n_ctx < 1:
            raise RequestError(f"n_ctx is {n_ctx}; a session holds at least 1 token")
        try:
            cache = KVCache.empty(self.hyper, n_ctx, self._needs.kv_dtype)
        except MemoryError as error:
            raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error
        session = ReferenceSession(self, cache)
        self._sessions.add(session)
        return session

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions, one after another."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of every row."""
        with self.lock:
            weights = self._weights()
            checked = check_items(items, self, self._shape)
            sessions = [item.session for item in items]
            with self.stop.running(sessions):
                work = zip(sessions, checked, strict=True)
                return [self._run(weights, session, c, on_progress) for session, c in work]

    def _run(self, weights: Weights, session: Session, checked: Checked, on_progress: OnProgress | None) -> Forward:
        assert isinstance(session, ReferenceSession), "a session of this model is one of this class"
        n, state = checked.n_rows, session.state
        self.stop.check()
        state.begin(checked)
        result = np.empty((len(checked.wanted), self._card.n_vocab), np.float32)
        hidden = {tap: np.empty((n, self._card.n_embd), np.float32) for tap in checked.taps}
        inputs = checked.hidden if checked.tokens is None else weights.embedding[checked.tokens]
        assert inputs is not None, "a forward has tokens or hidden states"
        for i, row in enumerate(_rows(checked)):
            self.stop.check()
            output = evaluate(weights, session.cache, inputs[i], row)
            for tap, tapped in output.tapped.items():
                hidden[tap][i] = tapped
            for j in np.flatnonzero(checked.wanted == i):
                result[j] = logits(weights, output.state)
            if checked.parents is None:
                state.advance(1)
            if on_progress is not None:
                on_progress(Progress("prefill", i + 1, n, "tokens"))
        if checked.parents is not None:
            state.become_branched()
        return Forward(result, hidden)

    def _weights(self) -> Weights:
        if self._loaded is None:
            raise SessionError("the model is closed; load it again")
        return self._loaded

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""
        with self.lock:
            self._loaded = None
            for session in list(self._sessions):
                session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rows(checked: Checked) -> list[Row]:
    """Return how to evaluate each row: what it sees are the cached prefix, its ancestors and itself."""
    n, n_past = checked.n_rows, checked.n_past
    paths: list[list[int]] = []
    for row, parent in enumerate(range(-1, n - 1) if checked.parents is None else checked.parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else range(n_past)), n_past + row])
    return [Row(np.array(path, np.intp), checked.taps, checked.first_layer, checked.layers) for path in paths]


def memory_terms(needs: Needs, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of the memory plan for sessions of `n_ctx` tokens and `n_rows` rows of logits."""
    hyper, n_vocab = needs.hyper, needs.hyper.n_vocab
    kv_bytes = n_ctx * hyper.n_layer * (2 * hyper.n_kv * needs.kv_dtype.itemsize + 1)
    return (
        MemoryTerm("interpreter and libraries", needs.base_bytes, "measured", base=True),
        MemoryTerm("weights", needs.weight_bytes, "float32"),
        MemoryTerm("vocabulary", n_vocab * _VOCABULARY_BYTES_PER_TOKEN, f"{n_vocab} tokens"),
        MemoryTerm(
            "KV cache", kv_bytes * needs.n_parallel, f"{counted(n_ctx, 'token')} × {needs.n_parallel}, {needs.kv_dtype}"
        ),
        MemoryTerm("logits", n_rows * n_vocab * 4, counted(n_rows, "row")),
    )


def fingerprint(weights: Weights, numerics: str) -> str:
    """Return a SHA-256 (hex) of the weights themselves and of what else changes a logit."""
    digest = hashlib.sha256(numerics.encode())
    for array in weights.arrays():
        digest.update(array.tobytes())
    return digest.hexdigest()

"""The reference model, which evaluates forwards row by row."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, OptionError, counted
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, report_progress
from edgedec_runtimes.architectures.architecture import Recurrence
from edgedec_runtimes.reference.network import (
    Floats,
    KVCache,
    Row,
    RowOutput,
    embeddings,
    evaluate,
    evaluate_together,
    logits,
    per_layer_inputs,
)
from edgedec_runtimes.reference.tokenizer import ReferenceTokenizer
from edgedec_runtimes.reference.weights import Weights
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION, Hyperparameters
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession
from edgedec_runtimes.shared.session_state import CheckedItem


class ReferenceSession(OwnSession):
    """Implements edgedec.model.Session.

    Attributes:
        cache: Its keys and values.
    """

    def __init__(self, model: LibraryModel[Any, Any], cache: KVCache) -> None:
        """Take over an empty cache."""
        super().__init__(model, cache.keys.shape[1])
        self.cache = cache

    def _move(self, slots: NDArray[np.int32]) -> None:
        self.cache.move(slots, self.n_cached)

    def _fork(self) -> "ReferenceSession":
        """Return a second session with a copy of the cached prefix."""
        twin: ReferenceSession = self._model.session(self.n_ctx)
        for mine, theirs in zip(self.cache.arrays(), twin.cache.arrays(), strict=True):
            theirs[:, : self.n_cached] = mine[:, : self.n_cached]
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return [array[:, :n] for array in (*self.cache.arrays(), self.state.written)]

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NDArray[np.bool_]:
        *saved, written = arrays
        for array, cached in zip(self.cache.arrays(), saved, strict=True):
            array[:, :n] = cached
        return written

    def _free(self) -> None:
        self.cache = KVCache(*(array[:, :0].copy() for array in self.cache.arrays()))


LOGIT_ROWS = 256
"""Most rows of logits of a forward, and most rows of a tree."""

_CAPABILITIES = Capabilities(
    rollback=True,
    trees=True,
    fork=True,
    layers=True,
    groups=True,
    taps=True,
    hidden_input=True,
    vector_rows=True,
    positions=True,
    max_rows=LOGIT_ROWS,
    prefill_chunk=1,
)
_VOCABULARY_BYTES_PER_TOKEN = 350


@dataclass(frozen=True, slots=True)
class Needs:
    """What the memory plan is made from.

    Attributes:
        hyper: The sizes of the model.
        recurrence: Those of its recurrent states; None where it has none.
        weight_bytes: Bytes of all weights as float32.
        kv_dtype: Element type of the KV cache.
        base_bytes: What the process held before loading.
        n_parallel: Number of sessions of the planned size.
    """

    hyper: Hyperparameters
    recurrence: Recurrence | None
    weight_bytes: int
    kv_dtype: np.dtype[np.floating]
    base_bytes: int
    n_parallel: int = 1


class ReferenceModel(LibraryModel[Weights, ReferenceSession]):
    """Implements edgedec.model.Model."""

    batch_invariant: Literal[True] = True  # by construction: see edgedec_runtimes.reference.network

    def __init__(self, weights: Weights, tokenizer: ReferenceTokenizer, card: ModelCard, needs: Needs) -> None:
        reads = weights.per_layer is None  # else layers also read the tokens
        can = replace(_CAPABILITIES, hidden_input=reads, vector_rows=reads, attention_mass=weights.hyper.most_heads)
        super().__init__(
            weights, card, can, tokenizer, partial(memory_terms, needs), lambda: None, tree_rows=LOGIT_ROWS
        )
        self._needs = needs
        self.has_places = bool(weights.switches.rope.sections)

    def session(self, n_ctx: int) -> ReferenceSession:
        """Open an empty session of that many tokens."""
        with self.lock:
            if n_ctx < 1:
                raise OptionError("n_ctx", n_ctx, "a session holds at least 1 token")
            try:
                cache = KVCache.empty(self._needs.hyper, self._needs.recurrence, n_ctx, self._needs.kv_dtype)
            except MemoryError as error:
                raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error
            return self.adopt(ReferenceSession(self, cache))

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item row by row."""
        weights, session, n = self.handle, item.session, item.n_rows
        self.stop.check()
        session.state.begin(item)
        result = np.empty((len(item.logit_rows), self.card.n_vocab), np.float32)
        hidden = {tap: np.empty((n, self.card.n_embd), np.float32) for tap in item.taps}
        inputs, rows, mass = self._inputs(item), _rows(item), None
        if item.mass:
            mass = np.zeros((len(item.mass), self.capabilities.attention_mass, item.n_past + n), np.float32)
            to, factors = dict(zip(item.mass, mass, strict=True)), np.stack([*item.mass.values()])
            weighed = [dict(zip(item.mass, factors[:, i].tolist(), strict=True)) for i in range(n)]
            rows = [replace(row, weights=its, mass=to) for row, its in zip(rows, weighed, strict=True)]
        outputs: Iterable[RowOutput] = (
            self._evaluated(item, token, state, row) for (token, state), row in zip(inputs, rows, strict=True)
        )
        block = item.groups[0].block
        if block is not None and block.mutual:
            outputs = evaluate_together(weights, session.cache, np.stack([state for _, state in inputs]), rows)
        for i, output in enumerate(outputs):
            self.stop.check()
            for tap in item.taps:
                hidden[tap][i] = inputs[i][1][: self.card.n_embd]  # of a row that enters behind that layer
            for tap, tapped in output.tapped.items():
                hidden[tap][i] = tapped
            for j in np.flatnonzero(item.logit_rows == i):
                result[j] = logits(weights, output.state)
            if item.parents is None:
                session.state.advance(1)
            report_progress(on_progress, "prefill", i + 1, n, "tokens")
        if item.parents is not None:
            session.state.advance(n)
        return Forward(result, hidden, mass=mass)

    def _inputs(self, item: CheckedItem) -> list[tuple[int | None, Floats]]:
        """Return each row's token, None for a vector, and what the row begins with.

        That is f32[n_embd], in place of embeddings with what is added behind layers.
        """
        weights, inputs = self.handle, list[tuple[int | None, Floats]]()
        for group in item.groups:
            if group.tokens is not None:
                inputs += zip(group.tokens.tolist(), embeddings(weights, group.tokens), strict=True)
                continue
            assert group.vectors is not None, "a forward has tokens or vectors"
            vectors = group.vectors
            if not group.span.enter and weights.switches.scaled_vectors:
                vectors = vectors.copy()
                vectors[:, : self.card.n_embd] *= np.float32(weights.switches.embedding_scale)
            inputs += [(None, vector) for vector in vectors]
        return inputs

    def _evaluated(self, item: CheckedItem, token: int | None, state: Floats, row: Row) -> RowOutput:
        self.stop.check()
        weights = self.handle
        per_layer = None if token is None else per_layer_inputs(weights, token, state)
        return evaluate(weights, item.session.cache, state, row, per_layer)


def _rows(item: CheckedItem) -> list[Row]:
    """Return how to evaluate each row: a row sees the cached prefix, its ancestors and itself, or its whole block."""
    n, n_past = item.n_rows, item.n_past
    places, first = item.session.state.places, item.groups[0]
    paths: list[list[int]] = []
    for row, parent in enumerate(range(-1, n - 1) if item.parents is None else item.parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else range(n_past)), n_past + row])
    spans = [group.span for group in item.groups for _ in range(group.n_rows)]
    rows = [
        Row(np.array(path, np.intp), item.taps, span.enter, span.layers)
        for path, span in zip(paths, spans, strict=True)
    ]
    if places is not None:
        rows = [replace(row, places=places[row.visible[-1]]) for row in rows]
    if first.block is not None and first.block.mutual:
        size = n_past + n if first.tokens is None else first.block.n_rows
        ends = [min(n_past + n, (n_past + i) // size * size + size) for i in range(n)]
        rows = [
            replace(row, behind=np.arange(n_past + i + 1, end))
            for i, (row, end) in enumerate(zip(rows, ends, strict=True))
        ]
    return rows


def memory_terms(needs: Needs, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of the memory plan for sessions of `n_ctx` tokens and `n_rows` rows of logits."""
    hyper, n_vocab = needs.hyper, needs.hyper.n_vocab
    column_bytes = 4 * hyper.n_embd if hyper.n_with(CONVOLUTION) else 0
    if (r := needs.recurrence) is not None:
        column_bytes = 4 * (r.n_column + r.n_values * r.n_key)
    n_kv = max(layer.n_kv for layer in hyper.layers)
    kv_bytes = n_ctx * hyper.n_layer * (2 * n_kv * needs.kv_dtype.itemsize + column_bytes + 1)
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
    """Return the SHA-256 in hex of the weights and of `numerics`, which names everything else that changes a logit."""
    digest = hashlib.sha256(numerics.encode())
    for array in weights.arrays():
        digest.update(array.tobytes())
    return digest.hexdigest()

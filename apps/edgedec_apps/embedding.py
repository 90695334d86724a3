"""Embeddings: one vector for a text, of the hidden states that a model has after its last layer."""

from collections.abc import Iterator, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgedec.api.engine import Engine
from edgedec.api.requests import Prompt
from edgedec.callers import checks_arguments
from edgedec.decoding.prompt_length import CUT_TEXT, too_long
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import CancelledError, OptionError, RequestError, SessionError, argument
from edgedec.gguf.model_kinds import POOLINGS, Pooling
from edgedec.model import EncoderSession, Session
from edgedec.model_card import ModelCard
from edgedec.progress import CancelToken
from edgedec_runtimes.shared.final_norm import FinalNorm, read_final_norm

_ROWS = 64  # of one forward: always the same cuts, so that a vector does not depend on what else is embedded
_NO_ROWS = np.empty(0, np.int32)
_norms = WeakKeyDictionary[Engine, FinalNorm]()


@checks_arguments
def embed(
    engine: Engine,
    texts: Sequence[Prompt],
    *,
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    cancel: CancelToken | None = None,
) -> NDArray[np.float32]:
    """Return f32[n_texts, n_dimensions]: a vector of length 1 for each text.

    A vector depends on its text alone. Each text is read from its beginning, so the KV cache of an earlier request
    is lost.

    Args:
        texts: Texts, or their token ids.
        pooling: "mean", "cls" or "last"; None for what the model was trained for. A model that was not trained to
            embed needs it: its hidden states say something of a text, but less than an embedding model's.
        dimensions: Keep only so many numbers of each vector, the first ones; None for all.
        cancel: Stops the work, from any thread.

    Raises:
        RequestError: `pooling` or `dimensions` is out of range, a text is empty, or the model was not trained to
            embed and `pooling` is None.
        PromptTooLongError: A text does not fit the context.
        CapabilityError: The runtime has no hidden states.
        CancelledError: `cancel` stopped the work.
    """
    chosen, card, stop = require_pooling(engine.card, pooling), engine.card, cancel or CancelToken()
    require_dimensions(card, dimensions)
    all_ids = [engine.prompt_ids(text, as_said=True, continued=False) for text in texts]
    for i, ids in enumerate(all_ids):
        require_embeddable(i, ids, card, engine.n_ctx)
    norm = None if engine.model.capabilities.final_states else _final_norm(engine)
    vectors = np.zeros((len(all_ids), card.n_embd), np.float32)
    with engine.pool.turn(stop) as slot:
        if slot is not None:
            slot.adapt(engine.lora)
            with stop.calling(slot.session.cancel):
                for i, ids in enumerate(all_ids):
                    if not stop.cancelled:
                        vectors[i] = embed_on(slot, ids, chosen, norm)
    if stop.cancelled:
        raise CancelledError("the embedding was cancelled")
    return unit_length(vectors, dimensions)


def _final_norm(engine: Engine) -> FinalNorm:
    """Return the norm after the last layer of an engine's model; read once."""
    if engine not in _norms:
        _norms[engine] = read_final_norm(engine.path)
    return _norms[engine]


def require_pooling(card: ModelCard, pooling: str | None) -> Pooling:
    """Return the pooling that is wanted, or else the model's own.

    Raises:
        RequestError: It is not one that there is, or the model has none of its own.
    """
    chosen = card.pooling if pooling is None else pooling
    for kind in POOLINGS:
        if chosen == kind:
            return kind
    raise RequestError(
        f"the file of {card.name!r} does not say how its hidden states become one vector, as a model that was not "
        f"trained to embed texts; use an embedding model, or give {argument('pooling')} ({', '.join(POOLINGS)}); a "
        "reranker scores documents: use rank() or edgedec rank"
    )


def require_dimensions(card: ModelCard, dimensions: int | None) -> None:
    """Raise RequestError for a number of dimensions that the model's vectors can't have."""
    if dimensions is not None and not 1 <= dimensions <= card.n_embd:
        raise OptionError("dimensions", dimensions, f"it must be 1 to {card.n_embd}, the length of the model's vectors")


def require_embeddable(index: int, token_ids: tuple[int, ...], card: ModelCard, n_ctx: int) -> None:
    """Raise an error for a text that can't be embedded; `index` is its place among the texts.

    Raises:
        RequestError: It has no token, or one that is outside the vocabulary.
        PromptTooLongError: It has more tokens than the context.
    """
    if not token_ids:
        raise RequestError(f"text {index} is empty; give at least one character")
    for token_id in token_ids:
        if not 0 <= token_id < card.n_vocab:
            raise RequestError(
                f"text {index} holds the token id {token_id}, which is outside the vocabulary of {card.n_vocab}; "
                "another tokenizer's ids mean something else here, so give the text itself"
            )
    if len(token_ids) > n_ctx:
        raise too_long(len(token_ids), n_ctx, card.n_ctx_train, cut=CUT_TEXT)


def embed_on(
    slot: SessionSlot, token_ids: tuple[int, ...], pooling: Pooling, norm: FinalNorm | None, n_first: int | None = None
) -> NDArray[np.float32]:
    """Return f32[n_embd], the pooled final states of a text, not normalized; the slot's KV cache then holds the text.

    `norm` is the one that a decoder's states go through after the last layer; None where the runtime has final states,
    which take `n_first` for a pair of texts (edgedec.model.EncoderSession).

    Raises:
        SessionError: The model is closed.
        CapabilityError: The runtime has no hidden states.
        CancelledError: The session was cancelled.
    """
    if slot.closing:
        raise SessionError("the model is closed; load it again")
    slot.cached_ids, slot.n_exact = [], 0
    tokens = np.array(token_ids, np.int32)
    with slot.session.generating(len(token_ids)):
        if norm is None:  # an encoder, which keeps nothing
            states = cast(EncoderSession, slot.session).final_states(tokens, n_first)
            return _pooled(iter([states]), len(tokens), pooling)
        pooled = _pooled(_states(slot.session, tokens, norm), len(tokens), pooling)
        slot.cached_ids = list(token_ids)  # n_exact is 0, as it was read in pieces of another length than a prompt
        return pooled


def _states(session: Session, tokens: NDArray[np.int32], norm: FinalNorm) -> Iterator[NDArray[np.float32]]:
    """Yield the states of a text's tokens after the final norm, f32[n, n_embd], some tokens at a time."""
    session.model.capabilities.require("taps", session.model.card.runtime)
    last = session.model.card.n_layer - 1
    for begin in range(0, len(tokens), _ROWS):
        result = session.forward(tokens[begin : begin + _ROWS], n_past=begin, rows=_NO_ROWS, taps=(last,))
        yield norm.of(result.hidden[last])


def _pooled(states: Iterator[NDArray[np.float32]], n_tokens: int, pooling: Pooling) -> NDArray[np.float32]:
    """Return f32[n_embd], the pooled states of a text of `n_tokens` tokens."""
    first = next(states)
    if pooling == "cls":
        return np.array(first[0])
    if pooling == "last":
        for later in states:
            first = later
        return np.array(first[-1])
    total = first.sum(axis=0, dtype=np.float64)
    for later in states:
        total = total + later.sum(axis=0, dtype=np.float64)
    mean: NDArray[np.float32] = (total / n_tokens).astype(np.float32)
    return mean


def unit_length(vectors: NDArray[np.float32], dimensions: int | None = None) -> NDArray[np.float32]:
    """Return f32[n, dimensions]: the first numbers of each vector, scaled to the length 1; a zero vector stays zero.

    Models that were trained for it (Kusupati et al. 2022, arXiv:2205.13147) keep most of their quality so.
    """
    cut = vectors[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths == 0, 1, lengths)).astype(np.float32)

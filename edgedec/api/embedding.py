"""Embedding texts on an engine's sessions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.decoding.embedding import FinalNorm, embed_on, read_final_norm, require_embeddable, unit_length
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.errors import CancelledError, CapabilityError
from edgedec.gguf.model_kinds import Pooling
from edgedec.model import ModelCard
from edgedec.progress import CancelToken


class Embedder:
    """Makes vectors of texts with the hidden states of a model.

    Args:
        pool: The sessions, which requests for texts share.
        card: The facts of the model.
        path: The model's file, or None where there is none.
    """

    def __init__(self, pool: SessionPool[SessionSlot], card: ModelCard, path: Path | None) -> None:
        self._pool = pool
        self._card = card
        self._path = path
        self._norm: FinalNorm | None = None

    def vectors(
        self,
        all_ids: Sequence[tuple[int, ...]],
        pooling: Pooling,
        dimensions: int | None,
        cancel: CancelToken,
    ) -> NDArray[np.float32]:
        """Return f32[n_texts, n_dimensions]: for each text a vector of length 1 (raises what Engine.embed raises)."""
        n_ctx = self._pool.slots[0].session.n_ctx
        for i, ids in enumerate(all_ids):
            require_embeddable(i, ids, self._card.n_vocab, n_ctx)
        has_states = self._pool.slots[0].session.model.capabilities.final_states
        norm = None if has_states else self._final_norm()
        vectors = np.zeros((len(all_ids), self._card.n_embd), np.float32)
        with self._pool.turn(cancel) as slot:
            if slot is not None:
                with cancel.calling(slot.session.cancel):
                    for i, ids in enumerate(all_ids):
                        if not cancel.cancelled:
                            vectors[i] = embed_on(slot, ids, pooling, norm)
        if cancel.cancelled:
            raise CancelledError("the embedding was cancelled")
        return unit_length(vectors, dimensions)

    def _final_norm(self) -> FinalNorm:
        """Return the norm after the model's last layer; read once."""
        if self._path is None:
            raise CapabilityError("this engine has no file to read the model's final norm from; load the model by name")
        if self._norm is None:
            self._norm = read_final_norm(self._path)
        return self._norm

"""One sequence's KV cache on the reference model."""

import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.model import Forward, ForwardItem, LayerSet, Rows
from edgedec.progress import OnProgress
from edgedec_runtimes.bookkeeping import SessionState
from edgedec_runtimes.reference.network import KVCache

if TYPE_CHECKING:
    from edgedec_runtimes.reference.model import ReferenceModel

_SAVED = struct.Struct("<64sI")


class ReferenceSession:
    """Implements edgedec.model.Session.

    Attributes:
        state: What the cache holds.
        cache: Its keys and values.
    """

    def __init__(self, model: "ReferenceModel", cache: KVCache) -> None:
        self._model = model
        self.cache = cache
        n_layer, n_ctx, _ = cache.keys.shape
        self.state = SessionState(n_ctx, n_layer)

    @property
    def model(self) -> "ReferenceModel":
        """The model this session belongs to."""
        return self._model

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self.state.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self.state.n_cached

    def forward(
        self,
        tokens: NDArray[np.int32] | None = None,
        *,
        n_past: int,
        hidden: NDArray[np.float32] | None = None,
        resume_after: int | None = None,
        parents: NDArray[np.int32] | None = None,
        layers: LayerSet | None = None,
        rows: Rows = "last",
        taps: tuple[int, ...] = (),
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate new rows; see edgedec.model.Session."""
        item = ForwardItem(self, n_past, tokens, hidden, resume_after, parents, layers, rows, taps)
        return self._model.forward_with_progress([item], on_progress)[0]

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        with self._model.lock:
            slots = self.state.leave_tree(rows)
            self.cache.move(slots, self.n_cached)
            self.state.hold_path(slots)

    def fork(self) -> "ReferenceSession":
        """Open a second session with a copy of the cached prefix."""
        with self._model.lock:
            self.state.check_settled("forked")
            twin, n = self._model.session(self.n_ctx), self.n_cached
            for mine, theirs in zip(self.cache.arrays(), twin.cache.arrays(), strict=True):
                theirs[:, :n] = mine[:, :n]
            twin.state.restore(n, self.state.written[:, :n])
            return twin

    def save(self) -> bytes:
        """Serialize the cached KV."""
        with self._model.lock:
            self.state.check_settled("saved")
            arrays = (array[:, : self.n_cached].tobytes() for array in (*self.cache.arrays(), self.state.written))
            return self._head(self.n_cached) + b"".join(arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.lock:
            self.state.check_open()
            if not 0 <= n_tokens <= self.n_ctx:
                raise ModelFormatError(
                    f"the saved state holds {n_tokens} tokens, the session {self.n_ctx}; open a longer one"
                )
            head = self._head(n_tokens)
            arrays = [array[:, :n_tokens] for array in (*self.cache.arrays(), self.state.written)]
            if data[: len(head)] != head or len(data) != len(head) + sum(array.nbytes for array in arrays):
                raise ModelFormatError(
                    f"the saved state ({len(data)} bytes) is not one of {n_tokens} tokens of this model with these "
                    "options; evaluate the tokens again"
                )
            offset = len(head)
            for array in arrays:
                array[:] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
                offset += array.nbytes
            self.state.restore(n_tokens, self.state.written[:, :n_tokens])

    def _head(self, n_tokens: int) -> bytes:
        return _SAVED.pack(self._model.card.fingerprint.encode(), n_tokens)

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.stop.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self.cache = KVCache.empty(self._model.hyper, 0, self.cache.keys.dtype)

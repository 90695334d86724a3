"""One sequence's KV cache on the reference model."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.reference.network import KVCache
from edgedec_runtimes.shared.own_session import OwnSession

if TYPE_CHECKING:
    from edgedec_runtimes.reference.model import ReferenceModel


class ReferenceSession(OwnSession["ReferenceModel"]):
    """Implements edgedec.model.Session.

    Attributes:
        cache: Its keys and values.
    """

    def __init__(self, model: "ReferenceModel", cache: KVCache) -> None:
        super().__init__(model, cache.keys.shape[1])
        self.cache = cache

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
            return self._saved_head(self.n_cached) + b"".join(arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.lock:
            self.state.check_open()
            self._check_saved_tokens(n_tokens)
            arrays = [array[:, :n_tokens] for array in (*self.cache.arrays(), self.state.written)]
            offset = self._saved_body(data, n_tokens, sum(array.nbytes for array in arrays))
            for array in arrays:
                array[:] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
                offset += array.nbytes
            self.state.restore(n_tokens, self.state.written[:, :n_tokens])

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.stop.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self.cache = KVCache.empty(self._model.hyper, 0, self.cache.keys.dtype)

"""One sequence's KV cache, as arrays that the graph returned and that nobody writes to again."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.shared.own_session import OwnSession

if TYPE_CHECKING:
    from edgedec_runtimes.onnx.foreign.model import ForeignModel

Arrays = list[NDArray[np.float32]]


class ForeignSession(OwnSession["ForeignModel"]):
    """Implements edgedec.model.Session."""

    def __init__(self, model: "ForeignModel", n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self._arrays = model.empty_caches(0)

    def past(self, n_past: int) -> Arrays:
        """Return the first n_past tokens' keys and values, f32[1, n_head_kv, n_past, head_dim] each.

        Copied where more tokens are held: the graph wants arrays without gaps.
        """
        self._arrays = [np.ascontiguousarray(array[:, :, :n_past]) for array in self._arrays]
        return self._arrays

    def hold(self, arrays: Arrays) -> None:
        """Take over what the graph returned, which may have a slot more than there are tokens."""
        self._arrays = arrays

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Raise SessionError: there are no trees to keep a path of."""
        with self._model.exclusive():
            self.state.leave_tree(rows)

    def exact_rows(self, n_past: int) -> int | None:
        """Return how many rows may be bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.limit(n_past)

    def has_exact_rows(self, n_past: int, n_rows: int) -> bool:
        """Tell whether so many rows are bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.holds(self, n_past, n_rows)

    def fork(self) -> "ForeignSession":
        """Open a second session with the same arrays: neither writes to them."""
        with self._model.exclusive():
            self.state.check_settled("forked")
            twin, n = self._model.session(self.n_ctx), self.n_cached
            twin.hold(list(self._arrays))
            twin.state.restore(n, self.state.written[:, :n])
            return twin

    def save(self) -> bytes:
        """Serialize the cached KV."""
        with self._model.exclusive():
            self.state.check_settled("saved")
            n = self.n_cached
            return self._saved_head(n) + b"".join(array[:, :, :n].tobytes() for array in self._arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.exclusive():
            self.state.check_open()
            self._check_saved_tokens(n_tokens)
            arrays = self._model.empty_caches(n_tokens)
            offset = self._saved_body(data, n_tokens, sum(array.nbytes for array in arrays))
            for array in arrays:
                array[:] = np.frombuffer(data, np.float32, array.size, offset).reshape(array.shape)
                offset += array.nbytes
            self.hold(arrays)
            self.state.restore(n_tokens, np.ones((len(self.state.written), n_tokens), np.bool_))

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self._arrays = []

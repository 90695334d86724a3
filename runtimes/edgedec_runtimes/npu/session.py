"""One sequence's tokens and KV cache on an NPU's graph."""

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.npu.cache import KVCache
from edgedec_runtimes.npu.facts import PARTS
from edgedec_runtimes.shared.own_session import OwnSession

if TYPE_CHECKING:
    from edgedec_runtimes.npu.model import NpuModel


class NpuSession(OwnSession["NpuModel"]):
    """Implements edgedec.model.Session.

    Attributes:
        cache: Keys and values.
        tokens: int32[n_ctx], the token of each cached position: its block may be evaluated again.
    """

    def __init__(self, model: "NpuModel", n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self.cache = KVCache(model.facts)
        self.tokens = np.zeros(n_ctx, np.int32)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Raise SessionError: there are no trees to keep a path of."""
        with self._model.exclusive():
            self.state.leave_tree(rows)

    def fork(self) -> "NpuSession":
        """Open a second session with a copy of the cached prefix."""
        with self._model.exclusive():
            self.state.check_settled("forked")
            twin, n = self._model.session(self.n_ctx), self.n_cached
            twin.cache.take(self.cache.context, *self.cache.part(n))
            twin.tokens[:n] = self.tokens[:n]
            twin.state.restore(n, self.state.written[:, :n])
            return twin

    def save(self) -> bytes:
        """Serialize the tokens and the cached KV."""
        with self._model.exclusive():
            self.state.check_settled("saved")
            n = self.n_cached
            arrays = (self.tokens[:n], *self.cache.part(n))
            return self._saved_head(n) + b"".join(array.tobytes() for array in arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.exclusive():
            self.state.check_open()
            self._check_saved_tokens(n_tokens)
            facts = self._model.facts
            shape = len(PARTS), facts.n_layer, facts.n_head_kv
            cells = math.prod(shape) * facts.head_dim * n_tokens
            begin = self._saved_body(data, n_tokens, 4 * n_tokens + 2 * cells)
            self.tokens[:n_tokens] = np.frombuffer(data, np.int32, n_tokens, begin)
            offset = begin + 4 * n_tokens
            keys = np.frombuffer(data, np.uint8, cells, offset).reshape(*shape, facts.head_dim, n_tokens)
            values = np.frombuffer(data, np.uint8, cells, offset + cells).reshape(*shape, n_tokens, facts.head_dim)
            self.cache.take(facts.context_of(n_tokens), keys, values)
            self.state.restore(n_tokens, np.ones((facts.n_layer, n_tokens), np.bool_))

    def cancel(self) -> None:
        """Stop the forward that is running at the next multiple of 64 tokens; without one, nothing happens."""
        self._model.stop.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self.cache.free()

"""One sequence's tokens and KV cache on an NPU's graph."""

import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.model import Forward, ForwardItem, LayerSet, Rows
from edgedec.progress import OnProgress
from edgedec_runtimes.bookkeeping import SessionState
from edgedec_runtimes.onnx_npu.cache import KVCache

if TYPE_CHECKING:
    from edgedec_runtimes.onnx_npu.model import NpuModel

_SAVED = struct.Struct("<64sI")


class NpuSession:
    """Implements edgedec.model.Session.

    Attributes:
        state: What the cache holds.
        cache: Keys and values.
        tokens: int32[n_ctx], the token of each cached position: its block may be evaluated again.
    """

    def __init__(self, model: "NpuModel", n_ctx: int) -> None:
        """Begin empty."""
        self._model = model
        self.state = SessionState(n_ctx, model.card.n_layer)
        self.cache = KVCache(model.facts)
        self.tokens = np.zeros(n_ctx, np.int32)

    @property
    def model(self) -> "NpuModel":
        """The model this session belongs to."""
        return self._model

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self.state.n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache."""
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
        """Evaluate new rows of a chain; see edgedec.model.Session."""
        item = ForwardItem(self, n_past, tokens, hidden, resume_after, parents, layers, rows, taps)
        return self._model.forward_with_progress([item], on_progress)[0]

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
            return self._head(n) + b"".join(array.tobytes() for array in arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.exclusive():
            self.state.check_open()
            if not 0 <= n_tokens <= self.n_ctx:
                raise ModelFormatError(
                    f"the saved state holds {n_tokens} tokens, the session {self.n_ctx}; open a longer one"
                )
            head, facts = self._head(n_tokens), self._model.facts
            cells = facts.n_layer * facts.n_head_kv * facts.head_dim * n_tokens
            if data[: len(head)] != head or len(data) != len(head) + 4 * n_tokens + 2 * cells:
                raise ModelFormatError(
                    f"the saved state ({len(data)} bytes) is not one of {n_tokens} tokens of this model with these "
                    "options; evaluate the tokens again"
                )
            self.tokens[:n_tokens] = np.frombuffer(data, np.int32, n_tokens, len(head))
            offset, shape = len(head) + 4 * n_tokens, (facts.n_layer, facts.n_head_kv)
            keys = np.frombuffer(data, np.uint8, cells, offset).reshape(*shape, facts.head_dim, n_tokens)
            values = np.frombuffer(data, np.uint8, cells, offset + cells).reshape(*shape, n_tokens, facts.head_dim)
            self.cache.take(facts.context_of(n_tokens), keys, values)
            self.state.restore(n_tokens, np.ones((facts.n_layer, n_tokens), np.bool_))

    def _head(self, n_tokens: int) -> bytes:
        return _SAVED.pack(self._model.card.fingerprint.encode(), n_tokens)

    def cancel(self) -> None:
        """Stop the forward that is running at the next multiple of 64 tokens; without one, nothing happens."""
        self._model.stop.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self.cache.free()

"""One sequence's KV cache on the reference model, and the rules of what may be evaluated on it."""

import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CancelledError, ModelFormatError, RequestError, SessionError
from edgedec.model import Forward, ForwardItem, LayerSet, Rows
from edgedec.progress import OnProgress
from edgedec_runtimes.reference.network import KVCache

if TYPE_CHECKING:
    from edgedec_runtimes.reference.model import ReferenceModel

_SAVED = struct.Struct("<64sI")


@dataclass(frozen=True, slots=True)
class Branch:
    """The tree that the last forward left behind: row i lies in slot `n_past` + i."""

    n_past: int
    parents: tuple[int, ...]


class ReferenceSession:
    """Implements edgedec.model.Session."""

    def __init__(self, model: "ReferenceModel", cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._n_ctx = int(cache.keys.shape[1])
        self._n_cached = 0
        self._branch: Branch | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._running = False
        self._cancelled = False

    @property
    def model(self) -> "ReferenceModel":
        """The model this session belongs to."""
        return self._model

    @property
    def cache(self) -> KVCache:
        """Its keys and values."""
        return self._cache

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self._n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self._n_cached

    @property
    def is_branched(self) -> bool:
        """Whether the last forward was a tree of which no path was kept."""
        return self._branch is not None

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

    def check_open(self) -> None:
        """Raise SessionError once the session is closed."""
        if self._closed:
            raise SessionError("the session is closed; open another with model.session()")

    def begin(self, item: ForwardItem, n_rows: int, first_layer: int) -> None:
        """Drop what the cache holds beyond the item's n_past.

        A forward resumed mid-stack completes rows whose lower layers an earlier forward evaluated: their keys and
        values in those layers stay.
        """
        self._cache.written[first_layer:, item.n_past :] = False
        self._cache.written[:, item.n_past + n_rows :] = False
        self._n_cached = item.n_past
        self._branch = None

    def advance(self) -> None:
        """Count one more row of a chain as cached."""
        self._n_cached += 1

    def check_cancelled(self) -> None:
        """Raise CancelledError when cancel() was called during this forward."""
        if self._cancelled:
            raise CancelledError(f"the forward was cancelled; {self._n_cached} tokens are cached")

    def become_branched(self, parents: NDArray[np.int32]) -> None:
        """Remember the tree that was evaluated."""
        self._branch = Branch(self._n_cached, tuple(parents.tolist()))

    def set_running(self, running: bool) -> None:
        """Mark the beginning and the end of a forward; cancel() only counts in between."""
        with self._lock:
            self._running, self._cancelled = running, False

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        self.check_open()
        if self._branch is None:
            raise SessionError("keep() follows a forward with parents; there was none, or a path was kept already")
        path = np.asarray(rows).tolist()
        for previous, row in zip([-1, *path], path, strict=False):
            if not 0 <= row < len(self._branch.parents) or self._branch.parents[row] != previous:
                raise RequestError(f"rows {path} are no path from the root of the last tree")
        n_past = self._branch.n_past
        self._cache.move(n_past + np.array(path, dtype=np.intp), n_past)
        self._n_cached = n_past + len(path)
        self._cache.written[:, self._n_cached :] = False
        self._branch = None

    def fork(self) -> "ReferenceSession":
        """Open a second session with a copy of the cached prefix."""
        self._check_settled("forked")
        twin = self._model.session(self.n_ctx)
        for mine, theirs in zip(self._cache.arrays(), twin._cache.arrays(), strict=True):
            theirs[:, : self._n_cached] = mine[:, : self._n_cached]
        twin._n_cached = self._n_cached
        return twin

    def save(self) -> bytes:
        """Serialize the cached KV."""
        self._check_settled("saved")
        arrays = (np.ascontiguousarray(array[:, : self._n_cached]) for array in self._cache.arrays())
        head = _SAVED.pack(self._model.card.fingerprint.encode(), self._n_cached)
        return head + b"".join(array.tobytes() for array in arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        self.check_open()
        if not 0 <= n_tokens <= self.n_ctx:
            raise ModelFormatError(
                f"the saved state holds {n_tokens} tokens, the session {self.n_ctx}; open a longer one"
            )
        head = _SAVED.pack(self._model.card.fingerprint.encode(), n_tokens)
        arrays = [array[:, :n_tokens] for array in self._cache.arrays()]
        if data[: len(head)] != head or len(data) != len(head) + sum(array.nbytes for array in arrays):
            raise ModelFormatError(
                f"the saved state ({len(data)} bytes) is not one of {n_tokens} tokens of this model with these "
                "options; evaluate the tokens again"
            )
        offset = len(head)
        for array in arrays:
            array[:] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
            offset += array.nbytes
        self._cache.written[:, n_tokens:] = False
        self._n_cached, self._branch = n_tokens, None

    def _check_settled(self, what: str) -> None:
        self.check_open()
        if self._branch is not None:
            raise SessionError(f"a branched session can't be {what}; call keep first")

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        with self._lock:
            self._cancelled = self._running

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        self._closed = True
        self._branch, self._n_cached = None, 0
        self._cache = KVCache.empty(self._model.hyper, 0, self._cache.keys.dtype)

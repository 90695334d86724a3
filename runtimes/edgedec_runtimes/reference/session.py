"""One sequence's KV cache on the reference model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.reference.kv_cache import KVCache
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession


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

"""One sequence's tokens and KV cache on an NPU."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.npu.cache import KVCache
from edgedec_runtimes.npu.facts import PARTS, Facts
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession


class NpuSession(OwnSession):
    """Implements edgedec.model.Session.

    Attributes:
        cache: The keys and values.
        tokens: int32[n_ctx], the token at each cached position, as a block may be evaluated again.
    """

    def __init__(self, model: LibraryModel[Any, Any], facts: Facts, n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self._facts = facts
        self.cache = KVCache(facts)
        self.tokens = np.zeros(n_ctx, np.int32)

    def _fork(self) -> "NpuSession":
        """Return a second session with a copy of the cached prefix."""
        twin: NpuSession = self._model.session(self.n_ctx)
        n = self.n_cached
        twin.cache.take(self.cache.context, *self.cache.part(n))
        twin.tokens[:n] = self.tokens[:n]
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return self.tokens[:n], *self.cache.part(n)

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        shape, head_dim = (len(PARTS), self._facts.n_layer, self._facts.n_head_kv), self._facts.head_dim
        return (np.int32, (n,)), (np.uint8, (*shape, head_dim, n)), (np.uint8, (*shape, n, head_dim))

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Literal[True]:
        tokens, keys, values = arrays
        self.tokens[:n] = tokens
        self.cache.take(self._facts.context_of(n), keys, values)
        return True

    def _free(self) -> None:
        self.cache.free()

"""Keys and values of one sequence as the graph takes them: in two parts of 8 bits, as long as the context in use.

Slots behind the tokens that a forward builds on hold zeros, so that its bits cannot depend on anything left there:
hidden slots have no weight, but hardware that adds up in pieces may round differently by what they hold.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.npu.facts import LOW_ZERO, PARTS, Facts
from edgedec_runtimes.npu.inputs import Arrays

U8 = NDArray[np.uint8]


class KVCache:
    """The buffers of a session.

    Attributes:
        context: How many slots the buffers have now; the token at position i lies in slot i.
        keys: uint8[2, n_layer, n_head_kv, head_dim, context], high and low parts, rotated to their position.
        values: uint8[2, n_layer, n_head_kv, context, head_dim].
    """

    def __init__(self, facts: Facts) -> None:
        """Begin empty, with the shortest context."""
        self._facts = facts
        self.context = self._n_used = 0
        high = np.array(facts.zeros, np.uint8).reshape(-1, 2).T
        parts = np.stack((high, np.full_like(high, LOW_ZERO)), axis=1)
        self._zeros = parts[..., None, None, None]  # uint8[2, 2, n_layer, 1, 1, 1]: (keys, values), (high, low)
        self.keys, self.values = self._arrays(0)
        self.begin(facts.contexts[0], 0)

    def begin(self, context: int, n_kept: int) -> None:
        """Change to `context` slots; the first n_kept keep their contents, the others hold zeros."""
        if context != self.context:
            keys, values = self._arrays(context)
            keys[..., :n_kept], values[..., :n_kept, :] = self.part(n_kept)
            self.context, self.keys, self.values = context, keys, values
        else:
            self.keys[..., n_kept : self._n_used] = self._zeros[0]
            self.values[..., n_kept : self._n_used, :] = self._zeros[1]
        self._n_used = n_kept

    def part(self, n: int) -> tuple[U8, U8]:
        """Return views of the first n slots."""
        return self.keys[..., :n], self.values[..., :n, :]

    def take(self, context: int, keys: U8, values: U8) -> None:
        """Change to `context` slots, of which the first hold these keys and values of all layers."""
        n = keys.shape[-1]
        self.begin(context, 0)
        self.keys[..., :n], self.values[..., :n, :] = keys, values
        self._n_used = n

    def inputs(self) -> Arrays:
        """Return the graph's inputs of keys and values by name; they are views."""
        found: Arrays = {}
        for part, name in enumerate(PARTS):
            for layer in range(self._facts.n_layer):
                found[f"past_key_{name}_{layer}"] = self.keys[part, layer]
                found[f"past_value_{name}_{layer}"] = self.values[part, layer]
        return found

    def names(self) -> Iterator[str]:
        """Yield the names of the graph's outputs of keys and values, in the order in which `write` takes them."""
        for part in PARTS:
            for layer in range(self._facts.n_layer):
                yield f"new_key_{part}_{layer}"
                yield f"new_value_{part}_{layer}"

    def write(self, start: int, n: int, outputs: Sequence[NDArray[Any]]) -> None:
        """Copy the first n rows of the graph's outputs to the slots from `start` on."""
        self._n_used = max(self._n_used, start + n)
        found = iter(outputs)
        for keys, values in zip(self.keys, self.values, strict=True):
            for layer in range(self._facts.n_layer):
                keys[layer, :, :, start : start + n] = next(found)[:, :, :n]
                values[layer, :, start : start + n] = next(found)[:, :n]

    def free(self) -> None:
        """Free the memory."""
        self.context = self._n_used = 0
        self.keys, self.values = self._arrays(0)

    def _arrays(self, context: int) -> tuple[U8, U8]:
        f = self._facts
        shape = len(PARTS), f.n_layer, f.n_head_kv
        keys = np.broadcast_to(self._zeros[0], (*shape, f.head_dim, context)).copy()
        return keys, np.broadcast_to(self._zeros[1], (*shape, context, f.head_dim)).copy()

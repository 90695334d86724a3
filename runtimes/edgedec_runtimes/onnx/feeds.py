"""Makes the graph's inputs for some rows of a forward: tokens, positions, and the slots that each row may see.

Attention always gets an even number of rows: an odd number is padded by one row, whose result nobody reads, and whose
keys and values lie in the slot after the last, where the next row overwrites them. For a single row ONNX Runtime's
attention adds up in another order than for several rows; a single step that is evaluated as two rows has the bits of
the same row among many. Where other kernels differ too (Padding.ALL), they also get the padding row.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.shared.session_state import CheckedItem

CHUNK = 64
"""Rows of a long chain that one run of the graph takes; twice as many are no faster, and cancel() would wait longer."""

SPARE_ROWS = 2
"""Rows of logits that a run may return beyond the wanted ones."""

MASKED = np.float32(-1e30)
"""The bias that hides a slot: its exponential is exactly 0."""


class Padding(Enum):
    """Which part of the graph gets the padding row: all of it, or attention only."""

    ALL = "all"
    ATTENTION = "attention"


Arrays = dict[str, NDArray[Any]]


class Zeros:
    """Arrays of zeros that share their memory: a bias that hides no slot."""

    def __init__(self) -> None:
        self._flat = np.zeros(0, np.float32)

    def of(self, n_rows: int, n_columns: int) -> NDArray[np.float32]:
        """Return read-only zeros f32[1, 1, n_rows, n_columns]."""
        n = n_rows * n_columns
        if len(self._flat) < n:
            self._flat = np.zeros(2 * n, np.float32)
            self._flat.flags.writeable = False
        return self._flat[:n].reshape(1, 1, n_rows, n_columns)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [begin, end) of an item, which one run of the graph evaluates."""

    item: CheckedItem
    begin: int
    end: int

    @property
    def n_rows(self) -> int:
        """How many rows these are."""
        return self.end - self.begin

    @property
    def n_past(self) -> int:
        """Cached tokens that the rows build on."""
        return self.item.n_past + self.begin

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The rows' tokens, int32[n_rows]."""
        tokens = self.item.groups[0].tokens
        assert tokens is not None, "exports take tokens only"
        return tokens[self.begin : self.end]

    @property
    def logit_rows(self) -> NDArray[np.int32]:
        """The rows whose logits are wanted, int32, counted from the piece's first row."""
        first, last = np.searchsorted(self.item.logit_rows, (self.begin, self.end))
        return self.item.logit_rows[first:last] - self.begin


def even(n: int) -> int:
    """Return the smallest even number that is at least n.

    >>> even(0), even(1), even(8)
    (0, 2, 8)
    """
    return n + n % 2


def feeds(piece: Piece, export: Export, zeros: Zeros, padding: Padding, taps: Collection[int]) -> Arrays:
    """Return the graph's inputs for a piece by name, without the KV buffers.

    Args:
        piece: The rows.
        zeros: Memory for a bias that hides nothing.
        padding: Which part of the graph gets a padding row.
        taps: The layers whose output the graph is to return.
    """
    c, n, layers = piece.item, piece.n_rows, piece.item.groups[0].span.layers
    n_padded, n_past = even(n), piece.n_past
    n_graph, n_total = n_padded if padding is Padding.ALL else n, n_past + n_padded
    ids = np.empty((1, n_graph), np.int64)
    ids[0, :n], ids[0, n:] = piece.tokens, piece.tokens[-1]
    depths = np.arange(n_padded) if c.parents is None else _depths(c.parents, n_padded)
    arrays: Arrays = {
        "input_ids": ids,
        "position_ids": (n_past + depths[:n_graph])[None],
        "seqlens_k": np.array([n_total - 1], np.int32),
        "total_sequence_length": np.array(n_total, np.int32),
        "logit_rows": logit_rows(piece.logit_rows, padding),
        "attention_rows": attention_rows(n, padding),
        "attn_on": _switches(export.n_layer, None if layers is None else layers.attn),
        "mlp_on": _switches(export.n_layer, None if layers is None else layers.mlp),
        "tap_rows": np.zeros(export.n_layer, np.int64),
    }
    arrays["tap_rows"][list(taps)] = n
    arrays["attention_bias"] = zeros.of(n_padded, n_total) if c.parents is None else _tree_bias(c.parents, n_past)
    if export.local_layers:
        arrays["attention_bias_local"] = _local_bias(arrays["attention_bias"], n_past, depths, export.window)
    return arrays


def _switches(n_layer: int, switches: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    return np.ones(n_layer, np.bool_) if switches is None else np.array(switches, np.bool_)


def attention_rows(n: int, padding: Padding) -> NDArray[np.int64]:
    """Return the rows that attention gets for `n` rows, int64[even(n)].

    >>> attention_rows(3, Padding.ATTENTION).tolist(), attention_rows(3, Padding.ALL).tolist()
    ([0, 1, 2, 2], [0, 1, 2, 3])
    """
    rows = np.arange(even(n))
    return np.minimum(rows, n - 1) if padding is Padding.ATTENTION else rows


def logit_rows(row_numbers: NDArray[np.int32], padding: Padding) -> NDArray[np.int64]:
    """Return the rows that go through the head, int64: at least one row, and an even number with Padding.ALL.

    >>> logit_rows(np.array([2, 4, 5]), Padding.ALL).tolist(), logit_rows(np.array([]), Padding.ATTENTION).tolist()
    ([2, 4, 5, 5], [0])
    """
    rows = row_numbers.astype(np.int64) if len(row_numbers) else np.zeros(1, np.int64)
    n_more = 0 if padding is Padding.ATTENTION else even(len(rows)) - len(rows)
    return np.append(rows, rows[len(rows) - n_more :])


def _depths(parents: NDArray[np.int32], n_padded: int) -> NDArray[np.int64]:
    """Return the depth of each row of a tree, int64[n_padded]; a padding row is a root."""
    depths = np.zeros(n_padded, np.int64)
    for row, parent in enumerate(parents.tolist()):
        depths[row] = depths[parent] + 1 if parent >= 0 else 0
    return depths


def _tree_bias(parents: NDArray[np.int32], n_past: int) -> NDArray[np.float32]:
    """Return f32[1, 1, n, n_past + n]: 0 where a row sees a slot (prefix, ancestors, itself), else MASKED."""
    n, n_padded = len(parents), even(len(parents))
    hidden = np.ones((n_padded, n_padded), np.bool_)
    for row, parent in enumerate([*parents.tolist(), *[-1] * (n_padded - n)]):
        if parent >= 0:
            hidden[row] = hidden[parent]
        hidden[row, row] = False
    bias = np.zeros((1, 1, n_padded, n_past + n_padded), np.float32)
    bias[0, 0, :, n_past:][hidden] = MASKED
    return bias


def _local_bias(bias: NDArray[np.float32], n_past: int, depths: NDArray[np.int64], window: int) -> NDArray[np.float32]:
    """Return the bias for layers that see only the last `window` positions."""
    if n_past + int(depths.max()) < window:
        return bias
    positions = np.concatenate([np.arange(n_past), n_past + depths])
    too_far = (n_past + depths)[:, None] - positions[None] >= window
    return np.where(too_far, MASKED, bias).astype(np.float32, copy=False)

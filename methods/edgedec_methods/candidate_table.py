"""A bounded table from a context (the last tokens of a text) to the most probable tokens after it.

A context is one integer: its tokens in 20 bits each, the last one lowest, and above them a 1 that marks how many they
are. A row holds tokens that may follow a context, and their probabilities. A new row of a context is averaged with the
context's old one, newer rows weigh more, and the K most probable tokens stay. Many rows are learned at once, as a step
evaluates many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

K = 8  # tokens kept for each context
BITS = 20  # of a token in a context; the largest vocabularies hold 2^18 tokens
TOKEN_MASK = (1 << BITS) - 1
NO_TOKEN = TOKEN_MASK  # stands before the first token of a text
_ROW_BYTES = 8 * K
_KEY_BYTES = 166  # of a context: two integers, its number of visits, its entries in a list and a dictionary
_ENTRY_BYTES = _ROW_BYTES + _KEY_BYTES
_FIRST_CAPACITY = 256
_BATCH = 1024

Ids = NDArray[np.int32]
Probs = NDArray[np.float32]


def context_key(state: int, n_tokens: int) -> int:
    """Return the key of the context of the last `n_tokens` tokens of a state.

    A state holds the last tokens of a text in BITS bits each, the last one lowest.

    >>> context_key((7 << BITS) + 5, 1) == (1 << BITS) + 5
    True
    """
    shift = BITS * n_tokens
    return (state & ((1 << shift) - 1)) | (1 << shift)


def last_tokens(token_ids: Sequence[int], n_tokens: int) -> int:
    """Return the state after a text: its last `n_tokens` tokens, with NO_TOKEN before the first where it has fewer."""
    state = 0
    missing = n_tokens - len(token_ids)
    for token in [*[NO_TOKEN] * missing, *token_ids[max(0, -missing) :]]:
        state = (state << BITS) | token
    return state


@dataclass(slots=True)
class CandidateTable:
    """Rows of candidates by context. When the table is full, the context that was met first makes room for a new one.

    Attributes:
        limit_bytes: The most memory that the table may take.
        least_rate: The least weight of a new row in the average; 1 keeps the newest row only, 0 weighs all rows alike.
    """

    limit_bytes: int
    least_rate: float
    _slots: dict[int, int] = field(default_factory=dict)
    _keys: list[int] = field(default_factory=list)
    _oldest: int = 0
    _ids: Ids = field(default_factory=lambda: np.empty((0, K), np.int32))
    _probs: Probs = field(default_factory=lambda: np.empty((0, K), np.float32))
    _visits: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def resized(self, limit_bytes: int) -> "CandidateTable":
        """Return a table with that limit: this table, or an empty one where this table holds more."""
        if self.memory_bytes() > limit_bytes:
            return CandidateTable(limit_bytes, self.least_rate)
        self.limit_bytes = limit_bytes
        return self

    def row(self, key: int) -> tuple[list[int], list[float]]:
        """Return the K tokens after a context, most probable first, and their probabilities; none for an unknown one.

        Where fewer than K tokens are known, tokens of probability 0 stand in their places.
        """
        slot = self._slots.get(key)
        if slot is None:
            return [], []
        return self._ids[slot].tolist(), self._probs[slot].tolist()

    def visits(self, key: int) -> int:
        """Return how many rows of a context were learned."""
        slot = self._slots.get(key)
        return 0 if slot is None else self._visits[slot]

    def learn(self, keys: Sequence[int], ids: NDArray[np.int32], probs: NDArray[np.float32], prior: int = 0) -> None:
        """Average rows into their contexts; of several rows of one context in one call only the last one counts.

        Args:
            keys: n contexts.
            ids: int32[n, k], distinct tokens of each row, most probable first, for any k.
            probs: f32[n, k], their probabilities; each row sums to at most 1.
            prior: How many empty rows each context starts with. With 1, a token that is learned n times in a row has
                the probability n / (n + 1).
        """
        ids, probs = _k_columns(ids, probs)
        for begin in range(0, len(keys) if self.limit_bytes >= _ENTRY_BYTES else 0, _BATCH):
            end = begin + _BATCH
            self._learn(keys[begin:end], ids[begin:end], probs[begin:end], prior)

    def _learn(self, keys: Sequence[int], ids: Ids, probs: Probs, prior: int) -> None:
        slots = [self._slot(key) for key in keys]
        if prior or self.least_rate < 1:
            least = self.least_rate / (1 + prior)
            rates = [max(1 / (self._visits[slot] + 1 + prior), least) for slot in slots]
            rate = np.array(rates, np.float32)[:, None]
            ids, probs = _average(self._ids[slots], self._probs[slots], ids, probs, rate)
        self._ids[slots] = ids
        self._probs[slots] = probs
        for slot in slots:
            self._visits[slot] += 1

    def _slot(self, key: int) -> int:
        """Return the slot of a context's row; a new context gets an empty one, of the oldest context if need be."""
        slot = self._slots.get(key)
        if slot is not None:
            return slot
        slot = len(self._keys)
        if slot >= self.limit_bytes // _ENTRY_BYTES:
            slot = self._oldest
            self._oldest = (slot + 1) % len(self._keys)
            del self._slots[self._keys[slot]]
            self._keys[slot] = key
        else:
            self._keys.append(key)
            self._visits.append(0)
            if slot == len(self._ids):
                self._grow()
        self._slots[key] = slot
        self._ids[slot] = -1
        self._probs[slot] = 0
        self._visits[slot] = 0
        return slot

    def _grow(self) -> None:
        capacity = len(self._ids)
        more = min(max(capacity // 2, _FIRST_CAPACITY), self.limit_bytes // _ENTRY_BYTES - capacity)
        self._ids = np.concatenate([self._ids, np.empty((more, K), np.int32)])
        self._probs = np.concatenate([self._probs, np.empty((more, K), np.float32)])

    def memory_bytes(self) -> int:
        """Return about how much memory the table holds."""
        return len(self._ids) * _ROW_BYTES + len(self._keys) * _KEY_BYTES


def _k_columns(ids: Ids, probs: Probs) -> tuple[Ids, Probs]:
    """Return the rows with K columns: cut, or filled up with tokens of probability 0."""
    n, k = ids.shape
    if k >= K:
        return ids[:, :K], probs[:, :K]
    all_ids, all_probs = np.full((n, K), -1, np.int32), np.zeros((n, K), np.float32)
    all_ids[:, :k] = ids
    all_probs[:, :k] = probs
    return all_ids, all_probs


def _average(old_ids: Ids, old_probs: Probs, ids: Ids, probs: Probs, rate: Probs) -> tuple[Ids, Probs]:
    """Return (1 - rate) times the old rows plus rate times the new ones: the K most probable tokens of each sum."""
    new = probs * rate
    same = old_ids[:, :, None] == ids[:, None, :]  # tokens that fill rows up match each other, and add 0
    old = old_probs * (1 - rate) + np.matmul(same.astype(np.float32), new[:, :, None])[:, :, 0]
    new[same.any(axis=1)] = 0
    all_ids = np.concatenate([old_ids, ids], axis=1)
    all_probs = np.concatenate([old, new], axis=1)
    order = np.argsort(-all_probs, axis=1, kind="stable")[:, :K]
    rows = np.arange(len(ids))[:, None]
    return all_ids[rows, order], all_probs[rows, order]


def learn_text(table: CandidateTable, token_ids: Sequence[int], n_tokens: int) -> None:
    """Learn from a text the contexts of `n_tokens` tokens that the table lacks: which tokens followed them how often.

    A token that followed n of m times has the probability n / (m + 1).
    """
    mask, mark = (1 << BITS * n_tokens) - 1, 1 << BITS * n_tokens
    state = last_tokens([], n_tokens)
    followers: dict[int, dict[int, int]] = {}
    for token in token_ids:
        key = state | mark
        if key not in table:
            counts = followers.setdefault(key, {})
            counts[token] = counts.get(token, 0) + 1
        state = ((state << BITS) | token) & mask
    ids = np.full((len(followers), K), -1, np.int32)
    probs = np.zeros((len(followers), K), np.float32)
    for row, counts in enumerate(followers.values()):
        best = sorted(counts.items(), key=lambda item: -item[1])[:K]
        total = sum(counts.values()) + 1
        ids[row, : len(best)] = [token for token, _ in best]
        probs[row, : len(best)] = [count / total for _, count in best]
    table.learn(list(followers), ids, probs)

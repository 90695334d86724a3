"""A model of a few tokens whose every conditional distribution is known, as branches for the searches.

    texts = table_texts(random_table(0, n_vocab=3), max_tokens=4)

Token 0 ends a text; token i is written as the i-th letter of "abc...".
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import PartialTexts
from edgedec.decoding.branches import Branches

END = 0
Ids = tuple[int, ...]
Table = Mapping[Ids, NDArray[np.float32]]
"""text -> f32[n_vocab], the logits that follow."""


def random_table(seed: int, *, n_vocab: int, length: int, spread: float = 1.5) -> Table:
    """Return random logits after every text of fewer than `length` tokens none of which ends it, and after those."""
    rng = np.random.default_rng(seed)
    return {
        ids: (spread * rng.standard_normal(n_vocab)).astype(np.float32)
        for n in range(length + 1)
        for ids in product(range(1, n_vocab), repeat=n)
    }


class TableBranches(Branches):
    """Branches of a table; counts forwards and rows, and knows which branches are open."""

    root = 0

    def __init__(self, table: Table) -> None:
        self.table = table
        self.logits = table[()]
        self.held: dict[int, Ids] = {0: ()}
        self.n_opened = 1

    @property
    def names(self) -> tuple[int, ...]:
        """The branches that are open."""
        return tuple(self.held)

    def fork(self, branch: int, n: int = 1) -> list[int]:
        """Open n branches with the same text."""
        opened = list(range(self.n_opened, self.n_opened + n))
        self.held |= dict.fromkeys(opened, self.held[branch])
        self.n_opened += n
        return opened

    def drop(self, branch: int) -> None:
        """Forget a branch; KeyError where it is not open."""
        del self.held[branch]

    def forward(
        self, tokens: Mapping[int, Sequence[int]], *, rows: Literal["last", "all"] = "last"
    ) -> dict[int, NDArray[np.float32]]:
        """Add tokens, and return the logits behind them; behind the end of the table its last rows are repeated."""
        assert rows == "last"
        for branch, ids in tokens.items():
            assert ids, "a branch gets at least one token"
            self.held[branch] += tuple(ids)
        return {branch: self.table[self.held[branch]][None] for branch in tokens}


def letters(ids: Sequence[int]) -> str:
    """Return tokens as letters: 1 is a, 2 is b."""
    return "".join(chr(ord("a") + token - 1) for token in ids)


def table_texts(table: Table, max_tokens: int, stop: Sequence[str] = ()) -> tuple[PartialTexts, TableBranches]:
    """Return texts over a table, and their branches."""
    branches = TableBranches(table)
    texts = PartialTexts(
        branches, (1,), is_end=lambda token: token == END, decode=letters, max_tokens=max_tokens, stop=stop
    )
    return texts, branches


def log_law(table: Table, ids: Ids) -> float:
    """Return the log-probability of tokens, an end token among them."""
    total = 0.0
    for i, token in enumerate(ids):
        row = table[ids[:i]].astype(np.float64)
        total += float(row[token] - np.log(np.exp(row).sum()))
    return total


def whole_texts(table: Table, n_vocab: int, max_tokens: int) -> dict[Ids, float]:
    """Return every text with its log-probability: those that end, with their end token, and those of max_tokens."""
    found = dict[Ids, float]()
    for n in range(max_tokens + 1):
        for ids in product(range(1, n_vocab), repeat=n):
            if n == max_tokens:
                found[ids] = log_law(table, ids)
            else:
                found[(*ids, END)] = log_law(table, (*ids, END))
    return found

"""A grammar of a few texts of tokens, for models of a few tokens: support.decoding.table_branches has such models."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import DeadEndError
from edgedec.grammar import Predicate
from support.decoding.table_branches import END, Ids, Table, log_law


class LanguageState:
    """Implements edgedec.constraint.GrammarState: the texts of a list.

    Args:
        texts: The texts, as tokens without an end token.
        n_vocab: Number of tokens.
        dead: Beginnings that may be written, though no text of the grammar begins so.
    """

    predicate: Predicate | None = None

    def __init__(self, texts: Collection[Ids], n_vocab: int, dead: Collection[Ids] = ()) -> None:
        self._texts, self._n_vocab = set(texts), n_vocab
        self._beginnings = {text[:n] for text in [*texts, *dead] for n in range(len(text) + 1)}
        self._taken: Ids = ()
        self.n_closed = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return END in self._taken or (self.may_end and not any(self._next()))

    @property
    def may_end(self) -> bool:
        """Whether the text is one of the list."""
        return END in self._taken or self._taken in self._texts

    def _next(self) -> list[bool]:
        return [(*self._taken, token) in self._beginnings for token in range(self._n_vocab)]

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may follow."""
        found = np.array(self._next())
        found[END] = self.may_end
        if not found.any():
            raise DeadEndError(f"nothing may follow {self._taken}")
        return found

    def forced(self) -> Sequence[int]:
        """Return no token."""
        return ()

    def advance(self, token_id: int) -> bool:
        """Take a token where it may follow."""
        is_allowed = not self.is_complete and bool(self.allowed()[token_id])
        self._taken += (token_id,) * is_allowed
        return is_allowed

    def back(self, n_tokens: int) -> None:
        """Take tokens back."""
        self._taken = self._taken[: len(self._taken) - n_tokens]

    def close(self) -> None:
        """Count the calls."""
        self.n_closed += 1


def kept_law(table: Table, texts: Collection[Ids], n_vocab: int) -> tuple[dict[Ids, float], float]:
    """Return the law of the model's texts, given that they keep to a language, and the probability that they do.

    A text ends by an end token, which the law has at its end, or where no text of the language is longer.
    """
    longer = {text[:n] for text in texts for n in range(len(text))}
    ends = [(*text, END) if text in longer else text for text in texts]
    weights = {ids: math.exp(log_law(table, ids)) for ids in ends}
    mass = sum(weights.values())
    return {ids: weight / mass for ids, weight in weights.items()}, mass


def divergence(found: Mapping[Ids, float], law: Mapping[Ids, float]) -> float:
    """Return KL(found || law); infinite where `found` has a text that the law rules out."""
    return sum(p * math.log(p / law[ids]) if ids in law else math.inf for ids, p in found.items() if p > 0)

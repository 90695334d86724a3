"""Where a text stands in a table of n-grams, and what a step of decoding teaches the table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Candidates, Draft, DraftContext, DrafterNeeds, Verification, store_limit
from edgedec.drafters.ngram.table import BITS, CandidateTable, K, context_key, last_tokens, learn_text
from edgedec.drafters.ngram.tree_growth import Child, Children, grow

_MAX_PROMPT = 8_192  # last tokens of a prompt that are looked at
_TEXT_BYTES = 8_192  # of a text and its last draft


def stored_table(context: DraftContext, name: str, least_rate: float) -> CandidateTable:
    """Return the table that a drafter keeps in the context's store under its name, made where there is none.

    It takes at most 32 MB, and half of the context's budget.
    """
    limit_bytes = store_limit(context.budget_bytes)
    table = context.store.setdefault(name, CandidateTable(limit_bytes, least_rate))
    assert isinstance(table, CandidateTable), "the store's entry of this name is ours"
    context.store[name] = table = table.resized(limit_bytes)
    return table


@dataclass(slots=True)
class NgramText:
    """A text that is being written, and the table that knows what mostly follows its last tokens.

    Attributes:
        table: Rows by context.
        orders: How many tokens the contexts have, longest first.
        state: The text's last tokens, as many as the longest context has.
        length: Tokens of the text, prompt included: the absolute position of the next one.
    """

    table: CandidateTable
    orders: tuple[int, ...]
    state: int = 0
    length: int = 0

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start with a prompt; contexts that the table lacks are filled in from it."""
        self.state = last_tokens(token_ids, self.orders[0])
        self.length = len(token_ids)
        for order in self.orders:
            learn_text(self.table, token_ids[-_MAX_PROMPT:], order)

    def longest(self, state: int) -> tuple[int, list[int], list[float]]:
        """Return the longest known context at a state's end: its number of tokens, its candidates, their probabilities.

        0 and no candidates where none is known.
        """
        for order in self.orders:
            ids, probs = self.table.row(context_key(state, order))
            if ids:
                return order, ids, probs
        return 0, [], []

    def draft(self, n_max: int, children: Children) -> Draft:
        """Grow a draft after the text."""
        return grow(self.state, self.orders[0], n_max, children)

    def accept(self, verification: Verification) -> None:
        """Learn from a step and go on behind the tokens that the text got."""
        states = [self.state]
        mask = (1 << BITS * self.orders[0]) - 1
        for token in verification.token_ids:
            states.append(((states[-1] << BITS) | token) & mask)
        before, self.state = self.state, states.pop()
        self.length += len(verification.token_ids)
        if verification.candidates is None:
            self._learn_tokens(states, verification.token_ids)
        else:
            self._learn_rows(before, verification.candidates, verification.token_ids)

    def _learn_tokens(self, states: list[int], token_ids: Sequence[int]) -> None:
        keys = [context_key(state, order) for order in self.orders for state in states]
        ids = np.array([*token_ids] * len(self.orders), np.int32)[:, None]
        self.table.learn(keys, ids, np.ones(ids.shape, np.float32), prior=1)

    def _learn_rows(self, state: int, candidates: Candidates, token_ids: Sequence[int]) -> None:
        """Learn every evaluated row, those that the text went along last."""
        mask = (1 << BITS * self.orders[0]) - 1
        tokens, parents = candidates.tokens.tolist(), candidates.parents.tolist()
        states = [state]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            states.append(((states[parent] << BITS) | token) & mask)
        path = _path(tokens, parents, token_ids)
        rows = [row for row in range(len(tokens)) if row not in path] + path
        keys = [context_key(states[row], order) for order in self.orders for row in rows]
        taken = rows * len(self.orders)
        self.table.learn(keys, candidates.ids[taken], candidates.probs[taken])

    def memory_bytes(self) -> int:
        """Return about how much memory it and its table hold."""
        return self.table.memory_bytes() + _TEXT_BYTES


def _path(tokens: list[int], parents: list[int], token_ids: Sequence[int]) -> list[int]:
    """Return the rows that the text went along, the first one included."""
    children = {(parent, token): row for row, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    for token in token_ids:
        row = children.get((path[-1], token))
        if row is None:
            break
        path.append(row)
    return path


class NgramDrafter:
    """What drafters on a table of n-grams have in common; a subclass says which children a state has.

    Implements edgedec.draft.Drafter. The table outlives the request, within 32 MB and half of the budget; when it is
    full, the context that was met first makes room.
    """

    def __init__(self, context: DraftContext, name: str, orders: tuple[int, ...], least_rate: float) -> None:
        self._text = NgramText(stored_table(context, name, least_rate), orders)

    @property
    def needs(self) -> DrafterNeeds:
        """The target's candidates."""
        return DrafterNeeds(candidates=K)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self._text.begin(token_ids)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Grow a tree from the text's last tokens, most probable paths first."""
        return self._text.draft(n_max, self._children)

    def _children(self, state: int, depth: int) -> list[Child]:
        raise NotImplementedError

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the rows of the step, or, without candidates, the tokens that the text got."""
        self._text.accept(verification)

    def memory_bytes(self) -> int:
        """Return about how much memory it and its table hold."""
        return self._text.memory_bytes()

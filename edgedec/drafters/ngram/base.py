"""Drafts from a table of n-grams, which every step of decoding teaches."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds, store_limit
from edgedec.drafter_traits import Shedding
from edgedec.drafters.draft_builder import Child, grow_tree, path_of
from edgedec.drafters.ngram.ranking import Ranking
from edgedec.drafters.ngram.table import BITS, CandidateTable, K, context_key, last_tokens, learn_text

_MAX_PROMPT = 8_192  # only so many last tokens of a prompt are learned
_TEXT_BYTES = 8_192  # memory of a drafter beside its table
_LEAST_PATH = 0.005  # a path less probable than this is not worth a row


class NgramDrafter:
    """Implements edgedec.drafter.Drafter: the longest context at the text's end that the table knows is continued.

    The table outlives the request. It takes at most 32 MB and half of the drafter's budget; when it is full, the
    context that was met first makes room for a new one.

    Args:
        context: The generation's.
        name: The key of the table in the context's store.
        rankings: By the number of tokens of a context, how its candidates are ranked; longest contexts first.
        least_rate: The least weight of a new row in the table (see CandidateTable).
    """

    needs = DrafterNeeds(candidates=K)
    shedding = Shedding(20, "the table of {name}", keeps_store=True)

    def __init__(self, context: DraftContext, name: str, rankings: Mapping[int, Ranking], least_rate: float) -> None:
        limit_bytes = store_limit(context.budget_bytes)
        self._lock = context.lock
        with self._lock:
            table = context.store.setdefault(name, CandidateTable(limit_bytes, least_rate))
            assert isinstance(table, CandidateTable), "the store's entry of this name is ours"
            self.table = context.store[name] = table.resized(limit_bytes)
        self._rankings = rankings
        self._n_tokens = max(rankings)
        self._state = 0  # the text's last tokens, as many as the longest context has
        self._length = 0  # tokens of the text, prompt included: the position of the next one

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which teaches the table the contexts that it lacks."""
        self._state = last_tokens(token_ids, self._n_tokens)
        self._length = len(token_ids)
        with self._lock:
            for order in self._rankings:
                learn_text(self.table, token_ids[-_MAX_PROMPT:], order)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Grow a tree of at most `n_max` nodes from the text's last tokens, most probable paths first."""
        with self._lock:
            return grow_tree(
                self._state, self._children, self._follow, n_max=n_max, least_path=_LEAST_PATH, older_first=False
            )

    def _follow(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        return ((state << BITS) | token) & ((1 << BITS * self._n_tokens) - 1)

    def _children(self, state: int, depth: int) -> list[Child]:
        """Return the tokens that may follow a state `depth` tokens behind the text, highest score first."""
        order, ids, probs = self.longest(state)
        return self._rankings[order].rank(ids, probs, self._length + depth) if order else []

    def longest(self, state: int) -> tuple[int, list[int], list[float]]:
        """Return the longest known context at a state's end: its number of tokens, its candidates, their probabilities.

        Where no context is known, these are 0 and two empty lists.
        """
        for order in self._rankings:
            ids, probs = self.table.row(context_key(state, order))
            if ids:
                return order, ids, probs
        return 0, [], []

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Learn the target's candidates after each row of the step or, without candidates, the tokens of the text."""
        states = [self._state]
        for token in verification.token_ids:
            states.append(self._follow(states[-1], token))
        before, self._state = self._state, states.pop()
        self._length += len(verification.token_ids)
        with self._lock:
            if verification.candidates is not None:
                self._learn_rows(before, verification.candidates, verification.token_ids)
                return
            ids = np.array([*verification.token_ids] * len(self._rankings), np.int32)[:, None]
            self.table.learn(self._keys(states), ids, np.ones(ids.shape, np.float32), prior=1)

    def _learn_rows(self, state: int, candidates: Candidates, token_ids: Sequence[int]) -> None:
        """Learn every evaluated row; those of the accepted path are learned last, so that they stay."""
        tokens, parents = candidates.tokens.tolist(), candidates.parents.tolist()
        states = [state]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            states.append(self._follow(states[parent], token))
        path = [0, *path_of(tokens, parents, token_ids, root=0)]
        rows = [row for row in range(len(tokens)) if row not in path] + path
        every = rows * len(self._rankings)
        self.table.learn(self._keys([states[row] for row in rows]), candidates.ids[every], candidates.probs[every])

    def _keys(self, states: Sequence[int]) -> list[int]:
        """Return the keys of all contexts at these states' ends, order by order."""
        return [context_key(state, order) for order in self._rankings for state in states]

    def memory_bytes(self) -> int:
        """Return about how much memory the drafter and its table hold."""
        return self.table.memory_bytes() + _TEXT_BYTES

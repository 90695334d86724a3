"""cascade: the draft model's draft for fewer forwards of it, as it checks a cheap drafter's tokens in one.

A hierarchy of speculation: cheap tokens -> draft model -> target (SpecMQuant, Zhang et al. 2025, arXiv:2505.22179;
Spector and Re 2023, arXiv:2308.04623). The draft model evaluates the chain of cheap tokens in one forward and goes on
from the row where what it would draw itself is another token. So the draft is the draft model's own, whatever the cheap
tokens were. That holds for a chain drawn from q under the opt-in rules, too: a cheap token is a row that may be of use,
never a token of the draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, DrafterFactory, DrafterNeeds, Verification
from edgedec.drafters.draft_model.model import DraftModel, ModelDrafter
from edgedec.drafters.suffix.suffix import SuffixDrafter

_NODES = 16  # asked of the cheap drafter
_LEAST_PATH = 0.15  # of a cheap token: a row more takes about a tenth of a forward
_REMEMBERED = 8192  # last tokens of a prompt whose pairs are remembered
_AFTER_PAIR = 3
_DRAWS = 0x4361736361644472  # sets the numbers that it draws with apart from a "model" drafter's beside it


class CascadeModel:
    """Makes the drafter of each generation around a loaded draft model (a ModelFactory).

    Attributes:
        source: The draft model; may serve a "model" drafter, too.
        cheap: Makes the cheap drafter.
    """

    def __init__(self, source: DraftModel, cheap: DrafterFactory = SuffixDrafter) -> None:
        self.source = source
        self.cheap = cheap

    def __call__(self, context: DraftContext) -> "CascadeDrafter":
        """Make the drafter of one generation."""
        return CascadeDrafter(self.source, self.cheap, context)

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.source.forget()

    def summary(self) -> str:
        """Name the draft model, and the memory that keeping it takes."""
        return self.source.summary()

    def close(self) -> None:
        """Free the draft model."""
        self.source.close()


class CascadeDrafter:
    """Implements edgedec.draft.Drafter."""

    def __init__(self, source: DraftModel, cheap: DrafterFactory, context: DraftContext) -> None:
        # A store of its own: a cheap drafter of the same kind may be at work beside this one.
        store = context.store.setdefault("cascade", {})
        assert isinstance(store, dict), "the store's entry of this name is ours"
        budget = None if context.budget_bytes is None else context.budget_bytes // 2
        self._cheap = cheap(replace(context, store=store, budget_bytes=budget))
        self._model = ModelDrafter(source, context, self._ahead, label=_DRAWS)
        self._tree = EMPTY_DRAFT
        self._pairs = _Pairs()

    @property
    def needs(self) -> DrafterNeeds:
        """What the cheap drafter asks of the target."""
        return self._cheap.needs

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self._model.begin(token_ids)
        self._cheap.begin(token_ids)
        self._tree = EMPTY_DRAFT
        self._pairs = _Pairs()
        for token in token_ids[-_REMEMBERED:]:
            self._pairs.add(token)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Draft what the draft model would draft."""
        self._tree = self._cheap.draft(_NODES, deadline_s)
        return self._model.draft(n_max, deadline_s)

    def _ahead(self, drafted: list[int], n_most: int) -> list[int]:
        """Return what the cheap drafter expects after the tokens drafted; off its tree, what followed their end."""
        path = path_of(self._tree, drafted)
        if len(path) == len(drafted) and len(self._tree):
            return likely_chain(self._tree, path[-1] if path else -1, n_most)
        return self._pairs.after(drafted, n_most)

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._model.accept(verification, hidden)
        path = path_of(self._tree, verification.token_ids)
        self._cheap.accept(replace(verification, path=tuple(path)), hidden)
        self._tree = EMPTY_DRAFT
        for token in verification.token_ids:
            self._pairs.add(token)

    def memory_bytes(self) -> int:
        """Return about how much memory it and the cheap drafter hold."""
        return self._model.memory_bytes() + self._cheap.memory_bytes() + self._pairs.memory_bytes()


class _Pairs:
    """Where each pair of neighbouring tokens came last (prompt lookup, Saxena 2023)."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add(self, token: int) -> None:
        """Append a token."""
        self._text.append(token)
        if len(self._text) >= 2:
            self._places[self._text[-2], token] = len(self._text)

    def after(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return what followed the last pair of the text with these tokens at its end."""
        end = [*self._text[-2:], *tokens][-2:]
        if len(end) < 2 or not tokens:
            return []
        place = self._places.get((end[0], end[1]), len(self._text))
        return self._text[place : place + min(n_most, _AFTER_PAIR)]

    def memory_bytes(self) -> int:
        """Return about how much memory it holds."""
        return 8 * len(self._text) + 220 * len(self._places)


def path_of(tree: Draft, token_ids: Sequence[int]) -> list[int]:
    """Return the nodes that are the first of these tokens, root first, as far as the tree has them.

    >>> path_of(Draft.tree([5, 6, 7], [-1, 0, 0], [0.9, 0.6, 0.4]), [5, 7, 8])
    [0, 2]
    """
    nodes = {
        (parent, token): node
        for node, (parent, token) in reversed(
            list(enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)))
        )
    }
    path: list[int] = []
    for token in token_ids:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def likely_chain(tree: Draft, node: int, n_most: int) -> list[int]:
    """Return the tokens of the most probable chain below a node (-1: the root), while they are probable enough.

    >>> likely_chain(Draft.tree([5, 6, 7], [-1, 0, 0], [0.9, 0.4, 0.6]), -1, 4)
    [5, 7]
    """
    tokens, parents, p_accept = tree.tokens.tolist(), tree.parents.tolist(), tree.p_accept.tolist()
    chain: list[int] = []
    path = 1.0
    while len(chain) < n_most:
        children = [child for child in range(node + 1, len(tokens)) if parents[child] == node]
        if not children:
            break
        node = max(children, key=lambda child: p_accept[child])
        path *= p_accept[node]
        if path < _LEAST_PATH:
            break
        chain.append(tokens[node])
    return chain

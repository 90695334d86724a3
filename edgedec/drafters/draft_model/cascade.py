"""cascade: the draft model's draft for fewer forwards of it, as it checks a cheap drafter's tokens in one.

A hierarchy of speculation: cheap tokens -> draft model -> target (SpecMQuant, Zhang et al. 2025, arXiv:2505.22179;
Spector and Re 2023, arXiv:2308.04623). The draft model evaluates a chain of cheap tokens in one forward, and goes on
from the row after which it would draw another token itself. So the draft is the draft model's own, whatever the cheap
tokens were. That holds for a chain drawn from q under the opt-in rules, too: a cheap token is a row that may be of use,
never a token of the draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import Closing, DraftContext, DrafterFactory, DrafterNeeds
from edgedec.drafter_traits import DrafterTraits, Shedding
from edgedec.drafters.draft_builder import path_of
from edgedec.drafters.draft_model.model import DraftModel, DraftModelUser, ModelDrafter
from edgedec.drafters.suffix.suffix import STORE, SuffixDrafter

_NODES = 16  # most nodes of a cheap draft
_LEAST_PATH = 0.15  # a cheap token less probable is not evaluated: a row more takes about a tenth of a forward
_REMEMBERED = 8192  # only of so many last tokens of a prompt are the pairs remembered
_AFTER_PAIR = 3  # most tokens that a pair of tokens proposes
_DRAWS = 0x4361736361644472  # sets the drawn numbers apart from those of a "model" drafter beside this one


class CascadeModel(DraftModelUser):
    """Makes the drafter of each generation around a loaded draft model (an edgedec.drafter.ModelFactory).

    Attributes:
        source: The draft model; it may serve a "model" drafter, too.
        cheap: Makes the cheap drafter.
        demands: What its drafters need at load.
        shedding: The cheap drafter's store, which goes first.
    """

    demands = DraftModel.demands
    shedding = Shedding(spared=STORE)

    def __init__(self, source: DraftModel, cheap: DrafterFactory = SuffixDrafter) -> None:
        super().__init__(source)
        self.cheap = cheap

    def __call__(self, context: DraftContext) -> "CascadeDrafter":
        """Make the drafter of one generation."""
        return CascadeDrafter(self.source, self.cheap, context)


class CascadeDrafter:
    """Implements edgedec.drafter.Drafter.

    Attributes:
        own_s: Seconds of this thread that the latest draft took beside forwards of the draft model.
        traits: What the draft model's own drafter declares.
    """

    def __init__(self, source: DraftModel, cheap: DrafterFactory, context: DraftContext) -> None:
        # A store of its own: a cheap drafter of the same kind may be at work beside this one.
        self.own_s = 0.0
        self._cheap = cheap(replace(context, store=context.store.half("cascade")))
        self._model = ModelDrafter(source, context, self._ahead, label=_DRAWS)
        self.traits: DrafterTraits = self._model.traits
        self._tree = EMPTY_DRAFT
        self._pairs = _Pairs()

    @property
    def needs(self) -> DrafterNeeds:
        """What the cheap drafter needs of the target."""
        return self._cheap.needs

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt."""
        self._model.begin(token_ids)
        self._cheap.begin(token_ids)
        self._tree = EMPTY_DRAFT
        self._pairs = _Pairs()
        for token in token_ids[-_REMEMBERED:]:
            self._pairs.add(token)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return the draft that the draft model alone would return."""
        begun = perf_counter()
        self._tree = self._cheap.propose(_NODES, deadline_s)
        cheap_s = perf_counter() - begun
        draft = self._model.propose(n_max, deadline_s)
        self.own_s = cheap_s + self._model.own_s
        return draft

    @property
    def calls(self) -> Sequence[SharedForward]:
        """The draft model's forwards for the latest draft, each with what it was joined into."""
        return self._model.calls

    def _ahead(self, drafted: list[int], n_most: int) -> list[int]:
        """Return tokens that may follow `drafted`: the cheap drafter's; off its tree, what followed the last pair."""
        path = path_of(self._tree.tokens, self._tree.parents, drafted)
        if len(path) == len(drafted) and len(self._tree):
            return likely_chain(self._tree, path[-1] if path else -1, n_most)
        return self._pairs.after(drafted, n_most)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._model.learn(verification, hidden)
        path = path_of(self._tree.tokens, self._tree.parents, verification.token_ids)
        self._cheap.learn(replace(verification, path=tuple(path)), hidden)
        self._tree = EMPTY_DRAFT
        for token in verification.token_ids:
            self._pairs.add(token)

    def close(self) -> None:
        """End the cheap drafter, give the draft model's session back; calling close() again does nothing."""
        if isinstance(self._cheap, Closing):
            self._cheap.close()
        self._model.close()

    def memory_bytes(self) -> int:
        """Return about how much memory the drafter and the cheap drafter hold."""
        return self._model.memory_bytes() + self._cheap.memory_bytes() + self._pairs.memory_bytes()


class _Pairs:
    """A text, and where each pair of neighbouring tokens came last in it (prompt lookup, Saxena 2023)."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add(self, token: int) -> None:
        """Append a token."""
        self._text.append(token)
        if len(self._text) >= 2:
            self._places[self._text[-2], token] = len(self._text)

    def after(self, tokens: Sequence[int], n_most: int) -> list[int]:
        """Return at most `n_most` tokens that followed the pair at the end of the text with `tokens` behind it."""
        end = [*self._text[-2:], *tokens][-2:]
        if len(end) < 2 or not tokens:
            return []
        place = self._places.get((end[0], end[1]), len(self._text))
        return self._text[place : place + min(n_most, _AFTER_PAIR)]

    def memory_bytes(self) -> int:
        """Return about how much memory the text and the pairs take."""
        return 8 * len(self._text) + 220 * len(self._places)


def likely_chain(tree: Draft, node: int, n_most: int) -> list[int]:
    """Return at most `n_most` tokens of the most probable chain below a node (-1: the last accepted token).

    The chain ends where its path probability is too small for a row.

    >>> likely_chain(Draft.tree([5, 6, 7], [-1, 0, 0], [0.9, 0.4, 0.6]), -1, 4)
    [5, 7]
    """
    tokens, parents, p_accept = tree.tokens, tree.parents, tree.p_accept
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

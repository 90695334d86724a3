"""model: a smaller model with the same tokenizer drafts a chain with its next best tokens as leaves, or a tree.

Speculative sampling with a draft model (Leviathan et al. 2023, arXiv:2211.17192), whose tokens are chosen as
edgedec.drafters.levels says. The chain goes on while its path probability pays for a forward of the draft model. Leaves
cost no forward. Whether the chain goes on is decided by the nodes that are there, before the next one is drawn, as the
opt-in verification rules need it. Other shapes (edgedec.tree_shapes) are grown level by level in
edgedec.drafters.drawn_trees, with one forward for all nodes of a level.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, DrafterFactory, DrafterNeeds, ForwardLog, Verification
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.drafters.drawn_trees import draw_tree, grow_ranked
from edgedec.drafters.levels import LevelMaker, agreement
from edgedec.memory_plan import format_bytes
from edgedec.model import Forward, Model
from edgedec.tree_shapes import CHAIN

WINDOW = 1024  # tokens of the draft model's KV cache
SMALL_WINDOW = 256  # tokens of that cache where memory is short
ROWS = 9  # rows of logits that a draft model is loaded for: a token and what a cheap drafter expects after it
_FIRST = 64  # last tokens of a prompt that are read: what needs more of it, the suffix drafter proposes already
_LEAST_LEAF = 0.02  # a leaf of a smaller path probability is left out
_DRAWS = 0x4D6F64656C447277  # sets the drawn numbers apart from those of other drafters

Ahead = Callable[[list[int], int], list[int]]
T = TypeVar("T")


@runtime_checkable
class ModelFactory(DrafterFactory, Protocol):
    """A DrafterFactory that holds a loaded model, which its drafters evaluate."""

    def forget(self) -> None:
        """Forget the tokens that the model's session holds, so that the next generation reads its prompt anew."""

    def summary(self) -> str:
        """Return the model's name and the memory that it takes, for a person."""

    def close(self) -> None:
        """Free the model; calling it again does nothing."""


class DraftModel:
    """A loaded draft model with one session; makes the drafter of each generation (a ModelFactory).

    Attributes:
        model: The draft model.
        session: The draft model's session, which holds a window of the text.
        cached: The tokens that the session holds.
        recorder: Where each forward is logged while drafts are recorded; else None.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.session = model.session(WINDOW)
        self.cached: list[int] = []
        self.recorder: ForwardLog | None = None

    def __call__(self, context: DraftContext) -> "ModelDrafter":
        """Make the drafter of one generation."""
        return ModelDrafter(self, context)

    def forget(self) -> None:
        """Forget the tokens that the session holds, so that the next generation reads its prompt anew."""
        self.cached = []

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes of the draft model, KV cache included, and of the KV cache alone.

        They are counted as planned, because a new plan may take memory itself.
        """
        terms = [term for term in self.model.memory(WINDOW, ROWS) if not term.base]
        n_planned = sum(term.n_bytes for term in terms if term.name == "KV cache")
        n_kv = n_planned * self.session.n_ctx // WINDOW
        return sum(term.n_bytes for term in terms) - n_planned + n_kv, n_kv

    def summary(self) -> str:
        """Return the draft model's name and the memory that it takes, for a person."""
        card = self.model.card
        return f"the draft model {card.name or card.architecture} ({format_bytes(self.held_bytes()[0])})"

    def shrink(self) -> None:
        """Go on with a smaller window, whose KV cache takes less memory (raises what Model.session raises)."""
        self.session.close()
        self.cached = []
        self.session = self.model.session(SMALL_WINDOW)

    def close(self) -> None:
        """Free the draft model."""
        self.model.close()

    def read(self, window: Sequence[int], ahead: Sequence[int] = ()) -> Forward:
        """Return the logits after the last token of `window` and after each token of `ahead`, which follows it.

        Only the tokens that the session does not hold are evaluated, and the last token of the window.
        """
        n = min(_n_common(self.cached, window), len(window) - 1, self.session.n_cached)
        self.cached = list(window[:n])
        tokens = np.array([*window[n:], *ahead], np.int32)
        rows = np.arange(len(tokens) - len(ahead) - 1, len(tokens), dtype=np.int32)
        forward = self.session.forward(tokens, n_past=n, rows=rows if ahead else "last")
        self.cached = [*window, *ahead]
        self._note(len(tokens))
        return forward

    def go_on(self, token: int) -> Forward:
        """Return the logits after one more token."""
        forward = self.session.forward(np.array([token], np.int32), n_past=len(self.cached), rows="last")
        self.cached.append(token)
        self._note(1)
        return forward

    def read_paths(
        self, window: Sequence[int], paths: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], Forward, int]]:
        """Yield each path with a forward, and its row there that has the logits after the window and the path.

        The paths follow the window, which the session holds; they have one length, and none comes twice. They are rows
        of one forward, as far as it has room for rows of logits. A forward is valid until the next one is yielded.
        """
        trees, most = self.model.capabilities.trees, self.model.capabilities.max_rows
        if len(paths) == 1 or not trees:
            for path in paths:
                yield path, self.read([*window, *path]), 0
            return
        for begin in range(0, len(paths), most):
            wanted = paths[begin : begin + most]
            rows: dict[tuple[int, ...], int] = {(): -1}
            for depth in range(1, len(wanted[0]) + 1):
                for path in wanted:
                    rows.setdefault(path[:depth], len(rows) - 1)
            del rows[()]
            tokens = np.array([path[-1] for path in rows], np.int32)
            parents = np.array([rows.get(path[:-1], -1) for path in rows], np.int32)
            last = np.array([rows[path] for path in wanted], np.int32)
            self.cached = list(window)
            forward = self.session.forward(tokens, n_past=len(window), parents=parents, rows=last)
            self._note(len(tokens))
            for row, path in enumerate(wanted):
                yield path, forward, row

    def _note(self, n_rows: int) -> None:
        if self.recorder is not None:
            self.recorder.evaluated(n_rows, None)

    def first_begin(self, token_ids: Sequence[int]) -> int:
        """Return where the window of a new text begins.

        That is the text's start where the session holds all but a few of its tokens and has room for more, else a few
        tokens before its end.
        """
        n = len(token_ids)
        if n - _n_common(self.cached, token_ids) <= _FIRST and n < self.session.n_ctx * 3 // 4:
            return 0
        return max(0, n - _FIRST)

    def next_begin(self, begin: int, n: int, n_more: int) -> int:
        """Return where the window of a text of `n` tokens begins so that `n_more` tokens have room behind it.

        That is `begin` as long as they do; otherwise the window keeps the last half of its tokens.
        """
        return begin if n - begin + n_more + 1 < self.session.n_ctx else n - self.session.n_ctx // 2


def window_of(token_ids: Sequence[int], begin: int) -> list[int]:
    """Return the text's first token, an attention sink, and its tokens from `begin` on.

    Attention sinks: Xiao et al. 2023, arXiv:2309.17453. The first token is the BOS where there is one.

    >>> window_of([1, 5, 6, 7], 2)
    [1, 6, 7]
    """
    return [*token_ids[:1], *token_ids[begin:]] if begin > 0 else list(token_ids)


class DraftModelUser:
    """What ModelFactories have in common that draft with a loaded DraftModel by ways of their own.

    Attributes:
        source: The draft model.
    """

    def __init__(self, source: DraftModel) -> None:
        self.source = source

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.source.forget()

    def summary(self) -> str:
        """Return the draft model's name and the memory that it takes, for a person."""
        return self.source.summary()

    def close(self) -> None:
        """Free the draft model; calling it again does nothing."""
        self.source.close()


class ModelDrafter:
    """Implements edgedec.draft.Drafter.

    Args:
        source: The draft model.
        context: The generation's.
        ahead: `(tokens drafted so far, most tokens)` -> tokens that may follow them. They are evaluated in the same
            forward, so that the rows are there if they do follow. That changes the time of a draft, not the draft.
        label: Sets the drawn numbers apart from those of the generation's other drafters.
    """

    needs = DrafterNeeds()

    def __init__(
        self, source: DraftModel, context: DraftContext, ahead: Ahead | None = None, *, label: int = _DRAWS
    ) -> None:
        self._source = source
        source.recorder = context.recorder
        self._n_vocab = min(context.target.model.card.n_vocab, source.model.card.n_vocab)
        self._levels = LevelMaker(context, self._n_vocab, label)
        self._shape = context.shape
        self._floor = context.floor
        self._ahead = ahead
        self._ids: list[int] = []
        self._begin = 0  # where the window begins

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which is read when the first draft is requested."""
        self._ids = list(token_ids)
        self._begin = self._source.first_begin(self._ids)
        self._levels.begin()

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain of the most probable tokens with leaves beside it, or a drawn chain, while that pays."""
        n_max = min(n_max, self._source.session.n_ctx // 4)
        if not self._ids or n_max < 1:
            return EMPTY_DRAFT
        self._begin = self._source.next_begin(self._begin, len(self._ids), n_max)
        window = window_of(self._ids, self._begin)
        if self._shape.kind != CHAIN:
            return self._tree(window, n_max)
        nodes = DraftBuilder(n_max)
        # A clock must not decide where a drawn draft ends: another draft leads to another text under its rule.
        self._add_levels(nodes, self._levels_behind(window, nodes), inf if self._levels.draws else deadline_s)
        return nodes.build()

    def _tree(self, window: Sequence[int], n_max: int) -> Draft:
        """Return a tree of the context's shape, whose levels are a forward each."""
        floor = self._floor.path_probability
        if not self._levels.draws:
            return grow_ranked(partial(self._evaluated, window, made=self._levels.level), n_max, floor)
        laws = partial(self._evaluated, window, made=self._levels.law)
        return draw_tree(self._shape, laws, self._levels.drawn, n_max, floor, agreement)

    def _evaluated(
        self,
        window: Sequence[int],
        paths: Sequence[tuple[int, ...]],
        made: Callable[[Forward, int, Sequence[int]], T],
    ) -> list[T]:
        """Return what `made` makes of the row after each path, one result for equal paths."""
        found = {
            path: made(forward, row, [*self._ids, *path])
            for path, forward, row in self._source.read_paths(window, list(dict.fromkeys(paths)))
        }
        return [found[path] for path in paths]

    def _add_levels(self, nodes: DraftBuilder, levels: Iterator[Level], deadline_s: float) -> int:
        """Add the levels that pay for their forwards, and return how many those are."""
        floor = self._floor.path_probability
        return nodes.add_levels(levels, deadline_s=deadline_s, least_path=floor, least_leaf=max(_LEAST_LEAF, floor / 3))

    def _levels_behind(self, window: Sequence[int], nodes: DraftBuilder) -> Iterator[Level]:
        """Yield the levels behind the text; each one after the first is evaluated when it is needed."""
        drafted: list[int] = []
        ahead = self._ahead_of(drafted, nodes.n_left)
        forward, row = self._source.read(window, ahead), 0
        while True:
            level = self._levels.level(forward, row, [*self._ids, *drafted])
            yield level
            drafted.append(level.tokens[0])
            if row < len(ahead) and ahead[row] == drafted[-1]:
                row += 1
            else:
                ahead = self._ahead_of(drafted, nodes.n_left)
                forward, row = self._source.read([*window, *drafted], ahead), 0

    def _ahead_of(self, drafted: list[int], n_left: int) -> list[int]:
        """Return the tokens to evaluate beyond those drafted; the last token of a draft needs no row of its own."""
        n_most = min(n_left, self._source.model.capabilities.max_rows) - 1
        if self._ahead is None or n_most < 1:
            return []
        found = self._ahead(drafted, n_most)[:n_most]
        n_known = next((i for i, token in enumerate(found) if token >= self._n_vocab), len(found))
        return found[:n_known]

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._ids.extend(verification.token_ids)

    def memory_bytes(self) -> int:
        """Return the bytes of the text's tokens; the draft model has its own terms in the memory plan."""
        return 16 * len(self._ids)


def _n_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two texts have in common, from the start."""
    n = min(len(some), len(others))
    if list(some[:n]) == list(others[:n]):
        return n
    return next(i for i in range(n) if some[i] != others[i])

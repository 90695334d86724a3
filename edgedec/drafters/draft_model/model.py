"""model: a smaller model with the same tokenizer drafts a chain with its next best tokens as leaves, or a tree.

Speculative sampling with a draft model (Leviathan et al. 2023, arXiv:2211.17192), whose tokens are chosen as
edgedec.drafters.levels says. The chain goes on while its path probability pays for a forward of the draft model. Leaves
cost no forward. Whether the chain goes on is decided by the nodes that are there, before the next one is drawn, as the
rules of guests need it. Trees take one forward for all nodes of a level (edgedec.draft.Drawing).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from threading import RLock
from time import perf_counter
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.draft import EMPTY_DRAFT, Draft, Draws, Verification
from edgedec.drafter import DraftContext, DrafterNeeds, ModelFactory
from edgedec.drafter_traits import Demands, DraftCost, DrafterTraits, Place
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.drafters.draft_model.draft_text import DraftForward, DraftText, window_of
from edgedec.drafters.levels import LevelMaker
from edgedec.drafters.suffix.suffix import index_terms
from edgedec.errors import MemoryCapError
from edgedec.memory_plan import format_bytes
from edgedec.model import Forward, ForwardItem, Model, RowGroup
from edgedec.sequence import n_common

WINDOW = 1024  # tokens of the draft model's KV cache
SMALL_WINDOW = 256  # tokens of that cache where memory is short
ROWS = 9  # rows of logits that a draft model is loaded for: a token and what a cheap drafter expects after it
_LEAST_LEAF = 0.02  # a leaf of a smaller path probability is left out
_DRAWS = 0x4D6F64656C447277  # sets the drawn numbers apart from those of other drafters

Ahead = Callable[[list[int], int], list[int]]
T = TypeVar("T")


class DraftModel:
    """A loaded draft model; makes the drafter of each generation (an edgedec.drafter.ModelFactory).

    Each text that is being written has a session of its own, which later texts go on with. Any thread may call it.

    Attributes:
        model: The draft model.
        lock: Held while a session is lent, forked, or evaluates.
        texts: The sessions, each with what it holds.
        most: Most texts that may be drafted for at a time; None for any number.
        joins: Whether forwards for several texts may wait for each other, to be one.
        cascades: Whether a cascade may draft in its place, the same in less time.
        token_s: Seconds that it takes for a token, as timed when it was loaded; None where it was not.
        demands: What its drafters need at load.
    """

    joins = cascades = True
    demands = Demands(draft_model=True, memory=index_terms, place=Place.FIRST, called="draft model")

    def __init__(self, model: Model, most: int | None = None) -> None:
        self.model = model
        self.most = most
        self.lock: AbstractContextManager[object] = RLock()
        self.texts = [DraftText(model.session(WINDOW))]
        self._users: WeakKeyDictionary[object, DraftText] = WeakKeyDictionary()
        self.n_ctx = WINDOW
        self.token_s: float | None = None

    def __call__(self, context: DraftContext) -> "ModelDrafter":
        """Make the drafter of one generation."""
        return ModelDrafter(self, context)

    def lend(self, user: object, token_ids: Sequence[int], context: DraftContext) -> DraftText:
        """Return the session that a drafter uses until give_back(), or for as long as the drafter exists.

        At first that is the free session, or a fork of another one, that holds most of the text.

        Raises:
            MemoryCapError: All sessions are in use, and there are as many as there may be.
            EdgedecError: As Model.session.
        """
        with self.lock:
            text = self._users.get(user)
            if text is None:
                text = self._users[user] = self._best_for(token_ids)
                text.recorder, text.target = context.recorder, context.target
            return text

    def give_back(self, user: object) -> None:
        """Let later texts have the session of a drafter; nothing happens where it has none."""
        with self.lock:
            self._users.pop(user, None)

    def _best_for(self, token_ids: Sequence[int]) -> DraftText:
        used = set(map(id, self._users.values()))
        free = [text for text in self.texts if id(text) not in used]
        lent = [text for text in self.texts if id(text) in used] if self.model.capabilities.fork else []
        best = min(free, key=lambda text: text.n_unread(token_ids), default=None)
        near = min(lent, key=lambda text: text.n_unread(token_ids), default=None)
        if near is not None and best is not None and best.n_unread(token_ids) <= near.n_unread(token_ids):
            near = None
        if best is None and self.most is not None and len(self.texts) >= self.most:
            raise MemoryCapError(
                f"the draft model serves {self.most} of the texts that are written at a time, and not this one; load "
                "the model for more texts or requests"
            )
        if best is None or near is not None:
            session = self.model.session(self.n_ctx) if near is None else near.session.fork()
            cached = [] if near is None else [*near.cached]
            if best is None:
                best = DraftText(session)
                self.texts.append(best)
            else:
                best.session.close()
                best.session = session
            best.cached = cached
        return best

    def read(self, text: DraftText, window: Sequence[int], ahead: Sequence[int] = ()) -> Forward:
        """Return the logits after the last token of `window` and after each token of `ahead`, which follows it.

        Only the tokens that the text's session does not hold are evaluated, and the last token of the window.
        """

        def item() -> ForwardItem:
            n = n_common(text.cached, window, min(len(window) - 1, text.session.n_cached))
            text.cached = list(window[:n])
            tokens = np.array([*window[n:], *ahead], np.int32)
            rows = np.arange(len(tokens) - len(ahead) - 1, len(tokens), dtype=np.int32)
            return ForwardItem(text.session, n, (RowGroup(tokens),), rows if ahead else "last")

        return self._evaluated(text, item, [*window, *ahead])

    def read_paths(
        self, text: DraftText, window: Sequence[int], paths: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], Forward, int]]:
        """Yield each path with a forward, and its row there that has the logits after the window and the path.

        The paths follow the window, which the text's session holds; they have one length, and none comes twice. They
        are rows of one forward, as far as it has room for rows of logits.
        """
        trees, most = self.model.capabilities.trees, self.model.capabilities.max_rows
        if len(paths) == 1 or not trees:
            for path in paths:
                yield path, self.read(text, [*window, *path]), 0
            return
        for begin in range(0, len(paths), most):
            batch = paths[begin : begin + most]
            rows: dict[tuple[int, ...], int] = {(): -1}
            for depth in range(1, len(batch[0]) + 1):
                for path in batch:
                    rows.setdefault(path[:depth], len(rows) - 1)
            del rows[()]
            tokens = np.array([path[-1] for path in rows], np.int32)
            parents = np.array([rows.get(path[:-1], -1) for path in rows], np.int32)
            last = np.array([rows[path] for path in batch], np.int32)
            item = partial(ForwardItem, text.session, len(window), (RowGroup(tokens, sees=parents),), last)
            forward = self._evaluated(text, item, window)
            for row, path in enumerate(batch):
                yield path, forward, row

    def _evaluated(self, text: DraftText, item: Callable[[], ForwardItem], cached: Sequence[int]) -> Forward:
        """Return the result of an item of a text, evaluated with those of other texts where they are joined."""
        call = DraftForward(self.model, self.lock, text, item, cached)
        begun = perf_counter()
        if text.target is None or not self.joins:
            call.answer(())
        else:
            text.calls += text.target.answer([(text.target, call)])
        text.called_s += perf_counter() - begun
        assert call.forward is not None, "a call that was answered has a result"
        if text.recorder is not None:
            text.recorder.evaluated(call.n_rows, None)
        return call.forward

    def forget(self) -> None:
        """Forget the tokens that the sessions hold, so that later generations read their prompts anew."""
        for text in self.texts:
            text.cached = []

    @property
    def source(self) -> "DraftModel":
        """The model itself."""
        return self

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes of the draft model, KV caches included, and of the KV caches alone.

        They are counted as planned, because a new plan may take memory itself.
        """
        terms = [term for term in self.model.memory(WINDOW, ROWS) if not term.base]
        n_planned = sum(term.n_bytes for term in terms if term.name == "KV cache")
        n_kv = n_planned * self.n_ctx // WINDOW * len(self.texts)
        return sum(term.n_bytes for term in terms) - n_planned + n_kv, n_kv

    def summary(self) -> str:
        """Return the draft model's name and the memory that it takes, for a person."""
        card = self.model.card
        return f"the draft model {card.name or card.architecture} ({format_bytes(self.held_bytes()[0])})"

    def spare_bytes(self) -> int:
        """Return the bytes that shrink() would free."""
        return max(0, self.held_bytes()[1] * (self.n_ctx - SMALL_WINDOW) // self.n_ctx)

    def shrink(self) -> None:
        """Go on with smaller windows, whose KV caches take less memory (raises what Model.session raises)."""
        with self.lock:
            self.n_ctx = SMALL_WINDOW
            for text in self.texts:
                text.session.close()
                text.cached = []
                text.session = self.model.session(SMALL_WINDOW)

    def close(self) -> None:
        """Free the draft model."""
        self.model.close()


class DraftSource(ModelFactory, Protocol):
    """A factory of drafters around a loaded draft model: that model itself, or a way of its own to draft with it."""

    @property
    def source(self) -> DraftModel:
        """The draft model."""

    @property
    def cascades(self) -> bool:
        """Whether a cascade may draft in its place, the same in less time."""


class DraftModelUser:
    """What ModelFactories have in common that draft with a loaded DraftModel by ways of their own.

    Attributes:
        cascades: Whether a cascade may draft in its place.
    """

    cascades = False

    def __init__(self, source: DraftModel) -> None:
        self.source = source

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.source.forget()

    def close(self) -> None:
        """Free the draft model; calling it again does nothing."""
        self.source.close()


class ModelDrafter:
    """Implements edgedec.drafter.Drafter.

    Args:
        source: The draft model.
        ahead: `(tokens drafted so far, most tokens)` -> tokens that may follow them. They are evaluated in the same
            forward, so that the rows are there if they do follow. That changes the time of a draft, not the draft.
        label: Sets the drawn numbers apart from those of the generation's other drafters.

    Attributes:
        calls: The forwards for the latest draft, each with what it was joined into.
        own_s: Seconds of this thread that the latest draft took beside these forwards.
        traits: What the drafter declares.
    """

    needs = DrafterNeeds()

    def __init__(
        self, source: DraftModel, context: DraftContext, ahead: Ahead | None = None, *, label: int = _DRAWS
    ) -> None:
        self._source = source
        self.calls: Sequence[SharedForward] = ()
        self.own_s = 0.0
        self._context = context
        self._n_vocab = min(context.target.model.card.n_vocab, source.model.card.n_vocab)
        self._levels = LevelMaker(context, self._n_vocab, label)
        self._floor = context.floor
        self._ahead = ahead
        self.traits = DrafterTraits(DraftCost.MODEL, Draws.SHAPES, level_s=source.token_s, about=source.summary)
        self._ids: list[int] = []
        self._n_prompt = 0
        self._begin: int | None = None  # where the window begins; None before the first draft

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which is read when the first draft is requested."""
        self._ids = list(token_ids)
        self._n_prompt = len(self._ids)
        self._begin = None
        self._levels.begin()

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain of the most probable tokens with leaves beside it, or a drawn chain, while that pays."""
        n_max = min(n_max, self._source.n_ctx // 4)
        if not self._ids or n_max < 1:
            return EMPTY_DRAFT
        begun, text, window = perf_counter(), self._text, self._window_for(n_max)
        text.begin_draft()
        draft = self._tree(window, n_max) if self._levels.is_tree else self._chain(window, n_max, deadline_s)
        self.calls, self.own_s = text.calls, perf_counter() - begun - text.called_s
        return draft

    def _chain(self, window: Sequence[int], n_max: int, deadline_s: float) -> Draft:
        """Return a chain with leaves beside it, or a drawn chain."""
        nodes = DraftBuilder(n_max)
        # A clock must not decide where a drawn draft ends: another draft leads to another text under its rule.
        self._add_levels(nodes, self._levels_behind(window, nodes), inf if self._levels.draws else deadline_s)
        return nodes.build()

    def _tree(self, window: Sequence[int], n_max: int) -> Draft:
        """Return a tree, whose levels are a forward each."""
        made = self._levels.law if self._levels.draws else self._levels.level
        return self._levels.tree(partial(self._evaluated, window, made=made), n_max, self._floor.path_probability)

    def _evaluated(
        self,
        window: Sequence[int],
        paths: Sequence[tuple[int, ...]],
        made: Callable[[Forward, int, Sequence[int]], T],
    ) -> list[T]:
        """Return what `made` makes of the row after each path, one result for equal paths."""
        results = {
            path: made(forward, row, [*self._ids, *path])
            for path, forward, row in self._source.read_paths(self._text, window, list(dict.fromkeys(paths)))
        }
        return [results[path] for path in paths]

    @property
    def _text(self) -> DraftText:
        """The session that the drafts are made on."""
        return self._source.lend(self, self._ids[: self._n_prompt], self._context)

    def _window_for(self, n_more: int) -> list[int]:
        """Return the end of the text that the session holds, with room for `n_more` tokens behind it."""
        text = self._text
        if self._begin is None:
            self._begin = text.first_begin(self._ids[: self._n_prompt])
        self._begin = text.next_begin(self._begin, len(self._ids), n_more)
        return window_of(self._ids, self._begin)

    def _add_levels(self, nodes: DraftBuilder, levels: Iterator[Level], deadline_s: float) -> int:
        """Add the levels that pay for their forwards, and return how many those are."""
        floor = self._floor.path_probability
        return nodes.add_levels(levels, deadline_s=deadline_s, least_path=floor, least_leaf=max(_LEAST_LEAF, floor / 3))

    def _levels_behind(self, window: Sequence[int], nodes: DraftBuilder) -> Iterator[Level]:
        """Yield the levels behind the text; each one after the first is evaluated when it is needed."""
        drafted: list[int] = []
        text, ahead = self._text, self._ahead_of(drafted, nodes.n_left)
        forward, row = self._source.read(text, window, ahead), 0
        while True:
            level = self._levels.level(forward, row, [*self._ids, *drafted])
            yield level
            drafted.append(level.tokens[0])
            if row < len(ahead) and ahead[row] == drafted[-1]:
                row += 1
            else:
                ahead = self._ahead_of(drafted, nodes.n_left)
                forward, row = self._source.read(text, [*window, *drafted], ahead), 0

    def _ahead_of(self, drafted: list[int], n_left: int) -> list[int]:
        """Return the tokens to evaluate beyond those drafted; the last token of a draft needs no row of its own."""
        n_most = min(n_left, self._source.model.capabilities.max_rows) - 1
        if self._ahead is None or n_most < 1:
            return []
        ahead = self._ahead(drafted, n_most)[:n_most]
        n_known = next((i for i, token in enumerate(ahead) if token >= self._n_vocab), len(ahead))
        return ahead[:n_known]

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        self._ids.extend(verification.token_ids)

    def close(self) -> None:
        """Give the session back; calling close() again does nothing."""
        self._source.give_back(self)

    def memory_bytes(self) -> int:
        """Return the bytes of the text's tokens; the draft model has its own terms in the memory plan."""
        return 16 * len(self._ids)

"""overlapped: a draft model that goes on drafting while the target verifies.

PEARL's "post-verify" (Liu et al. 2024, arXiv:2408.11850). Once a draft is handed out, a thread drafts on behind it: the
token that the draft model expects as the bonus token, then the next draft. It draws with the target's own noise, so its
own draw is the best guess there is. Where the text comes as expected, the next draft is there when it is asked for.
Otherwise it is dropped, and the draft model's session goes back by n_past. Either way a draft is the draft model's own.
PEARL's "pre-verify", where the target judges a draft's first token while the others are still to come, is left out: how
long a draft is remains the policy's decision.

It pays where the target computes on another device than the draft model. On the same cores each slows the other down.

What the policy is told of the price is the time that draft() takes, waiting for the thread included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from threading import Event, Thread
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, DraftContext, Verification
from edgedec.drafters.draft_model.model import DraftModel, ModelDrafter, ranked, window_of
from edgedec.model import Model

THREAD_NAME = "edgedec-draft-ahead"

_LEAST = 0.02  # of a leaf, as in ModelDrafter


class OverlappedModel(DraftModel):
    """A draft model whose drafters go on while the target verifies (a ModelFactory).

    One thread at a time uses its session: whoever needs it calls settle() first.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._thread: Thread | None = None
        self._stopped = Event()

    def __call__(self, context: DraftContext) -> ModelDrafter:
        """Make the drafter of one generation; under another rule than the coupled one, or recorded, without overlap."""
        self.settle()
        overlaps = context.coupled and context.recorder is None
        return OverlappedDrafter(self, context) if overlaps else ModelDrafter(self, context)

    def start(self, step: Callable[[], bool]) -> None:
        """Repeat a step in a thread until it returns False, or until stop().

        Raises:
            RuntimeError: The system has no thread left.
        """
        self.settle()
        self._stopped.clear()
        thread = Thread(target=self._run, args=(step,), name=THREAD_NAME)
        thread.start()
        self._thread = thread

    def _run(self, step: Callable[[], bool]) -> None:
        while not self._stopped.is_set() and step():
            pass

    def stop(self) -> None:
        """Let the thread end after the step that it is at, without waiting for it."""
        self._stopped.set()

    def settle(self) -> None:
        """Stop the thread and wait for its end."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.settle()
        super().forget()

    def shrink(self) -> None:
        """Go on with a smaller window (raises what Model.session raises)."""
        self.settle()
        super().shrink()

    def close(self) -> None:
        """Free the draft model."""
        self.settle()
        super().close()


@dataclass(slots=True)
class _Level:
    """What the draft model expects at one position, after the first tokens of the levels before.

    Attributes:
        tokens: Its best tokens, at least one, the most probable first.
        p: How sure it is of each.
        ahead: Whether the thread made it and it has not been of use yet.
    """

    tokens: list[int]
    p: list[float]
    ahead: bool = False


class OverlappedDrafter(ModelDrafter):
    """Implements edgedec.draft.Drafter with the drafts of a ModelDrafter, and edgedec.draft.Closing.

    The levels behind the text belong to the thread while it runs, that is from draft() to the next settle().

    Args:
        source: The draft model.
        context: The generation's; its rule is the coupled one.

    Attributes:
        n_ahead: Tokens drafted while the target verified.
        n_used: Of these, the ones that came into a draft, or stood in the text where they were expected.
        report: Called with both before every draft and at the end.
    """

    def __init__(self, source: OverlappedModel, context: DraftContext) -> None:
        super().__init__(source, context)
        self._overlapped = source
        self._levels: list[_Level] = []
        self._window: list[int] = []
        self._came: list[int] = []  # of the text, not held against the levels yet
        self._failure: Exception | None = None
        self.n_ahead = self.n_used = 0
        self.report: Callable[[int, int], None] = lambda n_ahead, n_used: None

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt; it is read when the first draft is asked for."""
        self._overlapped.settle()
        self._levels.clear()
        self._came.clear()
        self._failure = None
        super().begin(token_ids)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Draft what is not there yet of the draft, and let the thread draft on behind it.

        Raises:
            EdgedecError: As Session.forward, also where that was in the thread.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure
        n_ctx = self._source.session.n_ctx
        n_max = min(n_max, n_ctx // 4)
        if not self._ids or n_max < 1:
            return EMPTY_DRAFT
        n_most = min(2 * n_max + 1, n_ctx // 2 - 2)  # half of a window is kept when it moves
        self._begin = self._source.next_begin(self._begin, len(self._ids), n_most)
        self._window = window_of(self._ids, self._begin)
        draft, n_levels = self._drafted(n_max, deadline_s)
        if n_levels:
            n_most = min(n_levels + 1 + n_max, n_most)
            self._overlapped.start(partial(self._go_ahead, n_levels, n_most, self._floor.path_probability))
        return draft

    def _drafted(self, n_max: int, deadline_s: float) -> tuple[Draft, int]:
        """Return the first levels as a chain with leaves beside it, while that pays, and how many levels that took."""
        floor = self._floor.path_probability
        least = max(_LEAST, floor / 3)
        tokens: list[int] = []
        parents: list[int] = []
        p_accept: list[float] = []
        above, path, depth = -1, 1.0, 0
        while depth < len(self._levels) or self._extend():
            level = self._levels[depth]
            self._count_used(level)
            parent, above = above, len(tokens)
            for i, (token, chance) in enumerate(zip(level.tokens[: self._width], level.p, strict=False)):
                if len(tokens) < n_max and (i == 0 or path * chance >= least):
                    tokens.append(token)
                    parents.append(parent)
                    p_accept.append(chance)
            depth += 1
            path *= level.p[0]
            if path < floor or len(tokens) >= n_max or monotonic() > deadline_s:
                break
        return Draft.tree(tokens, parents, p_accept), depth

    def _extend(self) -> bool:
        """Add a level; False where the draft model expects no token that the target has."""
        chain = [level.tokens[0] for level in self._levels]
        forward = self._source.read([*self._window, *chain])
        text = [*self._ids, *chain]
        tokens, p = ranked(forward, self._params, text, self._noise, len(text), self._n_vocab)
        if tokens:
            self._levels.append(_Level(tokens, p))
        return bool(tokens)

    def _go_ahead(self, n_drafted: int, n_most: int, floor: float) -> bool:
        """Add a level in the thread; tell whether one more is worth it.

        Args:
            n_drafted: Levels of the draft that is verified; the one behind is the bonus token's.
            n_most: Most levels.
            floor: Path probability, from the bonus token on, below which the next draft would end.
        """
        try:
            path = prod(level.p[0] for level in self._levels[n_drafted + 1 :])
            if len(self._levels) >= n_most or path < floor or not self._extend():
                return False
        except Exception as error:  # told by the next draft()
            self._failure = error
            return False
        self._levels[-1].ahead = True
        self.n_ahead += 1
        return True

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got, and let the thread end at its next token."""
        self._overlapped.stop()
        self._came.extend(verification.token_ids)

    def _settle(self) -> None:
        """Wait for the thread, and keep the levels that follow the text as it is now."""
        self._overlapped.settle()
        for token in self._came:
            if self._levels and self._levels[0].tokens[0] == token:
                self._count_used(self._levels.pop(0))
            else:
                self._levels.clear()
        self._ids.extend(self._came)
        self._came.clear()
        if self.n_ahead:
            self.report(self.n_ahead, self.n_used)

    def _count_used(self, level: _Level) -> None:
        self.n_used += level.ahead
        level.ahead = False

    def close(self) -> None:
        """End the thread; calling it again does nothing."""
        self._settle()

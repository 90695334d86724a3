"""PEARL: a draft model goes on drafting while the target verifies.

This is the "post-verify" of the paper. Once a draft is handed out, a thread drafts on behind it: first the token that
the draft model expects as the bonus token, then the next draft. The draft model draws with the target's own noise, so
its own draw is the best guess of the bonus token. Where the text comes as expected, the next draft is there when it is
requested. Otherwise those tokens are dropped, and the draft model's session goes back by n_past. Either way a draft is
the draft model's own. PEARL's "pre-verify", where the target judges a draft's first token while the others are still to
come, is left out: how long a draft is remains the policy's decision.

Overlap pays where the target computes on another device than the draft model. On the same cores each slows the other
down. The policy counts as a draft's price the time that propose() takes, including the time it waits for the thread.

Paper: Liu et al. 2024, arXiv:2408.11850
Option: `--draft model --draft-option model=MODEL --draft-option overlap=yes`
For: a target on an NPU, on a GPU or on other machines, with a draft model on the CPU
Measured: nothing yet (`edgedec bench MODEL` with the options above tells)
Status: opt-in
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from threading import Event, Thread

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.drafters.draft_model.model import DraftModel, ModelDrafter
from edgedec.errors import RequestError, argument
from edgedec.loading.second_model import LoadedDraft
from edgedec.model import Model

THREAD_NAME = "edgedec-draft-ahead"


def overlapped(loaded: LoadedDraft) -> "OverlappedModel | None":
    """Return the factory of drafters around a draft model that is to overlap (RequestError: the tokenizers differ)."""
    if not loaded.overlap:
        return None
    if not loaded.same_tokenizer:
        raise RequestError(
            f"{loaded.path}: its tokenizer is not the target's, which {argument('draft_overlap')} needs; choose a "
            f"draft model of the target's family, or leave {argument('draft_overlap')} out"
        )
    return OverlappedModel(loaded.model, loaded.most)


class OverlappedModel(DraftModel):
    """A draft model whose drafters go on while the target verifies (an edgedec.drafter.ModelFactory).

    Each text's drafter has a thread of its own, whose forwards wait for nobody else's: they are not joined. One thread
    at a time uses a text's session: whoever needs it calls settle() first.
    """

    joins = cascades = False

    def __init__(self, model: Model, most: int | None = None) -> None:
        super().__init__(model, most)
        self.threads: dict[object, tuple[Thread, Event]] = {}  # by drafter, with what ends the thread

    def __call__(self, context: DraftContext) -> ModelDrafter:
        """Make the drafter of one generation.

        Under another rule than the coupled one, in another shape than a chain, and while drafts are recorded, it drafts
        without overlap.
        """
        drawing = context.drawing
        is_plain = drawing is None or (drawing.params is None and not drawing.is_tree)
        overlaps = is_plain and context.recorder is None
        return OverlappedDrafter(self, context) if overlaps else ModelDrafter(self, context)

    def start(self, user: object, step: Callable[[], bool]) -> None:
        """Repeat `step` in the thread of a drafter until it returns False, or until stop() is called.

        Raises:
            RuntimeError: The system can't start another thread.
        """
        self.settle(user)
        stopped = Event()
        thread = Thread(target=_repeated, args=(step, stopped), name=THREAD_NAME)
        thread.start()
        self.threads[user] = thread, stopped

    def stop(self, user: object) -> None:
        """Let the thread of a drafter end after its present step, without waiting for it."""
        thread = self.threads.get(user)
        if thread is not None:
            thread[1].set()

    def settle(self, user: object = None) -> None:
        """Stop the thread of a drafter and wait for its end; of all drafters for None."""
        for one in [*self.threads] if user is None else [user]:
            self.stop(one)
            thread = self.threads.pop(one, None)
            if thread is not None:
                thread[0].join()

    def forget(self) -> None:
        """Let the next generation read its prompt anew."""
        self.settle()
        super().forget()

    def shrink(self) -> None:
        """Go on with a smaller window, whose KV cache takes less memory (raises what Model.session raises)."""
        self.settle()
        super().shrink()

    def close(self) -> None:
        """End the threads and free the draft model."""
        self.settle()
        super().close()


def _repeated(step: Callable[[], bool], stopped: Event) -> None:
    while not stopped.is_set() and step():
        pass


@dataclass(slots=True)
class _Level(Level):
    """A level with at least one token, after the first tokens of the levels before.

    Attributes:
        ahead: Whether the thread made the level and it has not been of use yet.
    """

    ahead: bool = False


class OverlappedDrafter(ModelDrafter):
    """Implements edgedec.drafter.Drafter with the drafts of a ModelDrafter, and edgedec.drafter.Closing.

    The levels behind the text belong to the thread while it runs, that is from propose() to the next settle().

    Args:
        source: The draft model.
        context: The generation's; its rule is the coupled one.

    Attributes:
        n_ahead: Tokens drafted while the target verified.
        n_used: Those of them that came into a draft, or stood in the text where they were expected.
    """

    def __init__(self, source: OverlappedModel, context: DraftContext) -> None:
        super().__init__(source, context)
        self._overlapped = source
        self._drafted: list[_Level] = []
        self._window: list[int] = []
        self._came: list[int] = []  # tokens of the text that were not compared with the levels yet
        self._failure: Exception | None = None
        self.n_ahead = self.n_used = 0
        self.traits = replace(self.traits, level_s=self._waited_s(context))

    def _waited_s(self, context: DraftContext) -> float | None:
        """Return the seconds of a drafted token that the target is expected to wait for; None where it was not timed.

        A draft's first token is there if the draft before it and its bonus token came as expected, and if there was
        time for both while the target verified.
        """
        if (token_s := self._overlapped.token_s) is None:
            return None
        hidden_s = min(token_s, (context.curve.seconds(2) or 0.0) / 2)
        return token_s - self.traits.rate * self.traits.rate * hidden_s

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt, which is read when the first draft is requested."""
        self._overlapped.settle(self)
        self._drafted.clear()
        self._came.clear()
        self._failure = None
        super().begin(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft the levels that are not there yet, and let the thread draft on behind them.

        Raises:
            EdgedecError: What Session.forward raised, now or in the thread.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure
        n_ctx = self._source.n_ctx
        n_max = min(n_max, n_ctx // 4)
        if not self._ids or n_max < 1:
            return EMPTY_DRAFT
        n_most = min(2 * n_max + 1, n_ctx // 2 - 2)  # half of a window is kept when it moves
        self._window = self._window_for(n_most)
        nodes = DraftBuilder(n_max)
        n_levels = self._add_levels(nodes, self._levels_in_turn(), deadline_s)
        if n_levels:
            n_most = min(n_levels + 1 + n_max, n_most)
            self._overlapped.start(self, partial(self._go_ahead, n_levels, n_most, self._floor.path_probability))
        return nodes.build()

    def _levels_in_turn(self) -> Iterator[Level]:
        """Yield the levels behind the text: those that the thread made, then new ones."""
        depth = 0
        while depth < len(self._drafted) or self._extend():
            self._count_used(self._drafted[depth])
            yield self._drafted[depth]
            depth += 1

    def _extend(self) -> bool:
        """Add a level; False where the draft model expects no token that the target has."""
        chain = [level.tokens[0] for level in self._drafted]
        forward = self._source.read(self._text, [*self._window, *chain])
        level = self._levels.level(forward, 0, [*self._ids, *chain])
        if level.tokens:
            self._drafted.append(_Level(level.tokens, level.p))
        return bool(level.tokens)

    def _go_ahead(self, n_drafted: int, n_most: int, floor: float) -> bool:
        """Add a level in the thread; return whether one more may be worth its forward.

        Args:
            n_drafted: Levels of the draft that is being verified; the level behind them is the bonus token's.
            n_most: Most levels.
            floor: Path probability, from the bonus token on, below which the next draft would end.
        """
        try:
            path = prod(level.p[0] for level in self._drafted[n_drafted + 1 :])
            if len(self._drafted) >= n_most or path < floor or not self._extend():
                return False
        except Exception as error:  # the next propose() raises it
            self._failure = error
            return False
        self._drafted[-1].ahead = True
        self.n_ahead += 1
        return True

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got, and let the thread end after its present token."""
        self._overlapped.stop(self)
        self._came.extend(verification.token_ids)

    def _settle(self) -> None:
        """Wait for the thread, and keep only the levels that follow the text as it is now."""
        self._overlapped.settle(self)
        for token in self._came:
            if self._drafted and self._drafted[0].tokens[0] == token:
                self._count_used(self._drafted.pop(0))
            else:
                self._drafted.clear()
        self._ids.extend(self._came)
        self._came.clear()
        if self.n_ahead:
            self._context.note_ahead(self.n_ahead, self.n_used)

    def _count_used(self, level: _Level) -> None:
        self.n_used += level.ahead
        level.ahead = False

    def close(self) -> None:
        """End the thread and give the session back; calling close() again does nothing."""
        self._settle()
        super().close()

"""What a draft model's session holds, a window of a text, and its rows, which are evaluated with other texts' rows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from edgedec.cost_curve import SharedForward
from edgedec.drafter import ForwardLog
from edgedec.head_state import DraftCall
from edgedec.model import Forward, ForwardItem, Model, Session
from edgedec.sequence import n_common
from edgedec.sessions.joined_work import groups, owned

_FIRST = 64  # last tokens of a prompt that are read: what needs more of it, the suffix drafter proposes already


def window_of(token_ids: Sequence[int], begin: int) -> list[int]:
    """Return the text's first token, an attention sink, and its tokens from `begin` on.

    Attention sinks: Xiao et al. 2023, arXiv:2309.17453. The first token is the BOS where there is one.

    >>> window_of([1, 5, 6, 7], 2)
    [1, 6, 7]
    """
    return [*token_ids[:1], *token_ids[begin:]] if begin > 0 else list(token_ids)


@dataclass(eq=False, slots=True)
class DraftText:
    """A session of a draft model, which holds a window of a text.

    Attributes:
        cached: The tokens that the session holds.
        recorder: Where each forward is logged while drafts are recorded; else None.
        target: The target's session, which joins the forwards of several texts; None before the text is lent.
        calls: The forwards since begin_draft(), each with what it was joined into.
        called_s: Seconds that they took, waiting for other texts included.
    """

    session: Session
    cached: list[int] = field(default_factory=list)
    recorder: ForwardLog | None = None
    target: Session | None = None
    calls: list[SharedForward] = field(default_factory=list)
    called_s: float = 0.0

    def begin_draft(self) -> None:
        """Count the forwards anew."""
        self.calls, self.called_s = [], 0.0

    def n_unread(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of a new text would be read."""
        window = window_of(token_ids, self.first_begin(token_ids))
        return len(window) - n_common(self.cached, window, len(window))

    def first_begin(self, token_ids: Sequence[int]) -> int:
        """Return where the window of a new text begins.

        That is the text's start where the session holds all but a few of its tokens and has room for more, else a few
        tokens before its end.
        """
        n = len(token_ids)
        if n - n_common(self.cached, token_ids, n) <= _FIRST and n < self.session.n_ctx * 3 // 4:
            return 0
        return max(0, n - _FIRST)

    def next_begin(self, begin: int, n: int, n_more: int) -> int:
        """Return where the window of a text of `n` tokens begins so that `n_more` tokens have room behind it.

        That is `begin` as long as they do; otherwise the window keeps the last half of its tokens.
        """
        return begin if n - begin + n_more + 1 < self.session.n_ctx else n - self.session.n_ctx // 2


class DraftForward:
    """Implements edgedec.head_state.DraftCall.

    Args:
        model: The draft model.
        lock: Held while a session of the draft model evaluates.
        item: Makes the item of the forward, with the lock held.
        cached: The tokens that the text's session holds afterwards.

    Attributes:
        forward: The result, in arrays of its own; None before there is one.
        n_rows: How many rows were evaluated.
    """

    def __init__(
        self,
        model: Model,
        lock: AbstractContextManager[object],
        text: DraftText,
        item: Callable[[], ForwardItem],
        cached: Sequence[int],
    ) -> None:
        self.forward: Forward | None = None
        self.n_rows = 0
        self._model = model
        self._lock = lock
        self._text = text
        self._item = item
        self._cached = list(cached)

    @property
    def kind(self) -> int:
        """A number of the draft model's own."""
        return id(self._model)

    def answer(self, others: Sequence[DraftCall]) -> None:
        """Evaluate the rows of this call and of others in one forward, where no row depends on what else is in it.

        Raises:
            What Session.forward raises.
        """
        calls: list[DraftForward] = [self, *(call for call in others if isinstance(call, DraftForward))]
        with self._lock:
            items = [call._item() for call in calls]
            for call, item, forward in zip(calls, items, _evaluated(self._model, items), strict=True):
                call.forward, call.n_rows, call._text.cached = forward, item.n_rows, call._cached


def _evaluated(model: Model, items: Sequence[ForwardItem]) -> list[Forward]:
    """Return the results of items of several sessions."""
    if len(items) > 1 and model.batch_invariant is True:
        joined = groups(items, model.capabilities.max_rows)
        return [owned(forward) for group in joined for forward in model.forward(group)]
    return [owned(item.session.evaluate(item)) for item in items]

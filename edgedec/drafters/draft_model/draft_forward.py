"""Rows of a draft model for one text, which are evaluated together with those for other texts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from edgedec.draft_call import DraftCall
from edgedec.drafters.draft_model.draft_text import DraftText
from edgedec.model import Forward, ForwardItem, Model
from edgedec.sessions.joined_work import groups, n_rows_of, own


class DraftForward:
    """Implements edgedec.draft_call.DraftCall.

    Args:
        model: The draft model.
        lock: Held while a session of the draft model evaluates.
        text: The text.
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
                call.forward, call.n_rows, call._text.cached = forward, n_rows_of(item), call._cached


def _evaluated(model: Model, items: Sequence[ForwardItem]) -> list[Forward]:
    """Return the results of items of several sessions."""
    if len(items) > 1 and model.batch_invariant is True:
        return [
            own(forward) for group in groups(items, model.capabilities.max_rows) for forward in model.forward(group)
        ]
    found = []
    for item in items:
        session = item.session
        forward = session.forward(item.tokens, n_past=item.n_past, parents=item.parents, rows=item.rows)
        found.append(own(forward))
    return found

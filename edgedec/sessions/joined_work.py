"""Work of several sessions that is done together: rows of forwards, or calls of draft heads."""

from collections.abc import Sequence
from dataclasses import replace

from edgedec.errors import CancelledError
from edgedec.head_state import HeadCall
from edgedec.model import Forward, ForwardItem, Model

Work = ForwardItem | HeadCall
Result = Forward | HeadCall | BaseException
"""The result of an item, a call that was answered, or the error of either."""


def evaluated(model: Model, work: Sequence[Work]) -> list[Result]:
    """Return the results of items of a model, or its heads' calls of one kind; where that fails, do one by one.

    A forward's result is a copy, which stays valid after the model's next forward.
    """
    try:
        return _together(model, work)
    except CancelledError as error:  # everybody who waited for it gave it up
        return [error] * len(work)
    except Exception as error:
        if len(work) == 1:
            return [error]
    results: list[Result] = []
    for one in work:
        try:
            results += _together(model, [one])
        except Exception as error:
            results.append(error)
    return results


def _together(model: Model, work: Sequence[Work]) -> list[Result]:
    calls = [one for one in work if not isinstance(one, ForwardItem)]
    if calls:
        calls[0].answer(calls[1:])
        return [*calls]
    return [_own(forward) for forward in model.forward([one for one in work if isinstance(one, ForwardItem)])]


def _own(forward: Forward) -> Forward:
    if forward.is_own:
        return forward
    hidden = {tap: states.copy() for tap, states in forward.hidden.items()}
    return replace(forward, logits=forward.logits.copy(), hidden=hidden, is_own=True)


def n_rows_of(work: Work) -> int:
    """Return the rows of an item; 1 for a call."""
    if not isinstance(work, ForwardItem):
        return 1
    rows = work.tokens if work.tokens is not None else work.hidden
    return 0 if rows is None else len(rows)


def n_wanted_of(work: Work) -> int:
    """Return how many rows of logits an item returns; 0 for a call."""
    if not isinstance(work, ForwardItem):
        return 0
    if isinstance(work.rows, str):
        return 1 if work.rows == "last" else n_rows_of(work)
    return len(work.rows)

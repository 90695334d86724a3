"""Work of several sessions that is done together: rows of forwards, or calls of drafters."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Condition

import numpy as np

from edgedec.cost_curve import SharedForward
from edgedec.errors import CancelledError
from edgedec.head_state import DraftCall
from edgedec.model import Forward, ForwardItem, Model, Session

_NO_ROWS = np.empty(0, np.int32)
Work = ForwardItem | DraftCall
Result = Forward | DraftCall | BaseException
"""The result of an item, a call that was answered, or the error of either."""


def evaluated(model: Model, work: Sequence[Work]) -> list[Result]:
    """Return the results of items of a model, or of drafters' calls of one kind; where that fails, do one by one.

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
    return [owned(forward) for forward in model.forward([one for one in work if isinstance(one, ForwardItem)])]


def owned(forward: Forward) -> Forward:
    """Return a forward's result in arrays that stay valid after the model's next forward."""
    if forward.is_own:
        return forward
    hidden = {tap: states.copy() for tap, states in forward.hidden.items()}
    return replace(forward, logits=forward.logits.copy(), hidden=hidden, is_own=True)


def cut(item: ForwardItem, n: int) -> tuple[ForwardItem, ForwardItem]:
    """Return an item with the first `n` rows of a group, none of whose logits are wanted, and one with the others."""
    (group,) = item.groups
    first, rest = replace(item, rows=_NO_ROWS), replace(item, n_past=item.n_past + n)
    first.groups, rest.groups = (group.part(0, n),), (group.part(n, group.n_rows),)
    return first, rest


def groups(items: Sequence[ForwardItem], most: int) -> list[list[ForwardItem]]:
    """Cut items into forwards, none of which returns more than `most` rows of logits, unless for a single item."""
    joined: list[list[ForwardItem]] = []
    n_left = 0
    for item in items:
        n = len(item.logit_rows)
        if not joined or n > n_left:
            joined.append([])
            n_left = most
        joined[-1].append(item)
        n_left -= n
    return joined


class JointCalls:
    """Answers calls as soon as no thread has anything else to do: each one waits for a call, or has left.

    So what is answered together depends on no clock.

    Args:
        n_threads: How many threads draft; each of them calls leave() in the end.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._waiting: list[tuple[Session, DraftCall, list[SharedForward | BaseException]]] = []  # and results
        self._changed = Condition()

    def answer(self, session: Session, call: DraftCall) -> SharedForward:
        """Answer a call for a text, with other threads' calls of its kind (raises what Session.answer does for any)."""
        mine: list[SharedForward | BaseException] = []
        with self._changed:
            self._waiting.append((session, call, mine))
            self._answer_where_all_wait()
            while not mine:
                self._changed.wait()
        if isinstance(mine[0], BaseException):
            raise mine[0]
        return mine[0]

    def leave(self) -> None:
        """Say that the thread calls no more."""
        with self._changed:
            self._n_threads -= 1
            self._answer_where_all_wait()

    def _answer_where_all_wait(self) -> None:
        """Answer the calls of the first kind, unless a thread is still at work; `_changed` is held."""
        if not self._waiting or len(self._waiting) < self._n_threads:
            return
        kind = self._waiting[0][1].kind
        chosen = [waiting for waiting in self._waiting if waiting[1].kind == kind]
        self._waiting = [waiting for waiting in self._waiting if waiting[1].kind != kind]
        results: Sequence[SharedForward | BaseException]
        try:
            results = chosen[0][0].answer([(session, call) for session, call, _ in chosen])
        except BaseException as error:  # whoever waits gets it and goes on
            results = [error] * len(chosen)
        for (_, _, its), result in zip(chosen, results, strict=True):
            its.append(result)
        self._changed.notify_all()

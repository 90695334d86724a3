"""Joins the calls of drafters that draft for several texts of one step, each in a thread of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition

from edgedec.cost_curve import SharedForward
from edgedec.draft_call import DraftCall
from edgedec.model import Session


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that a thread waits for.

    Attributes:
        session: The session of the text that it is for.
        call: The call.
        result: What it was answered together with, or the error; None before there is one.
    """

    session: Session
    call: DraftCall
    result: SharedForward | BaseException | None = None


class JointCalls:
    """Answers calls as soon as no thread has anything else to do: each one waits for a call, or has left.

    So what is answered together depends on no clock.

    Args:
        n_threads: How many threads draft; each of them calls leave() in the end.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._waiting: list[_Waiting] = []
        self._changed = Condition()

    def answer(self, session: Session, call: DraftCall) -> SharedForward:
        """Answer a call for a session's text, together with calls of the same kind of other threads.

        Raises:
            What Session.answer raises for these calls: where one fails, each of them fails.
        """
        mine = _Waiting(session, call)
        with self._changed:
            self._waiting.append(mine)
            self._answer_where_all_wait()
            while mine.result is None:
                self._changed.wait()
        if isinstance(mine.result, BaseException):
            raise mine.result
        return mine.result

    def leave(self) -> None:
        """Say that the thread calls no more."""
        with self._changed:
            self._n_threads -= 1
            self._answer_where_all_wait()

    def _answer_where_all_wait(self) -> None:
        """Answer the calls of the first kind, unless a thread is still at work; `_changed` is held."""
        if not self._waiting or len(self._waiting) < self._n_threads:
            return
        kind = self._waiting[0].call.kind
        chosen = [waiting for waiting in self._waiting if waiting.call.kind == kind]
        self._waiting = [waiting for waiting in self._waiting if waiting.call.kind != kind]
        _answer(chosen)
        self._changed.notify_all()


def _answer(chosen: Sequence[_Waiting]) -> None:
    """Answer calls of one kind together."""
    results: Sequence[SharedForward | BaseException]
    try:
        results = chosen[0].session.answer([(waiting.session, waiting.call) for waiting in chosen])
    except BaseException as error:  # whoever waits gets it and goes on
        results = [error] * len(chosen)
    for waiting, result in zip(chosen, results, strict=True):
        waiting.result = result

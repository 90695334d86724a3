"""Drafts of several texts for one step: the models that draft for them are called once for all of the texts."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from edgedec.decoding.step import Decoder, Prepared, prepare
from edgedec.sequence import TextState
from edgedec.sessions.forks import SessionForks
from edgedec.sessions.joint_calls import JointCalls

MOST_THREADS = 32
"""Most texts that are drafted for at a time."""


class JointDrafting:
    """Proposes the drafts of a step, for texts on forks of one session. One thread at a time uses it.

    A drafter calls its model in the middle of its work, so each text has a thread of its own while the drafters of
    several texts are about to call models: when all threads wait for such a call, the calls are answered together.
    Threads cost time, so the other steps have none.
    """

    def __init__(self, forks: SessionForks) -> None:
        self._forks = forks
        self._threads: ThreadPoolExecutor | None = None

    def prepared(self, texts: Sequence[tuple[TextState, Decoder]]) -> list[Prepared]:
        """Return what the next forward of each text evaluates (raises what prepare() raises)."""
        policies = [decoder.policy for _, decoder in texts if decoder.policy is not None]
        if sum([policy.will_call for policy in policies]) < 2:
            return [prepare(*text) for text in texts]
        found: list[Prepared] = []
        for begin in range(0, len(texts), MOST_THREADS):
            found += self._in_threads(texts[begin : begin + MOST_THREADS])
        return found

    def _in_threads(self, texts: Sequence[tuple[TextState, Decoder]]) -> list[Prepared]:
        """Prepare texts in a thread each; where the system has no more threads, the others follow in this one."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_THREADS, "edgedec-draft")
        joint = self._forks.joint = JointCalls(len(texts))
        futures: list[Future[Prepared]] = []
        try:
            for text in texts:
                futures.append(self._threads.submit(_prepared, joint, *text))
        except RuntimeError:
            for _ in range(len(futures), len(texts)):
                joint.leave()
        try:
            found = [future.result() for future in futures]
        finally:
            self._forks.joint = None
        return found + [prepare(*text) for text in texts[len(found) :]]

    def close(self) -> None:
        """Wait for the threads and end them; calling close() again does nothing."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _prepared(joint: JointCalls, text: TextState, decoder: Decoder) -> Prepared:
    try:
        return prepare(text, decoder)
    finally:
        joint.leave()

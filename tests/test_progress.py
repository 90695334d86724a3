"""A cancel token stops its work from anywhere, and no later work; a group of processes is ended as a whole."""

import subprocess
import sys
import threading

import pytest

from edgedec.errors import CancelledError
from edgedec.processes import OWN_GROUP, end_group
from edgedec.progress import CancelToken


def test_work_that_looks_at_it_stops() -> None:
    """Work that looks at a cancelled token raises CancelledError, which names the work."""
    token = CancelToken()
    token.check("loading")
    token.cancel()
    token.cancel()
    with pytest.raises(CancelledError, match="loading: cancelled"):
        token.check("loading")


def test_callbacks_count_inside_their_block_only() -> None:
    """A callback is called once for each cancel() inside its block, and never outside."""
    token = CancelToken()
    called: list[str] = []
    token.cancel()
    with token.calling(lambda: called.append("a")), token.calling(lambda: called.append("b")):
        token.cancel()
    token.cancel()
    assert called == ["a", "b"]


def test_a_block_does_not_end_before_a_callback_that_has_begun() -> None:
    """A block waits for a callback that has begun, which would otherwise stop the next work of the same session."""
    token, begun, go_on, ended = CancelToken(), threading.Event(), threading.Event(), threading.Event()
    order = []

    def callback() -> None:
        begun.set()
        assert go_on.wait(30)
        order.append("callback")

    def work() -> None:
        with token.calling(callback):
            started.set()
            assert begun.wait(30)
        order.append("after the block")
        ended.set()

    started = threading.Event()
    worker = threading.Thread(target=work)
    worker.start()
    assert started.wait(30)
    canceller = threading.Thread(target=token.cancel)
    canceller.start()
    assert begun.wait(30)
    assert not ended.wait(0.05)
    go_on.set()
    worker.join(30)
    canceller.join(30)
    assert order == ["callback", "after the block"]


def test_a_callback_may_cancel_again() -> None:
    """A callback may call cancel() again, as a signal handler does in the thread that is cancelling."""
    token = CancelToken()
    called: list[int] = []

    def callback() -> None:
        called.append(len(called))
        if len(called) == 1:
            token.cancel()

    with token.calling(callback):
        token.cancel()
    assert called == [0, 1]


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True])
def test_a_group_ends_as_a_whole(at_once: bool) -> None:
    """The output that parent and child share comes to its end only when both have ended."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, **OWN_GROUP) as process:
        assert process.stdout is not None
        words = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        assert b"here" in words
        end_group(process.pid, at_once=at_once)
        assert process.stdout.read() == b""
        assert process.wait() != 0
    end_group(process.pid, at_once=True)  # nothing is left: nothing happens

"""A process that was started in a group of its own is ended with what it started."""

import subprocess
import sys

import pytest

from edgedec.processes import OWN_GROUP, end_group

pytestmark = pytest.mark.slow

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


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

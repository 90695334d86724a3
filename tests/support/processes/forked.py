"""A process that this one forks, with the models that this one has loaded."""

import os
import select
import signal
import warnings
from collections.abc import Callable


def in_a_forked_child(act: Callable[[], object]) -> str:
    """Return what `act` returns in a forked process, as text; "" where that process raises, dies or hangs."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, str(act()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    ended, _, _ = select.select([read_end], [], [], 30)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = os.read(read_end, 100).decode()
    os.close(read_end)
    return said

"""The child's program: serves the calls that come on standard input, and answers on standard output."""

import importlib
import os
import signal
import sys

from edgedec_runtimes.child.host import Host
from edgedec_runtimes.child.messages import Channel


def main() -> None:
    """Serve the calls of a class ("module:class", the argument) until the parent closes the pipe or ends.

    The pipe gets file descriptors of its own, so that a library that prints something does not write into it. Ctrl-C is
    sent to both processes; only the parent heeds it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    module, _, name = sys.argv[1].partition(":")
    Host(Channel(incoming, outgoing), getattr(importlib.import_module(module), name)()).serve()


if __name__ == "__main__":
    main()

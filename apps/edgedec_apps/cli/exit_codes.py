"""The exit codes that no error of edgedec.errors has; docs/cli.md lists both.

This file imports nothing, so that it works in a damaged installation.
"""

USAGE = 2
NOT_PASSED = 46
INTERNAL = 70
_SIGNAL = 128

OWN = (
    (0, "success", "also where the reader closes the pipe, and for a server that SIGTERM ends"),
    (USAGE, "usage", "an unknown command or option, or a value of the wrong type"),
    (NOT_PASSED, "not passed", "no refined text passed the check; the best one is printed"),
    (INTERNAL, "internal", "a bug in edgedec or a plug-in; EDGEDEC_DEBUG=1 shows where"),
    (_SIGNAL + 15, "terminated", "SIGTERM; another signal that ends a command gives 128 and the number of the signal"),
)
"""The code, the name and the meaning of each."""


def of_signal(number: int) -> int:
    """Return the exit code of a command that a signal ended: 128 and the number of the signal, as in shells.

    >>> of_signal(2), of_signal(15)
    (130, 143)
    """
    return _SIGNAL + number

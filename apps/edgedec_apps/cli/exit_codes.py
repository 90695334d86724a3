"""The exit codes that are not those of an error in edgedec.errors. docs/cli.md is made from both.

This file imports nothing, so that the command can name an installation that does not import.
"""

USAGE = 2
INTERNAL = 70
_SIGNAL = 128

OWN = (
    (0, "success", "also when the reader closes the pipe, and for a server that SIGTERM ends"),
    (USAGE, "usage", "an unknown command or option, or a value of the wrong type"),
    (INTERNAL, "internal", "a bug in edgedec or a plug-in; EDGEDEC_DEBUG=1 shows where"),
    (_SIGNAL + 15, "terminated", "SIGTERM; every other signal that ends a command gives 128 and its number, too"),
)
"""Code, name and meaning of each."""


def of_signal(number: int) -> int:
    """Return the exit code of a command that a signal ended, as shells count it.

    >>> of_signal(2), of_signal(15)
    (130, 143)
    """
    return _SIGNAL + number

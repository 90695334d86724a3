"""What is typed while a text comes: the terminal does not show it there; the next prompt gets it and shows it.

A console of Windows shows only what a program reads.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_before: list[Any] = []  # the terminal's settings, while it does not show what is typed

if sys.platform == "win32":
    import msvcrt

    def _hide() -> None:
        pass

    def restore_echo() -> None:
        """Do nothing."""

    def forget_typed() -> None:
        """Forget what was typed and not read yet."""
        while msvcrt.kbhit():
            msvcrt.getwch()

else:
    import termios

    _LOCAL_MODES = 3  # in the settings that tcgetattr returns

    def _hide() -> None:
        if _before or not (sys.stdin.isatty() and sys.stdout.isatty()) or not _is_in_front():
            return
        with suppress(OSError, ValueError, termios.error):
            settings = termios.tcgetattr(sys.stdin.fileno())
            _before.append([*settings])
            settings[_LOCAL_MODES] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, settings)

    def restore_echo() -> None:
        """Let the terminal show again what is typed, where without_echo() hides it: for an end without cleaning up."""
        while _before:
            settings = _before.pop()
            with suppress(OSError, ValueError, termios.error):
                if _is_in_front():
                    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, settings)

    def forget_typed() -> None:
        """Forget what was typed and not read yet."""
        with suppress(OSError, ValueError, termios.error):
            termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)

    def _is_in_front() -> bool:
        """Tell whether the terminal listens to this process; a background job that changes settings is stopped."""
        try:
            return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return False


@contextmanager
def without_echo() -> Iterator[None]:
    """Let the terminal not show what is typed inside the block; the next prompt gets it.

    Nothing changes where standard input or output is no terminal, and in a background job.
    """
    _hide()
    try:
        yield
    finally:
        restore_echo()

"""How much a call may do, counted in lines of Python: a bound that neither a slow nor a busy machine reaches sooner."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most_lines(n_lines: int) -> Iterator[None]:
    """Raise AssertionError where the functions that this thread calls inside the block run more lines than that.

    >>> with at_most_lines(100):
    ...     _ = dict.fromkeys(range(50))
    """
    n_left = n_lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal n_left
        n_left -= event == "line"
        if n_left < 0:
            sys.settrace(None)  # else the clean-up on the way out raises again
            raise AssertionError(f"more than {n_lines} lines ran, at last in {frame.f_code.co_qualname}")
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)

"""Reports of progress while drafters learn from texts at load."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeVar

from edgedec.load_options import LoadOptions
from edgedec.progress import Progress

_PATIENCE_S = 0.1  # no progress is reported before
_EVERY = 512  # items between two looks at the clock

T = TypeVar("T")


def reported(items: Sequence[T], what: str, options: LoadOptions) -> Iterator[T]:
    """Yield the items, and report the progress to the options' on_progress where they take over a tenth of a second.

    Args:
        items: What is worked on.
        what: What the report and the error call the items.
        options: The load's.

    Raises:
        CancelledError: The options' cancel token was cancelled.
    """
    started, is_reported = monotonic(), False
    for i, item in enumerate(items):
        if i % _EVERY == 0:
            if options.cancel is not None:
                options.cancel.check(f"loading {what}")
            if options.on_progress is not None and monotonic() - started > _PATIENCE_S:
                is_reported = True
                options.on_progress(Progress("load", 100 * i // len(items), 100, "%", what))
        yield item
    if is_reported and options.on_progress is not None:
        options.on_progress(Progress("load", 100, 100, "%", what))

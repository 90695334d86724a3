"""Progress of what drafters learn while a model is loaded."""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TypeVar

from edgedec.model import LoadOptions
from edgedec.progress import Progress

_PATIENCE_S = 0.1  # before anything is reported
_EVERY = 512  # items between two looks at the clock

T = TypeVar("T")


def reported(items: Sequence[T], what: str, options: LoadOptions) -> Iterator[T]:
    """Yield the items; what takes over a tenth of a second is told to the options' on_progress, in per cent.

    Raises:
        CancelledError: The options' cancel came.
    """
    started, told = monotonic(), False
    for i, item in enumerate(items):
        if i % _EVERY == 0:
            if options.cancel is not None:
                options.cancel.check(f"loading {what}")
            if options.on_progress is not None and monotonic() - started > _PATIENCE_S:
                told = True
                options.on_progress(Progress("load", 100 * i // len(items), 100, "%", what))
        yield item
    if told and options.on_progress is not None:
        options.on_progress(Progress("load", 100, 100, "%", what))

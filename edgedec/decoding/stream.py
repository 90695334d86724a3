"""The base of streams: one thread at a time reads, and any thread may stop or close."""

from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from edgedec.decoding.one_reader import OneReader, Visit
from edgedec.errors import RequestError
from edgedec.progress import CancelToken

T = TypeVar("T")


class Stream(Iterator[T], Generic[T]):
    """Yields what a generator yields. Closing or dropping the stream closes the generator.

    One thread at a time reads a stream: a second one gets a SessionError. Closing the model ends the stream, also while
    the stream is paused.

    A subclass calls read_from() once. Its generator looks at `stop`, and ends soon when that is cancelled.

    Attributes:
        reader: Knows which thread is reading.
        stop: Cancelled to end this stream alone.
    """

    def __init__(self, cancel: CancelToken | None) -> None:
        """`cancel` also ends the stream; it may be shared with others."""
        if cancel is not None and not isinstance(cancel, CancelToken):
            raise RequestError(f"cancel is a {type(cancel).__name__}; it must be an edgedec.CancelToken")
        self.reader = OneReader()
        self.stop = CancelToken()
        self._cancel = cancel

    def read_from(self, items: Generator[T]) -> None:
        """Yield what `items` yields."""
        self._items = items if self._cancel is None else _stopped_by(self._cancel, self.stop, items)

    def __next__(self) -> T:
        visit = Visit()
        try:
            self.reader.enter(visit)
            item = next(self._items)
            self._note(item)
            return item
        finally:
            self.reader.leave(visit)

    def _note(self, item: T) -> None:
        """Take note of what is yielded."""

    def cancel(self) -> None:
        """Stop the generation, from any thread; the stream then ends with the finish_reason "cancelled"."""
        self.stop.cancel()

    def close(self) -> None:
        """Stop the generation and free its session, from any thread; calling close() again does nothing.

        A thread that is reading comes to the end of the stream first. From a callback of the stream itself, close()
        only stops the generation; the session is free when the reader has come to the end.
        """
        self.stop.cancel()
        if not self.reader.is_here:
            with self.reader.closing(self.stop.cancel):
                self._items.close()

    def close_soon(self, then: Callable[[], None]) -> bool:
        """Stop the generation from a callback of the stream; return False, and do nothing, elsewhere.

        `then` is called after the step that called the callback.
        """
        if not self.reader.is_here:
            return False
        self.stop.cancel()
        self.reader.afterwards(then)
        return True


def _stopped_by(cancel: CancelToken, stop: CancelToken, items: Generator[T]) -> Generator[T]:
    """Yield `items`; while they are read, cancelling `cancel` also cancels `stop`."""
    with cancel.calling(stop.cancel):
        if cancel.cancelled:
            stop.cancel()
        yield from items

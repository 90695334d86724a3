"""What is closed when it is no longer needed."""

from abc import abstractmethod
from types import TracebackType
from typing import Protocol, Self


class Closeable(Protocol):
    """What holds memory, files or threads until it is closed; `with` closes it at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

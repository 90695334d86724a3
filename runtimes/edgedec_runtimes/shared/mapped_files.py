"""Watches files that a library has mapped: where one is cut short or written to, forwards of the model fail."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from edgedec.errors import ModelFormatError, RuntimeUnavailableError, StorageError, as_storage_error
from edgedec_runtimes.cpu.mapping import Mapping
from edgedec_runtimes.shared.pages import Mapping as Range


class MappedFiles:
    """Files that are mapped as long as a model lives. A file may be deleted or replaced by name, but not changed."""

    def __init__(self, paths: Sequence[Path], ranges: Sequence[Range]) -> None:
        """Watch files, and the ranges of memory where the library has mapped them.

        A fault while a page of these ranges is read is caught; in any other range it ends the process.

        Raises:
            StorageError: A file can't be opened.
        """
        self._paths, self._watched = paths, list[Mapping]()
        with ExitStack() as opened:
            with as_storage_error(str(paths[0]), "check the disk"):
                self._files = [opened.enter_context(path.open("rb")) for path in paths]
            self._states = [_state(file.fileno()) for file in self._files]
            try:
                for address, n_bytes in ranges:
                    self._watched.append(Mapping(address, n_bytes, -1))
                    opened.callback(self._watched[-1].close)
            except RuntimeUnavailableError:  # an installation without the native library
                self._watched.clear()
            self._finalizer = weakref.finalize(self, opened.pop_all().close)
            self._finalizer.atexit = False  # a daemon thread may be in a forward then

    def check(self) -> None:
        """Raise ModelFormatError where a file was cut short or written to since it was mapped, or can't be read."""
        for path, file, state in zip(self._paths, self._files, self._states, strict=True):
            if _state(file.fileno()) != state:
                raise self._error(path, "was cut short or written to")
        try:
            for mapping in self._watched:
                mapping.check("a forward")
        except StorageError as error:
            raise self._error(self._paths[0], "could not be read") from error

    def _error(self, path: Path, what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{path} {what} since it was loaded; the weights are mapped from there, so check the file, and load the "
            "model again (the runtime option mmap=no copies them)"
        )

    def close(self) -> None:
        """Stop watching. Call close() before the library unmaps the files; calling it again does nothing."""
        self._finalizer()


def _state(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns

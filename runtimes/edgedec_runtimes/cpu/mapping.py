"""Watches mapped memory, so that a file that is cut short raises an error instead of ending the process.

Reading a mapped page that lies beyond the end of its file, or that the disk can't read, is a fault (SIGBUS). In the
ranges that are registered here, the native library catches the fault, puts zeros there, and remembers it
(native/weights/mapping.h).
"""

import weakref

from edgedec_runtimes.cpu.library import check, native, new_handle
from edgedec_runtimes.shared.pages import native_handle


class Mapping:
    """A range of mapped memory, watched until close().

    Attributes:
        handle: The native object.
    """

    def __init__(self, address: int, n_bytes: int, fd: int) -> None:
        """Watch the range [address, address + n_bytes).

        Args:
            address: Address of the first page.
            n_bytes: Length of the range.
            fd: Descriptor of the mapped file, whose changes are noticed; -1 to notice only faults.

        Raises:
            StorageError: The system does not tell the state of the file.
        """
        file = native_handle(fd) if fd >= 0 else -1
        self.handle = new_handle(lambda to: native().ec_mapping_open(address, n_bytes, file, to), "mapping a file")
        self._finalizer = weakref.finalize(self, native().ec_mapping_close, self.handle)
        self._finalizer.atexit = False  # a daemon thread may be reading then

    def check(self, what: str) -> None:
        """Raise StorageError where a page could not be read, or the file was changed since it was mapped.

        The message begins with `what`.
        """
        check(native().ec_mapping_check(self.handle), what)

    def close(self) -> None:
        """Stop watching. Call close() before the memory is unmapped; calling it again does nothing."""
        self._finalizer()

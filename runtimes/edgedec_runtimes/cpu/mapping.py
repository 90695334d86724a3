"""Mapped files that another process may cut short: an error of who uses them, where the system would end the process.

Reading a page of a mapping that has no place in its file any more, or that the disk does not give, is a fault (SIGBUS).
The native library catches it inside what is registered here, puts zeros there, and remembers it (native/mapping.h).
"""

import ctypes
import weakref

from edgedec_runtimes.cpu.library import check, native, native_handle


class Mapping:
    """A range of mapped memory, watched until close().

    Attributes:
        handle: The native object.
    """

    def __init__(self, address: int, n_bytes: int, fd: int) -> None:
        """Watch [address, address + n_bytes), pages that map the file with the descriptor `fd` (-1: only faults count).

        Raises:
            StorageError: The file can't be looked at.
        """
        self.handle = ctypes.c_void_p()
        code = native().ec_mapping_open(
            address, n_bytes, native_handle(fd) if fd >= 0 else -1, ctypes.byref(self.handle)
        )
        check(code, "mapping a file")
        self._finalizer = weakref.finalize(self, native().ec_mapping_close, self.handle)
        self._finalizer.atexit = False  # a daemon thread may be reading then

    def check(self, what: str) -> None:
        """Raise StorageError where a page could not be read, or the file was changed since it was mapped."""
        check(native().ec_mapping_check(self.handle), what)

    def close(self) -> None:
        """Watch no longer, which must come before the memory is unmapped; calling it again does nothing."""
        self._finalizer()

"""Native libraries, as far as systems differ: their file names, and the library of C."""

import ctypes
import sys


def library_name(name: str) -> str:
    """Return the file name of a shared library that CMake builds."""
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def c_library() -> ctypes.CDLL:
    """Return the library of C."""
    return ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)

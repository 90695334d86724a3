"""Native libraries, as far as systems differ: their file names, how they find each other, what GPUs are reached by."""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

VULKAN_ALONE = sys.platform not in ("win32", "darwin")
"""Whether a GPU is reached by Vulkan alone here; elsewhere there is Direct3D or Metal."""
VULKAN = {"win32": "vulkan-1.dll", "darwin": "libvulkan.1.dylib"}.get(sys.platform, "libvulkan.so.1")
"""The file name of Vulkan's library."""


def library_name(name: str) -> str:
    """Return the file name of a shared library that CMake builds."""
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def c_library() -> ctypes.CDLL:
    """Return the library of C."""
    return ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)


def open_together(paths: Sequence[Path]) -> list[ctypes.CDLL]:
    """Open libraries of which the first needs the others; where its own functions lead to theirs, the first alone.

    The others by their paths might be second copies there, with variables of their own.

    Raises:
        OSError: A library does not load.
    """
    if sys.platform != "win32":
        return [ctypes.CDLL(str(paths[0]))]
    for variable in ("CUDA_PATH", "HIP_PATH"):
        if (folder := os.environ.get(variable)) is not None and (Path(folder) / "bin").is_dir():
            os.add_dll_directory(str(Path(folder) / "bin"))
    return [ctypes.CDLL(str(path)) for path in paths]

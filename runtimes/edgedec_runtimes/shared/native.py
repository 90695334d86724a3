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

NEEDED_ARE_FOUND = sys.platform != "win32"
"""Whether an opened library's handle also leads to the functions of the libraries that it needs."""


def library_name(name: str) -> str:
    """Return the file name of a shared library that CMake builds."""
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def c_library() -> ctypes.CDLL:
    """Return the library of C."""
    return ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)


def open_libraries(paths: Sequence[Path]) -> list[ctypes.CDLL]:
    """Open libraries, and let Windows find what they need of CUDA and ROCm (OSError where one does not load)."""
    if sys.platform == "win32":
        for variable in ("CUDA_PATH", "HIP_PATH"):
            if (folder := os.environ.get(variable)) is not None and (Path(folder) / "bin").is_dir():
                os.add_dll_directory(str(Path(folder) / "bin"))
    return [ctypes.CDLL(str(path)) for path in paths]


def loaded_libraries(name: str) -> set[str]:
    """Return the paths of the libraries in this process whose file name begins so; on Linux alone, else none."""
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="surrogateescape") if sys.platform == "linux" else ""
    return {line.split(maxsplit=5)[5] for line in text.splitlines() if f"/{name}" in line}

"""Finds and loads ggml's RPC library, and connects this process to servers.

llama-cpp-python has the library where it was built with GGML_RPC. Elsewhere it can be compiled alone, in seconds
(edgedec_runtimes.llamacpp.rpc.build), and is loaded into llama.cpp as a back end.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.storage.probe_cache import cache_folder
from edgedec_runtimes.llamacpp.library import llama, packaged_libraries, version

VARIABLE = "EDGEDEC_RPC_LIBRARY"
HOW_TO_GET_IT = (
    "compile it for the installed llama-cpp-python (python -m edgedec_runtimes.llamacpp.rpc.build: a minute, with a "
    'C++ compiler), or install one that has it (CMAKE_ARGS="-DGGML_RPC=ON" pip install --force-reinstall '
    "--no-cache-dir --no-binary llama-cpp-python llama-cpp-python)"
)
_NAMES = ("libggml-rpc.so", "libggml-rpc.dylib", "ggml-rpc.dll")


def built_library() -> Path:
    """Return where a library that was compiled alone lies, for the installed llama-cpp-python.

    The environment variable EDGEDEC_RPC_LIBRARY names another place.
    """
    if (named := os.environ.get(VARIABLE)) is not None:
        return Path(named)
    import llama_cpp

    return cache_folder(None) / "rpc" / f"llama-cpp-python-{llama_cpp.__version__}" / _NAMES[0]


def find_library() -> Path | None:
    """Return the RPC library of the installed llama-cpp-python, or one compiled for it; None without either."""
    own = [folder / name for folder in packaged_libraries() for name in _NAMES]
    if not own:
        return None
    return next((path for path in (*own, built_library()) if path.is_file()), None)


def rpc_note() -> str:
    """Return a note that says whether llama.cpp has RPC here, and if not, how to get it."""
    path = find_library()
    if path is None:
        return f"no RPC; to use other machines, {HOW_TO_GET_IT}"
    return f"RPC by {path}"


@cache
def rpc_library() -> Any:
    """Load the library into llama.cpp and return it (RuntimeUnavailableError where there is none, or it is unfit)."""
    path = find_library()
    if path is None:
        raise RuntimeUnavailableError(f"llama.cpp has no RPC here; {HOW_TO_GET_IT}")
    api = llama()
    try:
        library = ctypes.CDLL(str(path))
        if not api.llama_supports_rpc() and not _load_backend(path):
            raise OSError("llama.cpp refuses it")
        library.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
        library.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
        library.ggml_backend_rpc_start_server.argtypes = [
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
        ]
        library.ggml_backend_rpc_start_server.restype = None
    except (OSError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"{path} can't be used with {version()}: {error}; delete it, and {HOW_TO_GET_IT}"
        ) from error
    return library


def _load_backend(path: Path) -> bool:
    from llama_cpp._ggml import libggml

    libggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    libggml.ggml_backend_load.restype = ctypes.c_void_p
    return bool(libggml.ggml_backend_load(os.fsencode(path)))


def connect(addresses: Sequence[str]) -> None:
    """Make the devices of servers known to llama.cpp. This process ends where a server is not there, or is lost later.

    So it is called in a child only.
    """
    from llama_cpp._ggml import libggml

    library = rpc_library()
    libggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_register.restype = None
    for address in addresses:
        registry = library.ggml_backend_rpc_add_server(address.encode())
        if not registry:
            raise RuntimeUnavailableError(f"the rpc-server {address} has no devices")
        libggml.ggml_backend_register(registry)

"""Finds and loads ggml's RPC library, and connects this process to servers.

llama-cpp-python has the library where it was built with GGML_RPC. Elsewhere it can be compiled alone, in seconds
(edgedec_runtimes.llamacpp.rpc.build), and is loaded into llama.cpp as a back end. Other packages have none.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from edgedec.errors import RuntimeUnavailableError
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.llamacpp.binding import RELEASES
from edgedec_runtimes.llamacpp.library import chosen, llama, version
from edgedec_runtimes.llamacpp.trial import folders

VARIABLE = "EDGEDEC_RPC_LIBRARY"
HOW_TO_GET_IT = (
    "compile it for the installed llama-cpp-python (python -m edgedec_runtimes.llamacpp.rpc.build: a minute, with a "
    'C++ compiler), or install one that has it (CMAKE_ARGS="-DGGML_RPC=ON" pip install --force-reinstall '
    "--no-cache-dir --no-binary llama-cpp-python llama-cpp-python)"
)
BUILT_FOR = RELEASES[0]
_NAMES = ("libggml-rpc.so", "libggml-rpc.dylib", "ggml-rpc.dll")


def built_library() -> Path:
    """Return where a library that was compiled alone lies, for the installed llama-cpp-python.

    The environment variable EDGEDEC_RPC_LIBRARY names another place.
    """
    if (path := os.environ.get(VARIABLE)) is not None:
        return Path(path)
    return cache_folder() / "rpc" / f"{BUILT_FOR.distribution}-{BUILT_FOR.version}" / _NAMES[0]


def find_library() -> Path | None:
    """Return the RPC library of the installed llama-cpp-python, or one compiled for it; None without either."""
    paths = [folder / name for folder in folders(BUILT_FOR) for name in _NAMES]
    if not paths or chosen() != BUILT_FOR:
        return None
    return next((path for path in (*paths, built_library()) if path.is_file()), None)


def rpc_note() -> str:
    """Return a note that says whether llama.cpp has RPC here, and if not, how to get it."""
    path = find_library()
    if chosen() != BUILT_FOR:
        return f"no RPC, as only {BUILT_FOR.distribution} may have it"
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
        if not api.llama_supports_rpc() and not api.ggml_backend_load(os.fsencode(path)):
            raise OSError("llama.cpp refuses it")
        library.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
        library.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
        text, size = ctypes.c_char_p, ctypes.c_size_t
        library.ggml_backend_rpc_start_server.argtypes = [text, text, size, size, ctypes.c_void_p]
        library.ggml_backend_rpc_start_server.restype = None
    except (OSError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"{path} can't be used with {version()}: {error}; delete it, and {HOW_TO_GET_IT}"
        ) from error
    return library


def connect(addresses: Sequence[str]) -> None:
    """Make the devices of servers known to llama.cpp. This process ends where a server is not there, or is lost later.

    So it is called in a child only.
    """
    library = rpc_library()
    for address in addresses:
        registry = library.ggml_backend_rpc_add_server(address.encode())
        if not registry:
            raise RuntimeUnavailableError(f"the rpc-server {address} has no devices")
        llama().ggml_backend_register(registry)

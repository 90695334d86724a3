"""An rpc-server on the CPU by the installed llama.cpp: python -m edgedec_runtimes.llamacpp.rpc.server HOST PORT [N].

llama.cpp's own rpc-server does the same, and lends GPUs as well. Neither asks who connects: whoever reaches the port
can read and write the process's memory, so it belongs on a network of your own.
"""

import ctypes
import sys

from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.llamacpp.rpc.addresses import check_addresses
from edgedec_runtimes.llamacpp.rpc.library import rpc_library


def serve(address: str, n_threads: int) -> None:
    """Serve one program after another at "host:port" until the process is ended."""
    check_addresses([address])
    library = rpc_library()
    devices = (ctypes.c_void_p * 1)(llama().ggml_backend_dev_by_name(b"CPU"))
    library.ggml_backend_rpc_start_server(address.encode(), None, n_threads, 1, devices)


if __name__ == "__main__":
    serve(f"{sys.argv[1]}:{sys.argv[2]}", int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    sys.exit(f"the server at {sys.argv[1]}:{sys.argv[2]} did not start: is the port in use?")

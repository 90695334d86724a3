"""An rpc-server on the CPU by the installed llama.cpp: python -m edgedec_runtimes.llamacpp.rpc.server HOST PORT [N].

llama.cpp's own rpc-server does the same, and lends GPUs as well. Neither asks who connects: whoever reaches the port
can read and write the process's memory, so it belongs on a network of your own. `hosting` is the other side: what a
model on such servers is loaded by.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.child.model import Hosting
from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.llamacpp.options import llamacpp_options
from edgedec_runtimes.llamacpp.rpc.addresses import check_addresses
from edgedec_runtimes.llamacpp.rpc.library import HOW_TO_GET_IT, find_library, rpc_library
from edgedec_runtimes.llamacpp.rpc.servers import ask_servers, silent

_ADVICE = "see that every server runs, and ask again; the next request loads the model anew"


def hosting(
    target: str, path: Path, options: LoadOptions, terms: Callable[[int, int], tuple[MemoryTerm, ...]]
) -> Hosting:
    """Return what a child loads by the function `target`, and what it needs: the RPC library and the servers."""
    servers = llamacpp_options(options).machines

    def prepare() -> None:
        if find_library() is None:
            raise RuntimeUnavailableError(f"llama.cpp has no RPC here; {HOW_TO_GET_IT}")
        ask_servers(servers)

    def explain(reason: str) -> str:
        gone = silent(servers)
        if not gone:
            return (
                f"the connection to the rpc-server {' or '.join(servers)} was lost ({reason}), and each answers again"
            )
        what = f"the rpc-server {gone[0]} does" if len(gone) == 1 else f"the rpc-servers {' and '.join(gone)} do"
        return f"{what} not answer any more"

    return Hosting(target, path, options, terms, prepare, explain, _ADVICE)


def serve(address: str, n_threads: int) -> None:
    """Serve one program after another at "host:port" until the process is ended."""
    check_addresses([address])
    library = rpc_library()
    devices = (ctypes.c_void_p * 1)(llama().ggml_backend_dev_by_name(b"CPU"))
    library.ggml_backend_rpc_start_server(address.encode(), None, n_threads, 1, devices)


if __name__ == "__main__":
    serve(f"{sys.argv[1]}:{sys.argv[2]}", int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    sys.exit(f"the server at {sys.argv[1]}:{sys.argv[2]} did not start: is the port in use?")

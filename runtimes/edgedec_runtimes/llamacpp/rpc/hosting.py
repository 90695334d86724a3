"""A model whose layers lie on other machines: llama.cpp runs in a child, which ends when a server is lost."""

from collections.abc import Callable
from pathlib import Path

from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec_runtimes.child.model import Hosting
from edgedec_runtimes.llamacpp.options import own
from edgedec_runtimes.llamacpp.rpc.library import HOW_TO_GET_IT, find_library
from edgedec_runtimes.llamacpp.rpc.servers import ask_servers, silent

_ADVICE = "see that every server runs, and ask again; the next request loads the model anew"


def hosting(
    target: str, path: Path, options: LoadOptions, terms: Callable[[int, int], tuple[MemoryTerm, ...]]
) -> Hosting:
    """Return what a child loads by the function `target`, and what it needs: the RPC library and the servers."""
    servers = own(options).machines

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

"""What a person should know before a model's layers are put on other machines, and what can't be done with it there."""

from collections.abc import Sequence
from ipaddress import ip_address

from edgedec.errors import RequestError, argument


def servers_note(addresses: Sequence[str]) -> str:
    """Return a warning for servers ("host:port") that are beyond this machine; "" where there are none."""
    beyond = [address for address in addresses if not _is_here(address)]
    if not beyond:
        return ""
    verb = "is" if len(beyond) == 1 else "are"
    return (
        f"{' and '.join(beyond)} {verb} beyond this machine: an rpc-server asks for no password and encrypts nothing, "
        "and whoever reaches its port can read the text and take over the process there; keep it on a network of your "
        "own"
    )


def require_no_layers_here(*, layer_skip: bool, draft_head: bool) -> None:
    """Raise RequestError for options that need the layers of a model on this machine, where others hold them.

    Args:
        layer_skip: Whether layers are to be left out.
        draft_head: Whether a trained draft head is named that would be used.
    """
    where = "the model's layers are put on other machines by llama.cpp, which can't"
    if layer_skip:
        raise RequestError(
            f"{argument('layer_skip')} needs a runtime that can leave out layers, and {where}; leave "
            f"{argument('layer_skip')} or {argument('rpc')} out"
        )
    if draft_head:
        raise RequestError(
            f"{argument('draft_head')} needs a runtime that returns hidden states, and {where}; leave "
            f"{argument('draft_head')} or {argument('rpc')} out, or give a draft model ({argument('draft_model')}), "
            "which drafts on this machine"
        )


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

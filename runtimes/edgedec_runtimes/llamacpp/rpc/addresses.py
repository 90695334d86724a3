"""The addresses of rpc-servers, and what a person should know before a model's layers are put there."""

from collections.abc import Sequence
from ipaddress import ip_address

from edgedec.errors import OptionError, RequestError, argument

_MOST = 16  # servers that ggml connects to


def addresses_of(rpc: object) -> tuple[str, ...]:
    """Return the addresses that the option `rpc` names ("HOST:PORT,..."); none for None.

    Raises:
        OptionError: It names none, or as check_addresses.
    """
    if rpc is None:
        return ()
    if not isinstance(rpc, str):
        raise OptionError("rpc", rpc, "it must be a text such as '192.168.1.20:50052,192.168.1.21:50052'")
    addresses = tuple(filter(None, rpc.replace(" ", "").split(",")))
    check_addresses(addresses or (rpc,))
    return addresses


def check_addresses(addresses: Sequence[str]) -> None:
    """Raise OptionError unless each address is "host:port", and none comes twice."""
    for address in addresses:
        host, _, port = address.partition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise OptionError("rpc", address, "an rpc-server is given as HOST:PORT, such as 192.168.1.20:50052")
    if len(set(addresses)) != len(addresses) or len(addresses) > _MOST:
        raise OptionError("rpc", ",".join(addresses), f"it may name at most {_MOST} servers, each of them once")


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
            "which runs on this machine"
        )


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

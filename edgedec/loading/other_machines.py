"""What a person should know before a model's layers are put on other machines."""

from collections.abc import Sequence
from ipaddress import ip_address


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


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

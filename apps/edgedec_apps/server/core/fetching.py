"""Fetches a picture from another machine, by https, from hosts that the server's owner named, and from no other.

A client must not reach through the server what it can't reach itself. So the host's name is looked up once, an address
that is not public is refused, and the connection goes to the very address that was looked at. A redirect is checked the
same way. Bytes, redirects and seconds are limited, and no proxy is used.
"""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from urllib.parse import SplitResult, urljoin, urlsplit

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken
from edgedec_apps.server.core.errors import ApiError

MOST_BYTES = 10_000_000
"""Most bytes of a picture's file."""
MOST_SECONDS = 10.0
"""Most seconds that fetching one picture takes, its redirects included."""
_MOST_REDIRECTS = 3
_PORT = 443
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an IPv4 address as networks without IPv4 reach it
_UNICAST = ipaddress.ip_network("2000::/3")  # all public IPv6 addresses that were given out
_NO_HOSTS = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/23", "3fff::/20")))  # 6to4; Teredo; examples
_RELAYS = ipaddress.ip_network("192.88.99.0/24")  # of 6to4
_PIECE_BYTES = 65_536
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "edgedec", "connection": "close"}


def fetch(url: str, hosts: Sequence[str], cancel: CancelToken) -> bytes:
    """Return what lies at an address of https on one of the hosts.

    Raises:
        ApiError: The address or a redirect is not allowed, the file is too large, or it can't be fetched in time.
        CancelledError: `cancel` was cancelled.
    """
    sockets: list[socket.socket] = []
    over: list[str] = []

    def end(why: str) -> None:
        over.append(why)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it

    clock = Timer(MOST_SECONDS, end, [f"it took longer than {MOST_SECONDS:g} s"])
    clock.daemon = True
    clock.start()
    try:
        with cancel.calling(lambda: end("it was cancelled")):
            at = url
            for _ in range(1 + _MOST_REDIRECTS):
                cancel.check("fetching a picture")
                answer = _answer(host_of(at, hosts), sockets, over)
                if isinstance(answer, bytes):
                    return answer
                at = urljoin(at, answer)
        raise _failed(url, f"it was redirected more than {_MOST_REDIRECTS} times")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if cancel.cancelled:
            raise CancelledError("fetching a picture: cancelled") from None
        raise _failed(url, over[0] if over else str(error) or type(error).__name__) from None
    finally:
        clock.cancel()
        for each in sockets:
            each.close()


def host_of(url: str, hosts: Sequence[str]) -> SplitResult:
    """Return the parts of an address from which a picture may be fetched.

    >>> host_of("https://example.org/a.png", ["example.org"]).hostname
    'example.org'

    Raises:
        ApiError: The address is no plain one of https, or its host is not allowed.
    """
    try:
        parts = urlsplit(url)
        plain = parts.scheme == "https" and parts.port in (None, _PORT) and "@" not in parts.netloc
    except ValueError:
        plain = False
    if not plain or not url.isascii() or not url.isprintable() or " " in url or not parts.hostname:
        raise _failed(url, "it must be a plain https address, on port 443, without a name and password", refused=True)
    if parts.hostname.rstrip(".") not in {host.lower().rstrip(".") for host in hosts}:
        hosts_text = f"named {', '.join(hosts)}" if hosts else "named none"
        raise _failed(
            url,
            f"pictures are fetched only from hosts that the server's owner allows (--image-hosts, which {hosts_text}); "
            "send the picture itself, as a data: URL",
            refused=True,
        )
    return parts


def _answer(url: SplitResult, sockets: list[socket.socket], over: list[str]) -> bytes | str:
    """Return the bytes of the file at an address, or, as a text, the address that its host redirects to."""
    host = url.hostname or ""
    connection = http.client.HTTPConnection(host, timeout=MOST_SECONDS)  # over the socket of TLS below
    connection.sock = _connected(host, _public_address(host))
    sockets.append(connection.sock)
    if over:
        raise TimeoutError(over[0])
    connection.request("GET", (url.path or "/") + (f"?{url.query}" if url.query else ""), headers=_HEADERS)
    with connection.getresponse() as answer:
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("location", "")
        if answer.status != 200:
            raise ValueError(f"its host answered with status {answer.status}")
        data = bytearray()
        length = answer.length or 0
        while length <= MOST_BYTES and (piece := answer.read(_PIECE_BYTES)):
            data += piece
            length = max(length, len(data))
    if length > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    if over:
        raise TimeoutError(over[0])
    return bytes(data)


def _public_address(host: str) -> str:
    """Return an address of a host (OSError where one of its addresses is not public)."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not is_public(address):
            raise OSError("its host has an address that is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public network, and leads to no other one.

    An IPv6 address that holds an IPv4 address is what that is (NAT64, mapped), or it is of a tunnel, which no public
    host needs (6to4, Teredo, compatible).

    >>> [is_public(each) for each in ("1.1.1.1", "127.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "224.0.0.1")]
    [True, False, False, False, False]
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped or ip in _NAT64:
            ip = ipaddress.IPv4Address(ip.packed[-4:])
        elif ip not in _UNICAST or any(ip in network for network in _NO_HOSTS):
            return False
    return ip.is_global and not ip.is_multicast and ip not in _RELAYS


def _connected(host: str, address: str) -> socket.socket:
    """Return a connection to an address, whose certificate is the host's."""
    plain = socket.create_connection((address, _PORT), timeout=MOST_SECONDS)
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _failed(url: str, why: str, *, refused: bool = False) -> ApiError:
    """Return the error of a picture that can't be fetched; the address is shortened, and its query is left out."""
    shown = url.partition("?")[0][:100]
    what = "can't be taken from" if refused else "can't be fetched from"
    return ApiError(f"a picture {what} {shown!r}: {why}", param="messages", code="picture_not_fetched")

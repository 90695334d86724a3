"""Asks an rpc-server who it is and what devices it has, before llama.cpp connects, which would end its process.

The protocol is that of llama.cpp's ggml-rpc: a request is a byte, a length and data; an answer is a length and data.
"""

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from edgedec.device import Device
from edgedec.errors import OptionError, RuntimeUnavailableError

_PATIENCE_S = 5.0
_MOST = 16  # servers that ggml connects to
_GET_DEVICE_MEMORY, _HELLO, _DEVICE_COUNT = 11, 14, 15
_CAPABILITIES = bytes(24)  # none beside TCP
_MAJOR, _MINOR = 7, 0  # of the protocol of the tested llama-cpp-python
_LENGTH = struct.Struct("<Q")
_VERSION, _COUNT, _MEMORY = struct.Struct("<3Bx24x"), struct.Struct("<I"), struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself.

    Attributes:
        address: Its "host:port".
        memory: For each of its devices the bytes that are free, and all of them.
    """

    address: str
    memory: tuple[tuple[int, int], ...]


def check_addresses(addresses: Sequence[str]) -> None:
    """Raise OptionError unless each address is "host:port", and none comes twice."""
    for address in addresses:
        host, _, port = address.partition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise OptionError("rpc", address, "an rpc-server is given as HOST:PORT, such as 192.168.1.20:50052")
    if len(set(addresses)) != len(addresses) or len(addresses) > _MOST:
        raise OptionError("rpc", ",".join(addresses), f"it may name at most {_MOST} servers, each of them once")


def rpc_devices(addresses: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of these servers, by the names and in the order that llama.cpp gives them.

    Raises:
        RuntimeUnavailableError: A server does not answer, serves somebody else, or speaks another protocol.
    """
    memory = [(address, *sizes) for address in addresses for sizes in ask_server(address).memory]
    return tuple(
        Device(f"RPC{index}", "RPC", total, free, description=f"a device of {address}")
        for index, (address, free, total) in enumerate(memory)
    )


def ask_server(address: str, patience_s: float = _PATIENCE_S) -> Server:
    """Connect to a server, ask it for its protocol and its devices, and hang up.

    Raises:
        RuntimeUnavailableError: As rpc_devices.
    """
    host, _, port = address.partition(":")
    try:
        connection = socket.create_connection((host, int(port)), patience_s)
    except OSError as error:
        raise RuntimeUnavailableError(
            f"the rpc-server {address} can't be reached ({error}); start it there (rpc-server --host ADDRESS "
            f"--port {port}), and look at the address and the firewall"
        ) from error
    with connection:
        try:
            return _asked(connection, address)
        except TimeoutError as error:
            raise RuntimeUnavailableError(
                f"the rpc-server {address} accepts the connection and says nothing for {patience_s:g} s: it serves "
                f"one program at a time, so end the other one, or start a second rpc-server on another port"
            ) from error
        except (OSError, struct.error) as error:
            raise RuntimeUnavailableError(
                f"what listens at {address} does not answer as llama.cpp's rpc-server ({error}); look at the port"
            ) from error


def _asked(connection: socket.socket, address: str) -> Server:
    major, minor, patch = _VERSION.unpack(_call(connection, _HELLO, _CAPABILITIES, _VERSION.size))
    if major != _MAJOR or minor > _MINOR:
        raise RuntimeUnavailableError(
            f"the rpc-server {address} speaks version {major}.{minor}.{patch} of the protocol, llama.cpp here "
            f"{_MAJOR}.{_MINOR}: build both from the same release of llama.cpp"
        )
    (n_devices,) = _COUNT.unpack(_call(connection, _DEVICE_COUNT, b"", _COUNT.size))
    memory = []
    for index in range(min(n_devices, _MOST)):
        found = _MEMORY.unpack(_call(connection, _GET_DEVICE_MEMORY, _COUNT.pack(index), _MEMORY.size))
        memory.append((found[0], found[1]))
    return Server(address, tuple(memory))


def _call(connection: socket.socket, command: int, data: bytes, n_answer: int) -> bytes:
    """Send a request and return the answer's data, which must have `n_answer` bytes (OSError where it has not)."""
    connection.sendall(bytes([command]) + _LENGTH.pack(len(data)) + data)
    (n_bytes,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if n_bytes != n_answer:
        raise OSError(f"an answer of {n_bytes} bytes in place of {n_answer}")
    return _read(connection, n_answer)


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        piece = connection.recv(n_bytes - len(data))
        if not piece:
            raise OSError("it hung up")
        data += piece
    return data


def silent(addresses: Sequence[str]) -> list[str]:
    """Return the servers that nobody can connect to now."""
    found = []
    for address in addresses:
        host, _, port = address.partition(":")
        try:
            with suppress(TimeoutError), socket.create_connection((host, int(port)), 2.0):
                continue
        except OSError:
            pass
        found.append(address)
    return found

"""Asks an rpc-server who it is and what devices it has, before llama.cpp connects, which would end its process.

The protocol is that of llama.cpp's ggml-rpc: a request is a byte, a length and data; an answer is a length and data.
"""

import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic

from edgedec.errors import RuntimeUnavailableError
from edgedec.memory_plan import Device

_PATIENCE_S, _SHORT_PATIENCE_S = 5.0, 2.0
_MOST = 16  # devices of a server
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


def rpc_devices(addresses: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices of these servers, by the names and in the order that llama.cpp gives them.

    Raises:
        RuntimeUnavailableError: A server does not answer, serves somebody else, or speaks another protocol.
    """
    memory = [(server.address, *sizes) for server in ask_servers(addresses) for sizes in server.memory]
    return tuple(
        Device(f"RPC{index}", "RPC", total, free, description=f"a device of {address}")
        for index, (address, free, total) in enumerate(memory)
    )


def ask_servers(addresses: Sequence[str]) -> list[Server]:
    """Ask all servers at the same time, and return what each says of itself.

    Raises:
        RuntimeUnavailableError: As rpc_devices; the message has a sentence on each of these servers.
    """
    replies = _all_asked(addresses, _PATIENCE_S)
    errors = [answer for answer in replies if isinstance(answer, RuntimeUnavailableError)]
    if errors:
        raise RuntimeUnavailableError("; ".join(error.marked for error in errors))
    return [answer for answer in replies if isinstance(answer, Server)]


def silent(addresses: Sequence[str]) -> list[str]:
    """Return the servers that do not answer as they should now."""
    replies = _all_asked(addresses, _SHORT_PATIENCE_S)
    return [address for address, answer in zip(addresses, replies, strict=True) if not isinstance(answer, Server)]


def _all_asked(addresses: Sequence[str], patience_s: float) -> list[Server | RuntimeUnavailableError]:
    """Return what each server says of itself, or why it says nothing."""

    def asked(address: str) -> Server | RuntimeUnavailableError:
        try:
            return ask_server(address, patience_s)
        except RuntimeUnavailableError as error:
            return error

    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        return list(threads.map(asked, addresses))


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
            return _asked(connection, address, monotonic() + patience_s)
        except TimeoutError as error:
            raise RuntimeUnavailableError(
                f"the rpc-server {address} accepts the connection and says nothing for {patience_s:g} s: it serves "
                f"another program (an rpc-server serves one program at a time), hangs, or is none; end the other "
                f"program, or start an rpc-server on another port"
            ) from error
        except (OSError, struct.error) as error:
            raise RuntimeUnavailableError(
                f"what listens at {address} does not answer as llama.cpp's rpc-server ({error}); look at the port"
            ) from error


def _asked(connection: socket.socket, address: str, deadline: float) -> Server:
    """Ask until the deadline, by the monotonic clock (TimeoutError, OSError, struct.error for other answers)."""
    call = partial(_call, connection, deadline)
    major, minor, patch = _VERSION.unpack(call(_HELLO, _CAPABILITIES, _VERSION.size))
    if major != _MAJOR or minor > _MINOR:
        raise RuntimeUnavailableError(
            f"the rpc-server {address} speaks version {major}.{minor}.{patch} of the protocol, llama.cpp here "
            f"{_MAJOR}.{_MINOR}: build both from the same release of llama.cpp"
        )
    (n_devices,) = _COUNT.unpack(call(_DEVICE_COUNT, b"", _COUNT.size))
    memory = []
    for index in range(min(n_devices, _MOST)):
        sizes = _MEMORY.unpack(call(_GET_DEVICE_MEMORY, _COUNT.pack(index), _MEMORY.size))
        memory.append((sizes[0], sizes[1]))
    return Server(address, tuple(memory))


def _call(connection: socket.socket, deadline: float, command: int, data: bytes, n_answer: int) -> bytes:
    """Send a request and return the answer's data, which must have `n_answer` bytes (OSError where it has not)."""
    connection.sendall(bytes([command]) + _LENGTH.pack(len(data)) + data)
    (n_bytes,) = _LENGTH.unpack(_read(connection, deadline, _LENGTH.size))
    if n_bytes != n_answer:
        raise OSError(f"an answer of {n_bytes} bytes in place of {n_answer}")
    return _read(connection, deadline, n_answer)


def _read(connection: socket.socket, deadline: float, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        connection.settimeout(max(0.001, deadline - monotonic()))
        piece = connection.recv(n_bytes - len(data))
        if not piece:
            raise OSError("it hung up")
        data += piece
    return data

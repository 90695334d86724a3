"""Real rpc-servers on this machine, each in a process of its own, for the tests of other machines."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgedec_runtimes.child.process import child_environment
from edgedec_runtimes.llamacpp.rpc.library import VARIABLE, find_library

PATIENCE_S = 60.0


class RpcServer:
    """A server on a port of its own, which may be killed and started again.

    Attributes:
        address: Its "host:port".
    """

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        command = [sys.executable, "-m", "edgedec_runtimes.llamacpp.rpc.server", "127.0.0.1", str(self._port)]
        self._process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            except OSError:
                assert self._process.poll() is None, f"the server at {self.address} ended"
                assert time.monotonic() < deadline, f"the server at {self.address} does not listen"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """End it at once, as a machine that loses power does."""
        self._process.kill()
        self._process.wait()


@contextmanager
def rpc_servers(n: int) -> Iterator[list[RpcServer]]:
    """Yield servers that run inside the block; skip the test where llama.cpp has no RPC here."""
    if find_library() is None:
        pytest.skip(f"llama.cpp has no RPC here: python -m edgedec_runtimes.llamacpp.rpc.build, or {VARIABLE}")
    servers = [RpcServer() for _ in range(n)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()

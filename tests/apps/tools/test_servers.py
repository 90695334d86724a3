"""Tool servers: those of MCP's own SDK at both transports, and such as end, hang, flood and send rubbish."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import plain_tool_server
from support.processes.tool_server import HERE

pytest.importorskip("mcp", reason="MCP's SDK is not installed")

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken
from edgedec_apps.tools.configuration import Address, Program, Server
from edgedec_apps.tools.servers import ToolServers

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


def plain(mode: str = "", name: str = "plain", **env: str) -> Program:
    """Return the server without an SDK."""
    return Program(name, sys.executable, (str(plain_tool_server.PATH), mode), env)


@contextmanager
def connected(*servers: Server) -> Iterator[ToolServers]:
    """Yield the servers once they have listed their tools."""
    found = ToolServers(servers)
    try:
        found.wait(CancelToken())
        yield found
    finally:
        found.close()


def text(servers: ToolServers, name: str, arguments: str = "{}") -> str:
    """Return what a call brings, which must not fail."""
    result = servers.call(name, arguments, CancelToken())
    assert not result.failed, result
    return result.text


@contextmanager
def served_over_http(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of the SDK's server at a port."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(HERE), str(port)], stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < until, (tmp_path / "log").read_text()
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_the_sdks_server_at_both_transports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools are listed and called; pictures are named; a server gets no variable of ours but those of its file."""
    monkeypatch.setenv("EDGEDEC_API_KEY", "secret")
    with (
        served_over_http(tmp_path) as url,
        connected(Address("web", url), Program("pipe", sys.executable, (str(HERE),), {"OWN": "1"})) as servers,
    ):
        names = ["add", "wait", "die", "huge", "picture", "variable"]
        assert [tool.name for tool in servers.tools] == [f"{kind}_{name}" for kind in ("web", "pipe") for name in names]
        assert servers.notes == []
        assert servers.tools[0].definition["function"]["description"] == "Add two numbers."
        for kind in ("web", "pipe"):
            assert text(servers, f"{kind}_add", '{"a": 1, "b": 41}') == "42"
            result = servers.call(f"{kind}_picture", "{}", CancelToken())
            assert result.text == "seen\n\n[left out: image (image/png); only text is read]"
            wrong = servers.call(f"{kind}_add", '{"a": "x"}', CancelToken())
            assert wrong.failed
            cut = servers.call(f"{kind}_huge", '{"n": 100000}', CancelToken(), 2_000)
            assert len(cut.text) < 2_100
        monkeypatch.setattr("edgedec_apps.tools.link.MOST_LINE_BYTES", 50_000)
        assert servers.call("web_huge", '{"n": 60000}', CancelToken()).failed
        assert text(servers, "pipe_variable", '{"name": "OWN"}') == "1"
        assert text(servers, "pipe_variable", '{"name": "EDGEDEC_API_KEY"}') == "unset"


def test_a_server_that_can_not_be_used_is_named_and_the_others_work() -> None:
    """No such program, one that ends with a word, one that floods, one that talks, and an address without a server."""
    modes = [plain(mode, mode) for mode in ("end", "flood", "talk")]
    others = [Program("none", "/no/such/program"), Address("web", "http://127.0.0.1:9/mcp"), plain()]
    with connected(*modes, *others) as servers:
        assert [tool.name for tool in servers.tools] == list(plain_tool_server.TOOLS)
        notes = sorted(servers.notes)
        assert notes[0] == "the tool server end can't be used: the program ended; it said: no such database"
        assert notes[1] == "the tool server flood can't be used: it floods: a message has at most 8 MB"
        assert notes[2] == "the tool server none can't be used: No such file or directory"
        assert notes[3] == "the tool server talk can't be used: it writes lines that are no MCP to its standard output"
        assert notes[4].startswith("the tool server web can't be used: ConnectError")
        assert text(servers, "echo", '{"text": "x"}') == 'echo: {"text": "x"}'


def test_a_server_that_breaks_in_a_call_is_started_again() -> None:
    """One that ends or floods fails that call, with what it said last; the next call finds a new one."""
    with connected(plain()) as servers:
        for name, words in (("die", "out of order"), ("flood", "it floods"), ("wrong", "not as MCP says")):
            result = servers.call(name, "{}", CancelToken())
            assert result.failed
            assert words in result.text
            assert text(servers, "echo") == "echo: {}"
        assert text(servers, "rubbish") == "rubbish: {}"
        assert text(servers, "deep") == "deep: {}"
        assert servers.call("refuse", "{}", CancelToken()).failed
        assert "no tool 'rm'; known: echo, " in servers.call("rm", "{}", CancelToken()).text
        for arguments in ("[]", "{", "5", "[" * 100_000):
            assert servers.call("echo", arguments, CancelToken()).text == "The arguments must be a JSON object."


def test_a_call_ends_with_its_cancel_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call of a server that hangs waits for its own time only; at the end no program is left."""
    started = tmp_path / "started"
    with connected(plain(STARTED=str(started)), plain("as:other", "second")) as servers:
        cancel = CancelToken()

        def stop() -> None:
            while not started.exists():
                time.sleep(0.01)
            cancel.cancel()

        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(CancelledError):
            servers.call("hang", "{}", cancel)
        thread.join()
        with pytest.raises(CancelledError):
            servers.call("echo", "{}", cancel)
        assert text(servers, "other") == "other: {}"
        monkeypatch.setattr("edgedec_apps.tools.link.CALL_S", 0.3)
        late = servers.call("echo", "{}", CancelToken())
        assert late.failed
        monkeypatch.undo()
        assert text(servers, "echo") == "echo: {}"
        assert late.text == "The call failed: the tool server plain did not answer the call of 'echo': the time is over"
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout
    assert plain_tool_server.PATH.name not in children


def test_a_server_that_says_nothing_is_left_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cancel ends the wait for it."""
    monkeypatch.setattr("edgedec_apps.tools.link.CONNECT_S", 0.5)
    with connected(plain("silent")) as servers:
        assert servers.notes == ["the tool server plain does not answer: the time is over"]
    cancel = CancelToken()
    cancel.cancel()
    servers = ToolServers([plain("silent")])
    with pytest.raises(CancelledError):
        servers.wait(cancel)
    servers.close()


def test_many_calls_at_once_get_their_own_answers() -> None:
    """From several threads, of one server."""
    with connected(plain()) as servers:
        futures = [servers.start_call("echo", f'{{"text": "{i}"}}') for i in range(50)]
        assert [future.result(PATIENCE_S).text for future in futures] == [f'echo: {{"text": "{i}"}}' for i in range(50)]

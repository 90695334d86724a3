"""The web chat's tools: what the server lists and runs for the page, and the page's question before each call."""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.models.saying_model import saying_model
from support.processes import plain_tool_server
from support.processes.browser import Browser
from support.processes.command_line import run_here
from support.processes.running_server import Running, messages, started, wait_until

pytest.importorskip("mcp", reason="MCP's SDK is not installed")

from edgedec.progress import CancelToken
from edgedec_apps.server.core.service import OfferedTools
from edgedec_apps.tools.configuration import Program
from edgedec_apps.tools.servers import ToolServers

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}={% else %}?{% endif %}"
)
CALL = '\n{"name": "echo", "arguments": {"text": "a\u202eb <b>"}}\n'


@contextmanager
def with_tools(root: Path) -> Iterator[Running]:
    """Start a server of a model that calls a tool in each answer; of its tools, the page need not ask for `refuse`."""
    says = {"?": ["Wait", "<tool_call>", CALL, "</tool_call>"], "=": ["Done", "."]}
    path = saying_model(root / "caller.gguf", says, chat_template=TEMPLATE, n_ctx_train=4096)
    program = Program("plain", sys.executable, (str(plain_tool_server.PATH),), {"STARTED": str(root / "hangs")})
    servers = ToolServers([program])
    servers.wait(CancelToken())
    try:
        with started(path, n_parallel=2, load_options={"n_ctx": 4096}, tools=OfferedTools(servers, ("refuse",))) as it:
            yield it
    finally:
        servers.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with tools."""
    with with_tools(tmp_path_factory.mktemp("tools")) as running:
        yield running


def call(client: httpx.Client, name: str, arguments: str = "{}") -> httpx.Response:
    """Run a tool as the page does."""
    return client.post("/page/tools", json={"name": name, "arguments": arguments})


def test_tools_are_listed_and_run(server: Running) -> None:
    """With their definitions, and whether the page asks; what goes wrong in a tool is an answer, too."""
    listed = server.client.get("/page/tools").json()["tools"]
    assert [(each["definition"]["function"]["name"], each["ask"]) for each in listed] == [
        (name, name != "refuse") for name in plain_tool_server.TOOLS
    ]
    assert call(server.client, "echo", '{"text": "x"}').json() == {
        "text": 'echo: {"text": "x"}',
        "failed": False,
        "note": "",
    }
    died = call(server.client, "die").json()
    assert died["failed"]
    assert "out of order" in died["text"]
    assert "There is no tool 'rm'" in call(server.client, "rm").json()["text"]
    for body in ({}, {"name": 5}, {"name": "echo", "arguments": 5}):
        assert server.client.post("/page/tools", json=body).status_code == 400
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["meta"]["tools"] is True


def test_other_pages_run_no_tool(server: Running) -> None:
    """The guard of all addresses stands before the tools."""
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        reply = server.client.post("/page/tools", json={"name": "echo"}, headers=headers)
        assert reply.status_code == 403


def test_there_are_none_where_the_operator_gave_none(chat_path: Path, tmp_path: Path) -> None:
    """An empty list, no call; with --no-auth anybody could run tools, so that is refused."""
    with started(chat_path) as running:
        assert running.client.get("/page/tools").json() == {"tools": []}
        assert call(running.client, "echo").status_code == 404
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"x": {"command": "x"}}}), encoding="utf-8")
    refused = run_here("serve", chat_path, "--mcp", file, "--no-auth", "--host", "0.0.0.0")
    refused.failed(40, "give --api-key KEY, not --no-auth")


def begin(page: Browser) -> None:
    """Send a message, and wait for the question."""
    page.find("#prompt").send_keys("hi")
    page.press("\n")
    page.wait(lambda: page.shown("#tool"), "the page does not ask")


def test_the_page_asks_before_each_call(chromium: Browser, server: Running) -> None:
    """It shows the tool with what can't be seen in it; Escape and the first button decline, "always" lasts."""
    page = chromium
    page.open(server.url)
    begin(page)
    assert page.text("#tool-name") == "echo"
    assert page.text("#tool-server") == "plain"
    assert page.text("#tool-arguments") == 'text"a\\u{202e}b <b>"'
    assert page.focused == "Don't run it"
    page.press("\ue00c")  # Escape
    page.wait_idle()
    assert [node.text for node in page.all(".tool-call summary")] == ["Tool echo: failed"]
    assert page.text(".message:last-child .text") == "Done."
    begin(page)
    page.find("#tool [value=run]").click()
    page.wait_idle()
    assert page.all(".tool-call summary")[-1].text == "Tool echo: answered"
    begin(page)
    page.find("#tool [value=always]").click()
    page.wait_idle()
    page.ask("hi")
    page.wait(lambda: len(page.all(".tool-call")) == 4, "the call does not run")
    page.wait_idle()
    kept = "JSON.parse(localStorage['edgedec.conversations'])[0].messages"
    sent = page.module("/static/conversation.js", f"m.sentMessages({kept})")
    assert [each["role"] for each in sent] == ["user", "assistant", "tool", "assistant"] * 4
    assert sent[2]["content"] == "The user declined this call."
    assert sent[6]["tool_call_id"] == sent[5]["tool_calls"][0]["id"]
    assert sent[6]["content"].startswith("echo: ")
    page.find(".message:last-child .regenerate").click()
    page.wait_idle()
    page.wait(lambda: len(page.all(".message")) == 12, "the calls are not made anew")
    assert page.problems() == []


def test_a_tool_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A chat is answered meanwhile, further calls are refused at a limit, and a client that leaves ends its call.

    The tools' program goes on hanging, so no other test uses it.
    """

    def hang(_: int) -> None:
        with httpx.Client(base_url=running.url) as client, pytest.raises(httpx.TransportError):
            client.post("/page/tools", json={"name": "hang"}, timeout=httpx.Timeout(60, read=2))

    with with_tools(tmp_path) as running, ThreadPoolExecutor(8) as pool:
        offer = running.service.tools
        assert offer is not None
        hanging = pool.map(hang, range(8))
        wait_until(lambda: offer.n_running == 8, "the calls don't begin")
        assert call(running.client, "echo").status_code == 429
        reply = running.client.post("/v1/chat/completions", json={"messages": messages("hi"), "temperature": 0})
        assert reply.status_code == 200
        assert len(list(hanging)) == 8
        wait_until(lambda: offer.n_running == 0, "the calls don't end")

"""The web chat: what is sent. What the page does is in test_page_in_browser.py."""

import re
import threading
from pathlib import Path

import pytest
from support.processes.running_server import Running, wait_until
from support.processes.servers import StubServer, catalogue_of, model_bytes

from edgedec_apps.server.app import STATIC
from edgedec_models.fetching.partial import partial_path

SCRIPTS = (
    *("api", "app", "attachments", "conversation", "dom", "drafting", "files"),
    *("highlight", "keys", "markdown", "messages", "models", "pictures", "start", "store", "tools"),
)
FILES = (*(f"{name}.js" for name in SCRIPTS), "style.css", "icon.svg")
TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


def test_the_page_and_its_files_are_sent(server: Running) -> None:
    """The page and all of its files come from the server, with types a browser takes and a strict policy."""
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for file in FILES:
        reply = server.client.get(f"/static/{file}")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(TYPES[file.rpartition(".")[2]])
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert sorted(path.name for path in STATIC.iterdir()) == sorted([*FILES, "index.html"])


def test_models_that_can_be_fetched(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the catalogue that were tried; of one whose download was cut off, how much is there; offline, none.

    A pull whose client leaves while the network stalls ends, and keeps what it has.
    """
    data = model_bytes(100_000)
    for variable in ("EDGEDEC_CACHE", "EDGEDEC_CONFIG"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("EDGEDEC_OFFLINE", raising=False)
    with StubServer() as stub:
        served = catalogue_of(stub, tmp_path, "half", data, note="of tests", tried=True)
        fetched = server.client.get("/page/models").json()["models"]
        assert {"name": "half", "note": "of tests", "n_bytes": 100_000, "n_there": 0} in fetched
        assert {"smollm2-135m", "qwen2.5-coder-1.5b"} < {each["name"] for each in fetched}
        assert "qwen3-4b" not in {each["name"] for each in fetched}, "no file of a hub was tried"
        served.gate = threading.Event()
        with server.client.stream("POST", "/api/pull", json={"model": "half"}) as reply:
            told = reply.iter_lines()
            assert next(told) == next(told) == '{"status": "pulling manifest"}', "a line comes while nothing does"
        wait_until(lambda: not server.service._running, "the pull goes on without its client")
        served.gate.set()
    half = {"name": "half", "note": "of tests", "n_bytes": 100_000, "n_there": 40_000}

    def is_told() -> bool:
        partial_path(tmp_path / "models" / "half.gguf").write_bytes(data[:40_000])
        return half in server.client.get("/page/models").json()["models"]

    wait_until(is_told, "the pull's thread outlives its request for a moment, and keeps what it has")
    monkeypatch.setenv("EDGEDEC_OFFLINE", "1")
    assert server.client.get("/page/models").json() == {"models": []}
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
        assert server.client.get("/page/models", headers=headers).status_code == 403
        assert server.client.post("/api/pull", json={"model": "half"}, headers=headers).status_code == 403


def test_nothing_is_asked_of_other_hosts() -> None:
    """No file names an outside address to load from, has code in attributes, or makes markup of text."""
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(src|href|url\(|import|fetch\()[^\n]*https?://", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert not re.search(r"\son[a-z]+\s*=\s*[\"']|style=|javascript:", text), path

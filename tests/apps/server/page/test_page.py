"""The web chat: what is sent. What the page does is in test_page_in_browser.py."""

import re

from support.processes.running_server import Running

from edgedec_apps.server.app import STATIC

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


def test_nothing_is_asked_of_other_hosts() -> None:
    """No file names an outside address to load from, has code in attributes, or makes markup of text."""
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(src|href|url\(|import|fetch\()[^\n]*https?://", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert not re.search(r"\son[a-z]+\s*=\s*[\"']|style=|javascript:", text), path

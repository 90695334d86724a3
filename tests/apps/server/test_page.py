"""The web chat: what is sent, and that model output can't become markup."""

import re
import shutil
import subprocess

import pytest
from support.running_server import Running

from edgedec_apps.server.app import STATIC

FILES = ("app.js", "api.js", "markdown.js", "messages.js", "store.js", "style.css", "icon.svg")
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


# Enough of a document for the renderer, which prints what it made.
_NODE = """
class Node_ {
  constructor(name) { this.name = name; this.children = []; this.dataset = {}; }
  append(...nodes) { for (const n of nodes) this.children.push(...(n.name === "#fragment" ? n.children : [n])); }
  toString() {
    const inner = this.children.map((c) => (typeof c === "string" ? `'${c}'` : String(c))).join("");
    const link = this.href ? ` ${this.href}` : "";
    return this.name.startsWith("#") ? inner : `<${this.name}${link}>${inner}</>`;
  }
}
globalThis.document = {
  createElement: (name) => new Node_(name),
  createDocumentFragment: () => new Node_("#fragment"),
  createTextNode: (text) => Object.assign(new Node_("#text"), { children: [text] }),
};
const { render } = await import(process.argv[1]);
for (const text of JSON.parse(process.argv[2])) console.log(String(render(text)));
"""

RENDERED = {
    "<script>alert(1)</script> **b** `<i>`": "<p>'<script>alert(1)</script> '<strong>'b'</>' '<code>'<i>'</></>",
    "[x](javascript:alert(1))": "<p>'[x](javascript:alert(1))'</>",
    "[x](https://e.org) ![i](https://e.org/i.png)": "<p><a https://e.org>'x'</>' ![i](https://e.org/i.png)'</>",
    "```html\n<b>": "<pre><code>'<b>'</></>",
    "# T\n- a\n  - b\n- c": "<h3>'T'</><ul><li><p>'a'</><ul><li>'b'</></></><li>'c'</></>",
    "|a|b|\n|-|-|\n|1|2|": "<table><thead><tr><th>'a'</><th>'b'</></></><tbody><tr><td>'1'</><td>'2'</></></></>",
    "a_b_c \\*d\\* 2*3": "<p>'a_b_c *d* 2*3'</>",
}


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's code with")
def test_markdown_becomes_nodes_and_never_markup() -> None:
    """HTML stays text, links lead to the web only, images stay text, and the usual Markdown becomes its elements."""
    import json

    module = (STATIC / "markdown.js").as_uri()
    code = ["node", "--input-type=module", "-e", _NODE, "--", module, json.dumps(list(RENDERED))]
    shown = subprocess.run(code, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.splitlines() == list(RENDERED.values())

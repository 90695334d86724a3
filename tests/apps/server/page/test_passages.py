"""Files of the web chat that are longer than the context: what of them is read, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.running_server import Running, messages, started, wait_until

from edgedec_apps.documents.asking import Asking
from edgedec_apps.documents.files import Document

pytestmark = pytest.mark.slow

TEXT = "".join(f"Line {i} tells of thing {i * 7}.\n" for i in range(100))


@pytest.fixture(scope="module")
def small(chat_path: Path) -> Iterator[Running]:
    """A server of a model with 600 tokens of context, which are bytes."""
    with started(chat_path, load_options={"n_ctx": 600}) as running:
        yield running


def post(running: Running, status: int = 200, **fields: Any) -> dict[str, Any]:
    """Return what the server answers about a file and a question."""
    asked = {"files": [{"name": "a.txt", "text": TEXT}], "question": "thing 441", "messages": messages("Hello")}
    reply = running.client.post("/page/passages", json=asked | fields)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_the_passages_are_those_of_the_command_line(small: Running) -> None:
    """As many as fit behind the earlier messages, with a sentence on them; the prompt with them fits."""
    before = messages("Hello")
    found = post(small)
    asking = Asking(small.engine, before=before, n_answer=300, with_names=True)
    content, read = asking.about([Document("a.txt", TEXT)], "thing 441")
    assert read is not None
    assert found == {"content": content, "note": read.line("a.txt", 600)}
    assert "Line 63 tells of thing 441." in content
    assert len(small.engine.chat_ids([*before, {"role": "user", "content": content}])) <= 300
    paged = [{"name": "b.pdf", "text": TEXT.replace("\n", "\f")}]
    assert "[b.pdf, page" in post(small, files=paged)["content"]
    wait_until(lambda: small.service.memory.n_taken == 0, "the memory is not given back")


def test_what_fits_is_sent_whole(small: Running) -> None:
    """Then nothing is to be replaced; so it is without files."""
    for files in ([{"name": "a.txt", "text": "one"}], []):
        assert post(small, files=files) == {"content": None, "note": None}


def test_what_can_not_be_searched_is_refused(small: Running) -> None:
    """The message says what was tried, and names the server's options."""
    for fields, words in (
        ({"question": "zebra"}, "no passage with a word of the question fits"),
        ({"question": ""}, "Or ask a question about it"),
        ({"files": [], "question": TEXT}, "longer context (--context"),
    ):
        error = post(small, 400, **fields)["error"]
        assert error["code"] == "context_length_exceeded"
        assert words in error["message"]
    malformed: tuple[dict[str, Any], ...] = ({"files": "x"}, {"files": [{"name": 5}]}, {"question": 3})
    for given in (*malformed, {"messages": [{"role": "x"}]}):
        post(small, 400, **given)
    assert small.client.get("/health").status_code == 200

"""Pictures on the web chat in a real browser: picked, pasted, dropped, made small, sent, kept small, and refused."""

import io
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.seeing_model import picture, seeing_model
from support.processes.browser import Browser
from support.processes.running_server import Running, started

pytest.importorskip("llama_cpp", reason="llama-cpp-python encodes the pictures")
image = pytest.importorskip("PIL.Image", reason="Pillow decodes the pictures")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that reads pictures and of one that does not."""
    folders = [tmp_path_factory.mktemp(name) for name in ("seeing", "blind")]
    paths = [seeing_model(folder, folder.name.rstrip("0")) for folder in folders]
    (folders[1] / "mmproj-blind.gguf").unlink()
    with started(*paths, load_options={"n_ctx": 2048}) as running:
        yield running


@pytest.fixture
def page(chromium: Browser, server: Running) -> Iterator[Browser]:
    """The page as on a first visit, with short answers; at the end it must not have complained."""
    chromium.resize(1200, 800)
    chromium.open(server.url)
    chromium.set(max_tokens="3", model="seeing")
    chromium.record_requests()
    yield chromium
    assert chromium.problems() == []


def give(page: Browser, how: str, name: str, data: bytes) -> None:
    """Paste or drop a file, and wait until it is read or refused."""
    page.run(
        """
        const [how, name, data] = arguments;
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        const held = new DataTransfer();
        held.items.add(new File([bytes], name, { type: "image/png" }));
        const node = document.querySelector(how === "paste" ? "#prompt" : "main");
        const given = how === "paste" ? { clipboardData: held } : { dataTransfer: held };
        const kind = how === "paste" ? ClipboardEvent : DragEvent;
        node.dispatchEvent(new kind(how, { ...given, bubbles: true, cancelable: true }));
        """,
        *(how, name, b64encode(data).decode()),
    )
    page.wait(lambda: page.run("return !document.querySelector('#files').hasAttribute('aria-busy')"), "still reading")


def sent_parts(page: Browser, number: int) -> list[dict[str, Any]]:
    """Return the content of the first message of a request."""
    found: list[dict[str, Any]] = page.sent[number]["messages"][0]["content"]
    return found


def sent_size(part: dict[str, Any]) -> tuple[int, int]:
    """Return the size of a picture that was sent."""
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    size: tuple[int, int] = image.open(io.BytesIO(b64decode(data))).size
    return size


def test_pictures_are_sent_small_and_kept_smaller(page: Browser, tmp_path: Path) -> None:
    """One is picked, one pasted, one dropped and taken away again; the history has thumbnails, and sends these then."""
    (tmp_path / "wide.png").write_bytes(picture("red", (2000, 1000)))
    page.find("#file").send_keys(str(tmp_path / "wide.png"))
    page.wait(lambda: len(page.all("#files li")) == 1, "it is not read")
    give(page, "paste", "small.png", picture("blue", (40, 30)))
    give(page, "drop", "third.png", picture("green", (40, 30)))
    assert [node.text for node in page.all("#files li")] == [
        "wide.png (1536 × 768) ×",
        "small.png (40 × 30) ×",
        "third.png (40 × 30) ×",
    ]
    assert len(page.all("#files img")) == 3
    page.all("#files button")[2].click()
    page.ask("What is this?")
    assert page.text(".message.assistant .error") == ""
    first, second, text = sent_parts(page, 0)
    assert (sent_size(first), sent_size(second)) == ((1536, 768), (40, 30))
    assert text == {"type": "text", "text": "What is this?"}
    names = [node.text for node in page.all(".message.user figcaption")]
    assert names == ["wide.png (1536 × 768)", "small.png (40 × 30)"]
    kept = page.run("return JSON.parse(localStorage['edgedec.conversations'])[0].messages[0].files")
    assert [sorted(file) for file in kept] == [["name", "note", "text", "thumbnail"]] * 2
    page.ask("And now?")
    assert sent_size(sent_parts(page, 1)[0]) == (1536, 768)

    page.driver.refresh()
    page.wait(lambda: "tokens of context" in page.text("#state"), "the page says nothing")
    assert "the small copy is sent" in page.text(".message.user figcaption")
    page.record_requests()
    page.ask("Still?")
    assert sent_size(sent_parts(page, 0)[0]) == (192, 96)


def test_what_is_refused(page: Browser) -> None:
    """What is no picture, a ninth picture, and any picture for a model that reads none: each with its reason."""
    give(page, "paste", "broken.png", b"no picture")
    assert page.text("#file-error") == "broken.png is no picture that this browser can read."
    for number in range(9):
        give(page, "drop", f"{number}.png", picture("blue", (8, 8)))
    assert page.text("#file-error") == "8.png is one too many: 8 pictures can be sent."
    assert len(page.all("#files li")) == 8
    page.set(model="blind")
    give(page, "paste", "a.png", picture("blue", (8, 8)))
    page.ask("What is this?")
    assert "mmproj*.gguf" in page.text(".message.assistant .error")

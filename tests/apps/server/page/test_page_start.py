"""The empty page in a real browser: things to try, models that it fetches, and the page on a touch screen."""

import json
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model
from support.models.tiny_models import tiny_llama
from support.processes.browser import Browser
from support.processes.running_server import CHAT, Running, started
from support.processes.servers import Served, StubServer, catalogue_of

pytestmark = pytest.mark.slow

ENTER, TAB = "\ue007", "\ue004"
FETCHABLE = '#models [value="smollm2-135m"]'  # the last of what the page asks for at its beginning
PHONES = [(360, 640), (390, 844)]


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """The browser, with a mouse and a wide window; at the end its page must not have complained."""
    chromium.touch(False)
    chromium.resize(1200, 800)
    chromium.color_scheme("light")
    yield chromium
    assert chromium.problems() == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache and a folder of settings, both empty."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path))
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    monkeypatch.delenv("EDGEDEC_MODELS", raising=False)
    (tmp_path / "models").mkdir()
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[Running]:
    """A server of a model that answers "Yes."."""
    with started(saying_model(home / "models" / "known.gguf", {"": ["Yes", "."]}, chat_template=CHAT)) as running:
        yield running


class Gate(threading.Event):
    """Lets the first request of a file pass, and stops the others until it is set."""

    n_requests = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.n_requests += 1
        return self.n_requests == 1 or super().wait(timeout)


@pytest.fixture
def remote(home: Path) -> Iterator[Served]:
    """A model of the user's catalogue, "small", on a file server that cuts the first request in the middle."""
    data = tiny_llama(home / "made.gguf", n_layer=1, chat_template=CHAT).read_bytes()
    (home / "made.gguf").unlink()
    with StubServer() as stub:
        served = catalogue_of(stub, home, "small", data, note="for tests", tried=True)
        served.drops, served.gate = [len(data) // 2], Gate()
        gate = served.gate
        yield served
        gate.set()


def row(page: Browser, name: str) -> str:
    """Return the text of a model's row, without its button."""
    script = """const row = document.querySelector(`#models [value="${arguments[0]}"]`).closest('li').cloneNode(true);
        row.querySelector('button').remove(); return row.innerText || row.textContent"""
    return str(page.run(script, name))


def action(page: Browser, name: str) -> str:
    """Return what the button of a model's row does."""
    return page.text(f'#models [value="{name}"]')


def press(page: Browser, name: str) -> None:
    page.run('document.querySelector(`#models [value="${arguments[0]}"]`).focus()', name)
    page.press(ENTER)


# What an empty page offers


def test_a_thing_to_try_is_asked_by_a_key(page: Browser, server: Running) -> None:
    """Three things with their texts; Enter asks one as it stands, at temperature 0, and the list makes way."""
    page.open(server.url)
    titles = page.run("return [...document.querySelectorAll('#tries strong')].map((node) => node.textContent)")
    assert len(titles) == 3
    assert page.focused == "prompt"
    page.run("document.querySelector('#new').focus()")
    page.press(TAB)
    page.run("window.real = fetch; window.fetch = (p, o) => (p.includes('chat') && (window.sent = o.body), real(p, o))")
    page.press(ENTER)
    page.wait(lambda: page.all(".message.assistant"), "nothing is asked")
    page.wait_idle()
    sent = json.loads(page.run("return window.sent"))
    (message,) = sent["messages"]
    assert message["content"].startswith("Summarize this text")
    assert sent["temperature"] == 0
    assert page.text(".answer .text") == "Yes."
    assert not page.shown("#start")
    page.ask("And?")
    assert "temperature" not in json.loads(page.run("return window.sent")), "the user's own messages are asked as ever"
    page.press("n", alt=True)
    assert page.shown("#start")
    assert not page.shown("#log")


def test_models_are_listed_and_picked(page: Browser, server: Running, home: Path) -> None:
    """Those that are here first, then those of the catalogue that can be fetched; "Load" loads and picks one."""
    saying_model(home / "models" / "other.gguf", {"": ["No", "."]}, chat_template=CHAT)
    page.open(server.url)
    page.wait(lambda: len(page.all("#models li")) > 3, "no models")
    names = page.run("return [...document.querySelectorAll('#models strong')].map((node) => node.textContent)")
    assert names[:3] == ["known", "other", "smollm2-135m"]
    assert [action(page, name) for name in names[:3]] == ["In use", "Load", "Fetch"]
    assert row(page, "smollm2-135m").startswith("smollm2-135m98 MB · SmolLM2")
    assert page.run("return document.querySelector('[value=\"smollm2-135m\"]').ariaLabel") == "Fetch: smollm2-135m"
    press(page, "other")
    page.wait(lambda: (action(page, "known"), action(page, "other")) == ("Use", "In use"), "not loaded")
    assert page.run("return document.activeElement.value") == "other"
    assert page.find("#model").get_property("value") == "other"
    page.ask("Hello?")
    assert page.text(".answer .text") == "No."
    page.run("const m = document.querySelector('#model'); m.value = ''; m.dispatchEvent(new Event('change'))")
    assert page.shown("#models"), "the last line of the picker leads to the list"
    assert page.find("#model").get_property("value") == "other"
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = [node for node in tree if not node["ignored"] and node["role"]["value"] in ("button", "combobox", "region")]
    assert [node for node in named if not node.get("name", {}).get("value")] == []


# Fetching


def test_a_model_is_fetched_over_a_reload_and_a_cancel(page: Browser, home: Path, remote: Served) -> None:
    """Progress, a network that stalls, a reload that goes on, a cancel that keeps what is there, and the model."""
    with started() as running:
        page.open(running.url)
        page.wait(lambda: page.all(FETCHABLE), "no list")
        assert page.text("#start-title") == "Fetch a model to begin"
        assert not page.shown("#tries")
        press(page, "small")
        page.wait(lambda: page.all("#models progress[value]"), "no progress")
        assert re.match(r"\d+ %", page.text(".how-far"))
        assert (action(page, "small"), action(page, "smollm2-135m")) == ("Cancel", "Fetch")
        assert page.run("return document.querySelector('[value=\"smollm2-135m\"]').disabled"), "one after another"
        assert page.run("return document.activeElement.value") == "small", "the focus stays while it goes on"
        page.run("const now = performance.now.bind(performance); performance.now = () => now() + 60_000")
        page.wait(lambda: "nothing came for 6" in page.text(".how-far"), "a fetch that stalls does not say so")
        page.driver.refresh()
        page.wait(lambda: page.all("#models progress"), "the fetch does not go on after a reload")
        page.find("#prompt").send_keys("Hello")
        page.press(ENTER)
        page.wait(lambda: page.text("#state").startswith("small: "), "it is not seen beside a conversation")
        page.find("#new").click()
        press(page, "small")
        page.wait(lambda: action(page, "small") == "Fetch the rest", "not cancelled")
        assert page.run("return document.activeElement.value") == "small"
        assert page.text("#announce") == "small was not fetched: cancelled"
        page.wait(lambda: not running.service._running, "the server goes on")
        assert not (home / "models" / "small.gguf").exists()
        assert remote.gate is not None
        remote.gate.set()
        press(page, "small")
        page.wait(lambda: action(page, "small") == "Load", "not fetched")
        assert page.text("#announce") == "small is on this machine now."
        assert (home / "models" / "small.gguf").read_bytes() == remote.data
        assert page.shown("#tries")
        page.driver.refresh()
        page.wait(lambda: page.all(FETCHABLE), "no list")
        assert page.all("#models progress") == [], "what has ended is not begun again"
    page.problems()


def test_a_fetch_that_fails_says_why(page: Browser, server: Running, remote: Served) -> None:
    """The server's reason stands in the row, and is read out; the next press tries again."""
    remote.gate, remote.drops, remote.statuses = None, [], [403]
    page.open(server.url)
    page.wait(lambda: page.all(FETCHABLE), "no list")
    press(page, "small")
    page.wait(lambda: page.all("#models .error"), "no reason")
    assert "403" in page.text("#models .error")
    assert page.text("#announce").startswith("small was not fetched: ")
    press(page, "small")
    page.wait(lambda: action(page, "small") == "Load", "not fetched")
    assert page.all("#models .error") == []


def test_a_lost_server_is_waited_for(page: Browser, server: Running, remote: Served) -> None:
    """A fetch goes on when the server is back; of an answer that is cut off what came stays, with the reason."""
    remote.gate, remote.drops = None, []
    page.open(server.url)
    page.wait(lambda: page.all(FETCHABLE), "no list")
    page.run(
        "window.real = fetch; window.lost = true;"
        "window.fetch = (...given) => lost ? Promise.reject(new TypeError('network')) : real(...given)"
    )
    press(page, "small")
    page.wait(lambda: page.all("#models .error"), "no reason")
    assert page.text("#models .error") == page.text("#state") == "The server can't be reached."
    page.run("window.lost = false")
    page.wait(lambda: action(page, "small") == "Load", "the fetch does not go on")
    assert page.all("#models .error") == []
    part: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": "Half"}}]}
    cut = "const text = arguments[0]; window.fetch = (p, o) => p.includes('chat') ? new Response(text) : real(p, o)"
    page.run(cut, f"data: {json.dumps(part)}\n\n")
    page.ask("Hello?")
    assert page.text(".answer .text") == "Half"
    assert page.text(".answer .error") == "The connection ended early."


# A phone


@pytest.mark.parametrize(("width", "height"), PHONES)
def test_a_phone_has_one_row_of_header_and_no_keys(page: Browser, server: Running, width: int, height: int) -> None:
    """Nothing of the header wraps or is cut off; what says keys is hidden, and Enter begins a line."""
    page.open(server.url)
    page.wait(lambda: page.all(FETCHABLE), "no list")
    page.resize(1200, 800)
    assert page.shown(".keyboard")
    page.touch(True)
    page.resize(width, height)
    page.driver.refresh()
    page.wait(lambda: page.all(FETCHABLE), "no list")
    assert not page.shown(".keyboard")
    assert page.focused != "prompt", "a keyboard on the screen would cover the page"
    assert "Enter" not in page.run("return document.body.innerText + document.querySelector('#prompt').placeholder")
    page.find("#prompt").send_keys("One", ENTER, "two")
    assert page.find("#prompt").get_property("value") == "One\ntwo"
    page.find("#send").click()
    page.wait(lambda: page.all(".message.assistant"), "not sent")
    page.wait_idle()
    boxes = [page.box(css) for css in ("#toggle-side", "#model", "#export", "#new")]
    assert page.box("header")["height"] < 60
    assert len({round(box["top"] + box["bottom"]) for box in boxes}) == 1
    assert all(left["right"] < right["left"] for left, right in pairwise(boxes))
    assert boxes[-1]["right"] <= width
    assert page.run("return document.documentElement.scrollWidth") <= width

"""A real browser for tests of the web chat: Chromium without a window, driven by selenium.

Tests are skipped, with what is missing, where there is no browser (Debian: apt-get install chromium chromium-driver).
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 120.0
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Browser:
    """A page in a browser. `driver` is selenium's."""

    def __init__(self, driver: Any, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, url: str) -> None:
        """Open a page as on a first visit, and wait until it has the server's models."""
        self.driver.get(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get(url)
        self.wait(lambda: self.text("#state") not in ("",), "the page says nothing")

    def set(self, **settings: str) -> None:
        """Keep settings of the page, as its dialog does, and open it again."""
        self.run("localStorage['edgedec.settings'] = arguments[0]", json.dumps(settings))
        self.driver.refresh()
        self.wait(lambda: self.text("#state") not in ("",), "the page says nothing")

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript, with `arguments`, and return what it returns."""
        return self.driver.execute_script(script, *args)

    def module(self, path: str, script: str, *args: Any) -> Any:
        """Return the value of an expression over a module of the page `m` and the `args`."""
        code = f"""
            const done = arguments[arguments.length - 1], args = arguments;
            import({json.dumps(path)}).then((m) => {script}).then(done, (error) => done("failed: " + error));
        """
        return self.driver.execute_async_script(code, *args)

    def find(self, css: str) -> Any:
        """Return the first node of a selector, which is there."""
        return self.driver.find_element("css selector", css)

    def all(self, css: str) -> list[Any]:
        """Return all nodes of a selector."""
        found: list[Any] = self.driver.find_elements("css selector", css)
        return found

    def text(self, css: str) -> str:
        """Return the text of the first node of a selector, seen or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def shown(self, css: str) -> bool:
        """Return whether a node of a selector is seen."""
        script = "return [...document.querySelectorAll(arguments[0])].some((node) => node.checkVisibility())"
        return bool(self.run(script, css))

    def box(self, css: str) -> dict[str, float]:
        """Return left, top, right, bottom, width and height of the first node of a selector."""
        found: dict[str, float] = self.run(
            "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", css
        )
        return found

    def press(self, *keys: str, alt: bool = False) -> None:
        """Press keys where the focus is, with Alt or without; "\\n" is Enter."""
        from selenium.webdriver import ActionChains, Keys

        chain = ActionChains(self.driver)
        if alt:
            chain.key_down(Keys.ALT)
        chain.send_keys(*(key.replace("\n", Keys.ENTER) for key in keys))
        if alt:
            chain.key_up(Keys.ALT)
        chain.perform()

    @property
    def focused(self) -> str:
        """The id, or else the class or the name, of the node that has the focus."""
        return str(
            self.run("const n = document.activeElement; return n.id || n.className || n.textContent || n.localName")
        )

    def ask(self, text: str) -> None:
        """Type a message, send it, and wait for the end of the answer."""
        before = len(self.all(".message.assistant"))
        self.find("#prompt").send_keys(text)
        self.press("\n")
        self.wait(lambda: len(self.all(".message.assistant")) > before, "no answer begins")
        self.wait_idle()

    def record_requests(self) -> None:
        """Keep the bodies of the page's requests for chats from here on."""
        self.run(
            "const real = window.fetch; window.sent = [];"
            "window.fetch = (path, given) => { if (path.includes('chat')) sent.push(JSON.parse(given.body));"
            " return real(path, given); }"
        )

    @property
    def sent(self) -> list[dict[str, Any]]:
        """These bodies."""
        bodies: list[dict[str, Any]] = self.run("return window.sent")
        return bodies

    def wait_idle(self) -> None:
        """Wait until no answer comes."""
        self.wait(lambda: self.shown("#send"), "the answer does not end")

    def wait(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until something holds."""
        until = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < until, f"{what}; the page says {self.text('#state')!r}, {self.problems()}"
            time.sleep(0.02)

    def problems(self) -> list[str]:
        """Return what the browser complained of since the last call, apart from refused requests."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["source"] != "network"]

    def resize(self, width: int, height: int) -> None:
        """Give the page this many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def touch(self, is_touched: bool) -> None:
        """Let the screen be the one pointer, or the mouse."""
        given = {"enabled": is_touched, "maxTouchPoints": 5 if is_touched else 1}
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", given)

    def color_scheme(self, name: str) -> None:
        """Let the system prefer "light" or "dark"."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},  # a click would miss what still scrolls
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self) -> bytes:
        """Return a picture of the page as a PNG."""
        data: bytes = self.driver.get_screenshot_as_png()
        return data


@contextmanager
def browser(downloads: Path) -> Iterator[Browser]:
    """Start a browser that saves its downloads in a folder, and end it after the block; skip where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium to drive a browser with")
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium with its chromedriver to look at the page with")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(opened, downloads)
    finally:
        opened.quit()

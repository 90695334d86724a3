"""Make docs/page.png, the README's picture: the web chat of `edgedec serve smollm2-135m`, with an answer of the model.

    python -m benchmarks.page_picture [MODEL]

A browser asks one of the page's own examples. It needs Chromium with its chromedriver, selenium and Pillow.
"""

import io
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

PICTURE = Path(__file__).parents[1] / "docs" / "page.png"
WIDTH, HEIGHT = 1000, 920
MOST_BYTES = 120_000
PATIENCE_S = 120.0
EXAMPLE = 1  # of the three, from 0: code, which the page colours


def main() -> None:
    """Start a server on a free port, ask the example, and write the picture."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    command = [sys.executable, "-m", "edgedec_apps.cli", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = re.search(r"http://[\d.]+:\d+", server.stderr.readline())
            assert address is not None, "the server says no address"
            PICTURE.write_bytes(small(picture(address[0])))
        finally:
            server.terminate()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def picture(address: str) -> bytes:
    """Return a picture of the page after an answer, as a PNG."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(address)
        wait_for(driver, "document.querySelector('#state').textContent.endsWith('of context')")
        driver.execute_script(f"document.querySelectorAll('#tries button')[{EXAMPLE}].click()")
        wait_for(
            driver,
            "document.querySelector('.regenerate')?.checkVisibility() && !document.querySelector('#send').hidden",
        )
        driver.execute_script("document.activeElement.blur()")
        return bytes(driver.get_screenshot_as_png())
    finally:
        driver.quit()


def wait_for(driver: Any, condition: str) -> None:
    """Wait until a condition in JavaScript holds."""
    until = time.monotonic() + PATIENCE_S
    while not driver.execute_script(f"return {condition}"):
        assert time.monotonic() < until, f"this does not come to hold: {condition}"
        time.sleep(0.05)


def small(png: bytes) -> bytes:
    """Return a picture with 256 colours at most, which is a third of its size."""
    data = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(data, "PNG", optimize=True)
    assert data.tell() < MOST_BYTES, f"{data.tell():,} bytes are too many for a README"
    return data.getvalue()


if __name__ == "__main__":
    main()

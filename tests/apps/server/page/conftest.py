"""Fixtures: a browser."""

from collections.abc import Iterator

import pytest
from support.processes.browser import Browser, browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of a file."""
    with browser(tmp_path_factory.mktemp("downloads")) as opened:
        yield opened

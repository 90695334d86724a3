"""Progress in a notebook: load() shows a bar below the cell, where the caller takes no reports."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgedec.progress import OnProgress, Progress


class _Bar:
    """Shows reports as a bar in one place below a cell; `display` is IPython's function of that name."""

    def __init__(self, display: Any) -> None:
        self._display, self._handle, self._shown = display, None, ""

    def __call__(self, progress: Progress) -> None:
        share = progress.done / progress.total if progress.total and progress.unit else None
        self.show(" ".join(filter(None, (progress.phase, progress.detail))), share)

    def show(self, text: str, share: float | None = None) -> None:
        """Show a text, and how much is done from 0 to 1, in place of what was shown."""
        from html import escape  # takes milliseconds of a start elsewhere

        plain = text if share is None else f"{text}: {share:.0%}"
        if plain == self._shown:
            return
        self._shown = plain
        bar = "" if share is None else f'<progress max="1" value="{share:.2f}"></progress> '
        bundle = {"text/plain": plain, "text/html": f"{bar}{escape(plain)}"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


@contextmanager
def shown_progress(on_progress: OnProgress | None, what: str) -> Iterator[OnProgress | None]:
    """Yield what takes the reports of loading `what`: `on_progress`, or a bar where that is None in a notebook."""
    shell = sys.modules["IPython"].get_ipython() if on_progress is None and "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:  # of a notebook; a terminal has none
        yield on_progress
        return
    bar = _Bar(sys.modules["IPython"].display.display)
    yield bar
    bar.show(f"loaded {what}")

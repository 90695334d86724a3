"""Progress in a notebook: load() shows a bar below the cell, where the caller takes no reports."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from edgedec.progress import OnProgress, Progress


@contextmanager
def shown_progress(on_progress: OnProgress | None, what: str) -> Iterator[OnProgress | None]:
    """Yield the function that load() reports to: `on_progress`, or in a notebook a bar where that is None."""
    shell = sys.modules["IPython"].get_ipython() if on_progress is None and "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:  # of a notebook; a terminal has none
        yield on_progress
        return
    from html import escape  # takes milliseconds of a start elsewhere

    place, shown = sys.modules["IPython"].display.display({"text/plain": ""}, raw=True, display_id=True), ""

    def show(text: str, bar: str = "") -> None:
        nonlocal shown
        if text != shown:
            place.update({"text/plain": text, "text/html": f"{bar}{escape(text)}"}, raw=True)
        shown = text

    def report(progress: Progress) -> None:
        text = " ".join(filter(None, (progress.phase, progress.detail)))
        if progress.total and progress.unit:
            share = progress.done / progress.total
            show(f"{text}: {share:.0%}", f'<progress max="1" value="{share:.2f}"></progress> ')
        else:
            show(text)

    yield report
    show(f"loaded {what}")

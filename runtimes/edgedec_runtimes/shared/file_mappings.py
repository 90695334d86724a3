"""Where a library has mapped a file, as Linux tells it (/proc/self/smaps)."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Mapping = tuple[int, int]
"""Address and length."""

T = TypeVar("T")

_opening = threading.Lock()


def with_mappings(paths: Sequence[Path], load: Callable[[], T]) -> tuple[T, list[Mapping]]:
    """Load something, and return it with its mappings of these files.

    They are its own as long as it lives: those of another load of the same files are not among them, as loads happen
    one after another. A mapping with a page that was written to is left out. Where this is not Linux there are none.
    """
    with _opening:
        before = {mapping for mapping, _ in _mappings(paths)}
        loaded = load()
        return loaded, [mapping for mapping, clean in _mappings(paths) if clean and mapping not in before]


def _mappings(paths: Sequence[Path]) -> list[tuple[Mapping, bool]]:
    try:
        names = {os.fspath(path.resolve()) for path in paths}
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux, or not to be looked at
        return []
    return [found for name in names for found in parsed_mappings(name, lines)]


def parsed_mappings(name: str, lines: list[str]) -> Iterator[tuple[Mapping, bool]]:
    """Yield the mappings of a file in the lines of /proc/PID/smaps, and whether none of their pages was written to.

    >>> head = "1000-3000 rw-p 00000000 08:01 7   /w/model.onnx.data"
    >>> list(parsed_mappings("/w/model.onnx.data", [head, "Rss:  8 kB", "Anonymous:   0 kB"]))
    [((4096, 8192), True)]
    """
    current: Mapping | None = None
    for line in lines:
        key, _, rest = line.partition(" ")
        if "-" in key:
            start, stop = (int(end, 16) for end in key.split("-"))
            current = (start, stop - start) if line.endswith(f" {name}") else None
        elif key == "Anonymous:" and current is not None:
            yield current, rest.split()[0] == "0"

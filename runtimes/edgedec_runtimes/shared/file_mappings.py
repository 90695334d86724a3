"""Finds where a library has mapped a file, by Linux's /proc/self/smaps."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Mapping = tuple[int, int]
"""Address and length in bytes."""

T = TypeVar("T")

_opening = threading.Lock()


def with_mappings(paths: Sequence[Path], load: Callable[[], T]) -> tuple[T, list[Mapping]]:
    """Call `load`, and return its result and the mappings of these files that it made.

    Mappings that another load made of the same files are not among them: loads run one after another. Mappings with a
    page that was written to are left out. On other systems than Linux the list is empty.
    """
    with _opening:
        before = {mapping for mapping, _ in _mappings(paths)}
        loaded = load()
        return loaded, [mapping for mapping, clean in _mappings(paths) if clean and mapping not in before]


def _mappings(paths: Sequence[Path]) -> list[tuple[Mapping, bool]]:
    try:
        names = {os.fspath(path.resolve()) for path in paths}
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux, or no permission
        return []
    return [found for name in names for found in parsed_mappings(name, lines)]


def parsed_mappings(name: str, lines: list[str]) -> Iterator[tuple[Mapping, bool]]:
    """Yield each mapping of a file in the lines of /proc/PID/smaps, and whether none of its pages was written to.

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

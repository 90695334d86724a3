"""edgedec cache: the tile files that the cpu runtime keeps between starts."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError
from edgedec.memory import format_bytes
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import one_line, say, write_json, write_line
from edgedec_models.folders import cache_folder
from edgedec_runtimes.cpu.tile_file import map_tiles
from edgedec_runtimes.cpu.tile_listing import TileEntry, delete_tile_file, list_tiles, prune_tiles

_STATES = {
    "changed": "the model has changed since",
    "missing": "the model is gone",
    "damaged": "damaged; made anew when it is needed",
    "unfinished": "unfinished",
}


def print_tiles(*, as_json: bool) -> None:
    """Print the tile files, the last used first."""
    entries = list_tiles(_root())
    if as_json:
        write_json({"tiles": [_document(entry) for entry in entries]})
        return
    if not entries:
        write_line("no tile files")
    for entry in entries:
        write_line(f"{format_bytes(entry.n_bytes):>9}  {_day(entry)}  {_what(entry)}")


def delete_tiles(*, everything: bool) -> None:
    """Delete the tile files that are stale, or all, and say what that freed."""
    for entry in (removed := prune_tiles(_root(), everything=everything)):
        say(f"{format_bytes(entry.n_bytes):>9}  {_what(entry)}")
    say(f"{format_bytes(sum(entry.n_bytes for entry in removed))} freed")


def verify_tiles(*, quiet: bool) -> None:
    """Check the CRCs of all tile files and delete those that are damaged."""

    def work(cancel: CancelToken) -> int:
        with ProgressLine(quiet=quiet) as on_progress:
            return sum(_is_sound(entry, cancel, on_progress) for entry in entries)

    entries = [entry for entry in list_tiles(_root()) if entry.state != "unfinished"]
    n_sound = interruptible(work)
    say(f"{n_sound} of {len(entries)} tile files are sound")


def _is_sound(entry: TileEntry, cancel: CancelToken, on_progress: OnProgress) -> bool:
    """Check a tile file; say what is wrong with it, and delete it, where it is not."""

    def named(progress: Progress) -> None:
        on_progress(replace(progress, detail=f"tiles of {_what(entry)}"))

    try:
        with map_tiles(entry.path) as tiles:
            tiles.verify(on_progress=named, cancel=cancel)
    except ModelFormatError as error:
        say(str(error))
        say(f"{format_bytes(delete_tile_file(entry.path))} freed")
        return False
    return True


def _root() -> Path:
    return cache_folder()


def _what(entry: TileEntry) -> str:
    names = ", ".join(one_line(path.name) for path in entry.models) or entry.path.name
    return names if entry.state == "current" else f"{names} ({_STATES[entry.state]})"


def _day(entry: TileEntry) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(entry.last_used_s))


def _document(entry: TileEntry) -> dict[str, Any]:
    return {
        "path": os.fspath(entry.path),
        "models": [os.fspath(path) for path in entry.models],
        "layout": entry.layout,
        "size_bytes": entry.n_bytes,
        "last_used_s": entry.last_used_s,
        "state": entry.state,
    }

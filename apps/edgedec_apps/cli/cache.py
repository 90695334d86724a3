"""edgedec cache: the tile files that the cpu runtime keeps between starts, and environments of optimum."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgedec.errors import ModelFormatError, StorageError
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import one_line, say, write_json, write_line
from edgedec_export.optimum.environment import Environment, list_environments, remove_environment
from edgedec_models.cache import list_models
from edgedec_models.folders import cache_folder
from edgedec_runtimes.cpu.tiles.file import map_tiles
from edgedec_runtimes.cpu.tiles.listing import TileEntry, delete_tile_file, list_tiles, prune_tiles

_STATES = {
    "changed": "the model has changed since",
    "missing": "the model is gone",
    "damaged": "damaged; made anew when it is needed",
    "unfinished": "unfinished",
}


def print_tiles(*, as_json: bool) -> None:
    """Print the tile files, the last used first, and the environments that exports by way of optimum run in."""
    entries, environments, names = list_tiles(_root()), list_environments(_root()), _names()
    if as_json:
        found = [{"path": os.fspath(e.path), "size_bytes": e.n_bytes, "current": e.is_current} for e in environments]
        write_json({"tiles": [_document(entry) for entry in entries], "environments": found})
        return
    if not entries and not environments:
        write_line("no tile files")
    for entry in entries:
        write_line(f"{format_bytes(entry.n_bytes):>9}  {_day(entry)}  {_what(entry, names)}")
    for environment in environments:
        write_line(f"{format_bytes(environment.n_bytes):>9}  {_named(environment)}")


def delete_tiles(*, everything: bool) -> None:
    """Delete the tile files and environments that are stale, or all, and say what that freed."""
    names = _names()
    removed = [(entry.n_bytes, _what(entry, names)) for entry in prune_tiles(_root(), everything=everything)]
    for environment in list_environments(_root()):
        if (everything or not environment.is_current) and remove_environment(environment):
            removed.append((environment.n_bytes, _named(environment)))
    for n_bytes, name in removed:
        say(f"{format_bytes(n_bytes):>9}  {name}")
    say(f"{format_bytes(sum(n_bytes for n_bytes, _ in removed))} freed")


def verify_tiles(*, quiet: bool) -> None:
    """Check the CRCs of all tile files and delete those that are damaged."""

    def work(cancel: CancelToken) -> int:
        with ProgressLine(quiet=quiet) as on_progress:
            return sum(_is_sound(entry, _what(entry, names), cancel, on_progress) for entry in entries)

    entries, names = [entry for entry in list_tiles(_root()) if entry.state != "unfinished"], _names()
    n_sound = interruptible(work)
    say(f"{n_sound} of {len(entries)} tile files are sound")


def tile_sizes() -> dict[Path, int]:
    """Return what the tiles of each model take, by the model's file; those of a model with copies by each copy's."""
    sizes: dict[Path, int] = {}
    for entry in list_tiles(_root()):
        for path in entry.models:
            sizes[path] = sizes.get(path, 0) + entry.n_bytes
    return sizes


def _is_sound(entry: TileEntry, label: str, cancel: CancelToken, on_progress: OnProgress) -> bool:
    """Check a tile file; say what is wrong with it, and delete it, where it is not."""

    def named(progress: Progress) -> None:
        on_progress(replace(progress, detail=f"tiles of {label}"))

    try:
        with map_tiles(entry.path, label) as tiles:
            tiles.verify(on_progress=named, cancel=cancel)
    except ModelFormatError as error:
        say(str(error))
        say(f"{format_bytes(delete_tile_file(entry.path))} freed")
        return False
    except FileNotFoundError:  # deleted meanwhile
        return True
    except OSError as error:
        raise StorageError(f"the tiles of {label} can't be read: {error.strerror or error}; check the disk") from error
    return True


def _root() -> Path:
    return cache_folder()


def _names() -> dict[Path, str]:
    """Return the names of the models on this machine, by their files."""
    return {model.path: model.name for model in list_models()}


def _what(entry: TileEntry, names: Mapping[Path, str]) -> str:
    """Return the names of a tile file's models as edgedec list shows them; of files elsewhere the file's name."""
    found = ", ".join(dict.fromkeys(one_line(names.get(path, path.name)) for path in entry.models))
    if not found:
        found = "a model that is being rearranged" if entry.state == "unfinished" else "an unknown model"
    return found if entry.state == "current" else f"{found} ({_STATES[entry.state]})"


def _named(environment: Environment) -> str:
    state = "" if environment.is_current else " (of another release, or unfinished)"
    return f"optimum, for edgedec export --via optimum{state}"


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

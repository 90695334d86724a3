"""edgedec pull, list and rm: the models on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken
from edgedec.resolver import ResolveOptions
from edgedec_apps.cli.cache import tile_sizes
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.progress import ProgressLine
from edgedec_apps.cli.terminal import one_line, say, write_json, write_line
from edgedec_models.cache import CachedModel, list_models, remove_model
from edgedec_models.catalogue import load_catalogue
from edgedec_models.folders import cache_folder
from edgedec_models.resolve import pull
from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_tiles_of

Row = tuple[str, int, str]


def pull_model(model: str, *, force: bool, offline: bool, quiet: bool, as_json: bool) -> None:
    """Fetch a model with progress, and say where it is."""

    def work(cancel: CancelToken) -> str:
        with ProgressLine(quiet=quiet) as on_progress:
            options = ResolveOptions(offline=offline, on_progress=on_progress, cancel=cancel)
            return os.fspath(pull(model, options, force=force))

    path = interruptible(work)
    if as_json:
        write_json({"model": model, "path": path})
    elif not quiet:
        say(f"{model}: {path}")


def print_models(*, as_json: bool) -> None:
    """Print the models on this machine, and those that the catalogue can fetch."""
    models, tiles = list_models(), tile_sizes()
    here = {model.name for model in models}
    entries = [entry for entry in load_catalogue().values() if entry.name not in here]
    if as_json:
        to_pull = [{"name": entry.name, "size_bytes": entry.size_bytes, "note": entry.note} for entry in entries]
        write_json({"models": [_document(model, tiles) for model in models], "to_pull": to_pull})
        return
    there: list[Row] = [(model.name, model.size_bytes, _where(model, tiles)) for model in models]
    to_pull_rows: list[Row] = [(entry.name, entry.size_bytes, entry.note) for entry in entries]
    width = max((len(one_line(name)) for name, _, _ in there + to_pull_rows), default=0)
    if not there:
        write_line("no models on this machine yet")
    for row in there:
        _print_row(row, width)
    if others := sum(n_bytes for path, n_bytes in tiles.items() if path not in {model.path for model in models}):
        write_line(f"\ntiles of other models: {format_bytes(others)} (edgedec cache list shows them)")
    if to_pull_rows:
        write_line("\nto pull:")
        for row in to_pull_rows:
            _print_row(row, width)


def _print_row(row: Row, width: int) -> None:
    name, size, note = row
    write_line(f"{one_line(name):{width}}  {format_bytes(size):>9}  {one_line(note)}")


def _where(model: CachedModel, tiles: Mapping[Path, int]) -> str:
    if not model.complete:
        return "incomplete; pull goes on with it"
    where = "in the cache" if model.origin == "cache" else "in EDGEDEC_MODELS"
    n_bytes = tiles.get(model.path, 0)
    return f"{where}, and {format_bytes(n_bytes)} of tiles, which make starts fast" if n_bytes else where


def _document(model: CachedModel, tiles: Mapping[Path, int]) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": os.fspath(model.path),
        "size_bytes": model.size_bytes,
        "tiles_bytes": tiles.get(model.path, 0),
        "origin": model.origin,
        "complete": model.complete,
    }


def delete_model(model: str) -> None:
    """Delete a model and its tiles from the cache and say what that freed."""
    before = {stored.path for stored in list_models() if stored.origin == "cache"}
    n_freed = remove_model(model)
    gone = before - {stored.path for stored in list_models()}
    n_tiles = sum(remove_tiles_of(cache_folder(), path) for path in gone) + remove_missing(cache_folder())
    tiles = f", {format_bytes(n_tiles)} of them tiles" if n_tiles else ""
    say(f"{model}: {format_bytes(n_freed + n_tiles)} freed{tiles}")

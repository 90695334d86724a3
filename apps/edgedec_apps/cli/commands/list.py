"""edgedec list: the models on this machine, and those of the catalogue."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.options import AsJson
from edgedec_apps.cli.terminal import one_line, write_json, write_line
from edgedec_models.cache import CachedModel, list_models
from edgedec_models.catalogue import load_catalogue
from edgedec_models.folders import cache_folder

Row = tuple[str, int, str]


def command(*, as_json: AsJson = False) -> None:
    """List the models on this machine, and those that the catalogue can download."""
    from edgedec_models.presets import list_presets
    from edgedec_runtimes.cpu.tiles.listing import list_tiles

    models, tiles = list_models(), dict[Path, int]()
    for entry in list_tiles(cache_folder()):
        for path in entry.models:  # a model that lies in several places counts in each
            tiles[path] = tiles.get(path, 0) + entry.n_bytes
    here = {model.name for model in models}
    entries = [entry for entry in load_catalogue().values() if entry.name not in here]
    if as_json:
        to_pull = [{"name": entry.name, "size_bytes": entry.size_bytes, "note": entry.note} for entry in entries]
        document = {"models": [_document(model, tiles) for model in models], "to_pull": to_pull}
        write_json(document | {"presets": [{"name": preset.name, "model": preset.model} for preset in list_presets()]})
        return
    there: list[Row] = [(model.name, model.size_bytes, _place(model, tiles)) for model in models]
    to_pull_rows: list[Row] = [(entry.name, entry.size_bytes, entry.note) for entry in entries]
    width = max((len(one_line(name)) for name, _, _ in there + to_pull_rows), default=0)
    if not there:
        write_line("no models on this machine yet")
    for row in there:
        _write_row(row, width)
    for preset in list_presets():
        write_line(f"{one_line(preset.name):{width}}  a preset of {one_line(preset.model)}")
    if others := sum(n_bytes for path, n_bytes in tiles.items() if path not in {model.path for model in models}):
        write_line(f"\ntiles of other models: {format_bytes(others)} (edgedec cache list shows them)")
    if to_pull_rows:
        write_line("\nto pull:")
        for row in to_pull_rows:
            _write_row(row, width)


def _write_row(row: Row, width: int) -> None:
    name, size, note = row
    write_line(f"{one_line(name):{width}}  {format_bytes(size):>9}  {one_line(note)}")


def _place(model: CachedModel, tiles: Mapping[Path, int]) -> str:
    """Return where a model lies, and what its tiles take."""
    if not model.complete:
        return "incomplete; edgedec pull continues the download"
    place = "in the cache" if model.origin == "cache" else "in EDGEDEC_MODELS"
    n_bytes = tiles.get(model.path, 0)
    return f"{place}, and {format_bytes(n_bytes)} of tiles, which make starts fast" if n_bytes else place


def _document(model: CachedModel, tiles: Mapping[Path, int]) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": os.fspath(model.path),
        "size_bytes": model.size_bytes,
        "tiles_bytes": tiles.get(model.path, 0),
        "origin": model.origin,
        "complete": model.complete,
    }

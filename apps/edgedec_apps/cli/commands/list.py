"""edgedec list: the models on this machine, and those of the catalogue."""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edgedec.errors import EdgedecError
from edgedec.gguf.places import standing
from edgedec.memory_plan import format_bytes, parse_size
from edgedec_apps.cli.options import AsJson, output_option
from edgedec_apps.cli.reports.published_heads import head_document
from edgedec_apps.cli.shown.terminal import one_line, write_json, write_line
from edgedec_models.cache import CachedModel, list_models
from edgedec_models.catalogue import Entry, load_catalogue
from edgedec_models.folders import cache_folder
from edgedec_runtimes.tile_files.record import is_tiled

if TYPE_CHECKING:
    from edgedec_apps.cli.reports.expectations import Expectation
    from edgedec_models.presets import Preset

_HEADINGS = ("NAME", "PARAMETERS", "MEMORY", "SPEED", "LICENCE", "WHAT IT IS")


def command(
    *,
    fits: Annotated[
        str | None,
        output_option("--fits", help="Only models that this much memory holds, such as 8GB.", metavar="SIZE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine, and those that the catalogue can download.

    With --fits, a model on this machine counts with the memory that edgedec plan tells for its default context. Of a
    model that is not here only the least is known, its weights. The speed is the highest that the measured bandwidth
    of memory allows without drafts. edgedec search finds more models.
    """
    from edgedec_models.presets import list_presets

    limit = None if fits is None else parse_size(fits)
    stored = list_models()
    here = {} if limit is None else _planned(stored)
    models = [model for model in stored if limit is None or (here[model.path] or 0) <= limit]
    tiles = _tiles()
    entries = _to_pull({model.name for model in stored}, limit)
    if as_json:
        document = {
            "models": [_document(model, tiles, here) for model in models],
            "to_pull": [_entry_document(entry, expected) for entry, expected in entries],
            "presets": [{"name": preset.name, "model": preset.model} for preset in list_presets()],
        }
        write_json(document)
        return
    _write_here(models, tiles, list_presets())
    if models:
        in_all = sum(_on_disk(model, tiles) for model in models)
        write_line(f"\non the disk in all: {format_bytes(in_all)}")
    if limit is None and (n_bytes := sum(n for path, n in tiles.items() if path not in {m.path for m in models})):
        write_line(f"\ntiles of other models: {format_bytes(n_bytes)} (edgedec cache list shows them)")
    if limit is None and (n_bytes := _graph_bytes()):
        write_line(f"\ngraphs for GPUs: {format_bytes(n_bytes)} (edgedec cache list shows them)")
    if entries:
        write_line("\nto pull (memory: at least the weights; speed: what reading them allows here):")
        write_table([_HEADINGS, *(_entry_row(entry, expected) for entry, expected in entries)])


def write_table(rows: list[tuple[str, ...]]) -> None:
    """Write rows as columns; at a terminal the last column is cut where the line would be too long."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(row[:-1], widths, strict=True)]
        line = "  ".join([*cells, row[-1]]).rstrip()
        cut = columns is not None and len(line) > columns and sum(widths) + 2 * len(widths) < columns - 1
        write_line(line[: columns - 1] + "…" if cut and columns is not None else line)


def _write_here(models: list[CachedModel], tiles: Mapping[Path, int], presets: "list[Preset]") -> None:
    """Write the models on this machine, and the presets."""
    if not models:
        write_line("no models on this machine yet")
    names = [*(model.name for model in models), *(preset.name for preset in presets)]
    width = max((len(one_line(name)) for name in names), default=0)
    for model in models:
        place = _place(model, tiles)
        whole = f"{place}, as {one_line(model.address)}" if model.address else place
        write_line(f"{one_line(model.name):{width}}  {format_bytes(_on_disk(model, tiles)):>9}  {whole}")
    for preset in presets:
        write_line(f"{one_line(preset.name):{width}}  a preset of {one_line(preset.model)}")


def _tiles() -> dict[Path, int]:
    """Return the bytes of tiles of each model; a model that lies in several places counts in each."""
    from edgedec_runtimes.cpu.tiles.listing import list_tiles

    tiles = dict[Path, int]()
    for entry in list_tiles(cache_folder()):
        for path in entry.models:
            tiles[path] = tiles.get(path, 0) + entry.n_bytes
    return tiles


def _graph_bytes() -> int:
    if not (cache_folder() / "graphs").is_dir():
        return 0
    from edgedec_export.cached import list_graphs  # here, as it imports numpy

    return sum(graph.n_bytes for graph in list_graphs(cache_folder()))


def _to_pull(here: set[str], limit: int | None) -> "list[tuple[Entry, Expectation]]":
    """Return the models of the catalogue that are not here, within a limit of memory, with what to expect of them."""
    from edgedec_apps.cli.reports.bandwidth import memory_bandwidth
    from edgedec_apps.cli.reports.expectations import of_entry

    bandwidth = memory_bandwidth()
    entries = [entry for entry in load_catalogue().values() if entry.name not in here]
    expected = [(entry, of_entry(entry, bandwidth)) for entry in entries]
    return [(entry, each) for entry, each in expected if limit is None or (each.least_bytes or 0) <= limit]


def _planned(models: list[CachedModel]) -> dict[Path, int | None]:
    """Return the memory of each model with a full default context; None where nobody can plan it."""
    from edgedec.memory.setting import Cap
    from edgedec_apps.base_memory import base_bytes
    from edgedec_apps.cli.reports.model_report import model_document

    planned, cap = dict[Path, int | None](), Cap(None, base_bytes(), whole_process=True)
    for model in models:
        planned[model.path] = None
        with suppress(EdgedecError):  # it is incomplete, or no runtime runs it
            document = model_document(model.path, cap)
            planned[model.path] = document["memory_bytes"].get(str(document["n_ctx_default"]))
    return planned


def _entry_row(entry: Entry, expected: "Expectation") -> tuple[str, ...]:
    needs = "" if expected.runtime == "cpu" else f" (needs the {expected.runtime} runtime)"
    n_params = "-" if entry.n_params is None else billions(entry.n_params)
    note = f"{entry.note}{needs}{'; has a draft head' * (entry.head is not None)}"
    cells = (entry.name, n_params, expected.memory(), expected.speed(), entry.licence, note)
    return tuple(map(one_line, cells))


def billions(n_params: int) -> str:
    """Return a number of parameters for a column.

    >>> billions(354_000_000), billions(1_170_000_000), billions(30_500_000_000)
    ('354 M', '1.17 B', '30.5 B')
    """
    return f"{n_params / 1e6:.0f} M" if n_params < 10**9 else f"{n_params / 1e9:.3g} B"


def _place(model: CachedModel, tiles: Mapping[Path, int]) -> str:
    """Return where a model lies, and what its tiles take."""
    if not model.complete:
        return "incomplete; edgedec pull continues the download"
    place = "in the cache" if model.origin == "cache" else "in EDGEDEC_MODELS"
    if is_tiled(model.path):
        return f"{place}, as tiles alone"
    n_bytes = tiles.get(model.path, 0)
    if n_bytes:
        return f"{place}: {format_bytes(model.size_bytes)} and {format_bytes(n_bytes)} of tiles, which make starts fast"
    return place


def _on_disk(model: CachedModel, tiles: Mapping[Path, int]) -> int:
    """Return what a model and its tiles take on the disk, in bytes."""
    return model.size_bytes + tiles.get(model.path, 0)


def _document(model: CachedModel, tiles: Mapping[Path, int], planned: Mapping[Path, int | None]) -> dict[str, Any]:
    return {
        "name": model.name,
        "address": model.address or None,
        "path": os.fspath(standing(model.path)),
        "size_bytes": model.size_bytes,
        "tiles_bytes": tiles.get(model.path, 0),
        "disk_bytes": _on_disk(model, tiles),
        "as_tiles": is_tiled(model.path),
        "origin": model.origin,
        "complete": model.complete,
        **({"memory_bytes": planned[model.path]} if planned else {}),
    }


def _entry_document(entry: Entry, expected: "Expectation") -> dict[str, Any]:
    return {
        "name": entry.name,
        "size_bytes": entry.size_bytes,
        "n_params": entry.n_params,
        "n_active_params": entry.n_active_params,
        "license": entry.licence,
        "architecture": entry.architecture,
        "runtime": expected.runtime,
        "least_memory_bytes": expected.least_bytes,
        "most_tokens_per_s": expected.most_tokens_per_s,
        "source": entry.reference,
        "note": entry.note,
        "draft_head": head_document(entry),
    }

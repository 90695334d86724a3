"""edgedec list: the models on this machine, and those of the catalogue."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgedec.errors import EdgedecError, counted
from edgedec.gguf.places import standing
from edgedec.memory_plan import format_bytes, parse_size
from edgedec.storage.cache_files import cache_folder
from edgedec_apps.cli.declared import output_flag
from edgedec_apps.cli.options import AsJson
from edgedec_apps.cli.reports.expectations import Expectation, head_document, of_entry
from edgedec_apps.cli.shown.terminal import one_line, write_json, write_line, write_paragraph, write_table
from edgedec_apps.machine_speed import kept_speed, memory_bandwidth
from edgedec_models.cache import CachedModel, list_models
from edgedec_models.catalogue import Entry, load_catalogue
from edgedec_models.presets import Preset, list_presets
from edgedec_runtimes.tile_files.record import is_tiled

_HEADINGS, _LICENCE = ("NAME", "SIZE", "MEMORY", "SPEED", "LICENCE", "GOOD FOR"), 4
_LEGEND = (
    "memory: of edgedec run with a full context of 4,096 tokens; from: the weights alone. speed: tokens a second "
    "without drafts, as the model ran here; up to: as often as its weights can be read here. fast: 20 and more; "
    "slow: under 5"
)


def command(
    *,
    every: bool = output_flag("--all", "Also the models of the catalogue that nobody has tried with edgedec.", False),
    fits: str | None = output_flag("--fits SIZE", "Only models that this much memory holds, such as 8GB."),
    as_json: AsJson = False,
) -> None:
    """List the models on this machine, and models to download that edgedec was tried with.

    With --fits, a model on this machine counts with the memory that edgedec plan tells for its default context. Of a
    model that is not here often only the least is known, its weights. edgedec search finds more models.
    """
    limit = None if fits is None else parse_size(fits)
    stored, bandwidth = list_models(), memory_bandwidth()
    here = {} if limit is None else _planned(stored)
    models = [model for model in stored if limit is None or (here[model.path] or 0) <= limit]
    catalogue, tiles = load_catalogue(), _tiles()
    rows = [(model, _expected(catalogue.get(model.name), model, bandwidth)) for model in models]
    here_names = {model.name for model in stored}
    expected = [(entry, of_entry(entry, bandwidth)) for entry in catalogue.values() if entry.name not in here_names]
    entries = [
        (entry, each)
        for entry, each in expected
        if limit is None or (each.chat_bytes or each.least_bytes or 0) <= limit
    ]
    if as_json:
        document = {
            "models": [_document(model, tiles, here) | _facts(catalogue.get(model.name), each) for model, each in rows],
            "to_pull": [entry_document(entry, each) for entry, each in entries],
            "presets": [{"name": preset.name, "model": preset.model} for preset in list_presets()],
        }
        write_json(document)
        return
    _write_here([(_model_row(model, tiles, catalogue, each)) for model, each in rows], list_presets())
    if models:
        write_line(f"\non the disk in all: {format_bytes(sum(_on_disk(model, tiles) for model in models))}")
    others = sum(n for path, n in tiles.items() if path not in {model.path for model in stored})
    for what, n_bytes in (("tiles of other models", others), ("graphs for GPUs", _graph_bytes())):
        if n_bytes and limit is None:
            write_line(f"{what}: {format_bytes(n_bytes)} (edgedec cache list shows them)")
    _write_entries(entries, every=every)
    if models or entries:
        write_line("")
        write_paragraph(_LEGEND)


def _write_here(rows: list[tuple[str, ...]], presets: list[Preset]) -> None:
    """Write the models on this machine, and the presets."""
    write_line("on this machine:" if rows else "no models on this machine yet")
    further = [(one_line(each.name), "", "", "", "", f"a preset of {one_line(each.model)}") for each in presets]
    if rows or further:
        write_table([_HEADINGS, *rows, *further], dropped=_LICENCE)


def _write_entries(entries: list[tuple[Entry, Expectation]], *, every: bool) -> None:
    """Write the models of the catalogue that are not here: the tried ones, and the others with `every`."""
    for is_tried, heading in ((True, "to download (edgedec pull NAME)"), (False, "to download, not tried")):
        rows = [_entry_row(entry, expected) for entry, expected in entries if entry.tried == is_tried]
        if rows and (every or is_tried):
            write_line(f"\n{heading}:")
            write_table([_HEADINGS, *rows], dropped=_LICENCE)
        elif rows:
            write_line(f"\n{counted(len(rows), 'more model')} of the catalogue, not tried: edgedec list --all")


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


def _expected(entry: Entry | None, model: CachedModel, bandwidth: float | None) -> Expectation:
    """Return what to expect of a model on this machine."""
    speed = kept_speed(model.path)
    return (
        Expectation(None, model.size_bytes, None, None, speed) if entry is None else of_entry(entry, bandwidth, speed)
    )


def _model_row(
    model: CachedModel, tiles: Mapping[Path, int], catalogue: Mapping[str, Entry], expected: Expectation
) -> tuple[str, ...]:
    entry = catalogue.get(model.name)
    uses = [] if entry is None else [_use(entry)]
    uses += [place for place in (_place(model, tiles), f"as {model.address}" if model.address else "") if place]
    size = format_bytes(_on_disk(model, tiles))
    licence = "" if entry is None else entry.licence
    return tuple(map(one_line, (model.name, size, expected.memory(), expected.speed(), licence, "; ".join(uses))))


def _use(entry: Entry) -> str:
    """Return what a model is good for: its note without the title that begins it."""
    return entry.note.partition(": ")[2] or entry.note


def _entry_row(entry: Entry, expected: Expectation) -> tuple[str, ...]:
    needs = "" if expected.runtime == "cpu" else f" (needs the {expected.runtime} runtime)"
    size = f"from {format_bytes(expected.least_bytes)}" if expected.least_bytes else "-"
    size = size if entry.size_bytes is None else format_bytes(entry.size_bytes)
    note = f"{_use(entry)}{needs}{'; has a draft head' * (entry.head is not None)}"
    return tuple(map(one_line, (entry.name, size, expected.memory(), expected.speed(), entry.licence, note)))


def billions(n_params: int) -> str:
    """Return a number of parameters for a column.

    >>> billions(354_000_000), billions(1_170_000_000), billions(30_500_000_000)
    ('354 M', '1.17 B', '30.5 B')
    """
    return f"{n_params / 1e6:.0f} M" if n_params < 10**9 else f"{n_params / 1e9:.3g} B"


def _place(model: CachedModel, tiles: Mapping[Path, int]) -> str:
    """Return what is special about how a model lies on the disk."""
    if not model.complete:
        return "incomplete; edgedec pull continues the download"
    if n_bytes := tiles.get(model.path, 0):
        return f"{format_bytes(n_bytes)} of its size are tiles, which make starts fast"
    return "stored as tiles" if is_tiled(model.path) else "" if model.origin == "cache" else "in EDGEDEC_MODELS"


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


def entry_document(entry: Entry, expected: Expectation) -> dict[str, Any]:
    """Return the JSON object of a model of the catalogue that is not on this machine."""
    return {
        "name": entry.name,
        "size_bytes": entry.size_bytes,
        "n_active_params": entry.n_active_params,
        "architecture": entry.architecture,
        "runtime": expected.runtime,
        "source": entry.reference,
        "draft_head": head_document(entry),
        **_facts(entry, expected),
    }


def _facts(entry: Entry | None, expected: Expectation) -> dict[str, Any]:
    """Return what the JSON object of a model has whether the model is here or not."""
    return {
        "n_params": None if entry is None else entry.n_params,
        "license": None if entry is None else entry.licence,
        "note": None if entry is None else entry.note,
        "tried": entry is not None and entry.tried,
        "least_memory_bytes": expected.least_bytes,
        "chat_memory_bytes": expected.chat_bytes,
        "most_tokens_per_s": expected.most_tokens_per_s,
        "tokens_per_s": expected.tokens_per_s,
    }

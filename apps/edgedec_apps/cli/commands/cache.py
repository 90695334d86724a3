"""edgedec cache: tile files and prompts that the cpu runtime keeps, graphs for GPUs, and environments of optimum."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgedec.errors import ModelFormatError, StorageError
from edgedec.gguf.places import standing
from edgedec.gguf.tile_header import REMEDY
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec.storage.cache_files import cache_folder, sort_out
from edgedec_apps.cli.declared import flag
from edgedec_apps.cli.interrupts import interruptible
from edgedec_apps.cli.options import AsJson, Quiet
from edgedec_apps.cli.shown.progress import ProgressLine
from edgedec_apps.cli.shown.terminal import one_line, say, write_json, write_line
from edgedec_models.cache import list_models
from edgedec_runtimes.tile_files.record import is_tiled

if TYPE_CHECKING:
    from edgedec_export.cached import CachedGraph
    from edgedec_export.optimum.environment import Environment
    from edgedec_runtimes.cpu.tiles.listing import TileEntry

_STATES = {
    "changed": "the model has changed since",
    "missing": "the model is gone",
    "damaged": "damaged; written anew when it is needed",
    "unfinished": "unfinished",
}


def list_files(*, as_json: AsJson = False) -> None:
    """List the tile files with their sizes and models, the last used first, prompts, graphs, and optimum."""
    from edgedec_export.cached import list_graphs
    from edgedec_export.optimum.environment import list_environments
    from edgedec_runtimes.cpu.tiles.listing import list_tiles
    from edgedec_runtimes.shared.block_files import FOLDER, list_folders

    root, names = cache_folder(), _model_names()
    entries, environments = list_tiles(root), list_environments(root)
    prompts, graphs = list_folders(root / FOLDER), list_graphs(root)
    if as_json:
        listed = [{"path": os.fspath(e.path), "size_bytes": e.n_bytes, "current": e.is_current} for e in environments]
        documents = [
            {"name": each.name, "size_bytes": each.n_bytes, "last_used_s": each.last_used_s} for each in prompts
        ]
        made = [{"path": os.fspath(g.path), "size_bytes": g.n_bytes, "source": g.source} for g in graphs]
        tiles = [_document(entry) for entry in entries]
        write_json({"tiles": tiles, "environments": listed, "prompts": documents, "graphs": made})
        return
    if not (entries or environments or prompts or graphs):
        write_line("no tile files")
    for entry in entries:
        day = time.strftime("%Y-%m-%d", time.localtime(entry.last_used_s))
        write_line(f"{format_bytes(entry.n_bytes):>9}  {day}  {_tile_name(entry, names)}")
    for each in prompts:
        day = time.strftime("%Y-%m-%d", time.localtime(each.last_used_s))
        write_line(f"{format_bytes(each.n_bytes):>9}  {day}  {_prompts_name(each.name)}")
    for environment in environments:
        write_line(f"{format_bytes(environment.n_bytes):>9}  {_environment_name(environment)}")
    for graph in graphs:
        write_line(f"{format_bytes(graph.n_bytes):>9}  {_graph_name(graph)}")


def prune(*, everything: bool = flag("--all", "Delete all of them, and all prompts.", False, panel="Tiles")) -> None:
    """Delete tile files whose model is gone or has changed, old environments of optimum, and unfinished files.

    Graphs for GPUs are deleted with --all alone; the next use of the GPU makes them again. Other programs' files, and
    what lies behind links, are named and stay.
    """
    from edgedec_export.cached import list_graphs, remove_graph
    from edgedec_export.optimum.environment import list_environments, remove_environment
    from edgedec_runtimes.cpu.tiles.listing import prune_tiles
    from edgedec_runtimes.shared.block_files import FOLDER, delete_folder, list_folders

    root, names = cache_folder(), _model_names()
    removed = [(entry.n_bytes, _tile_name(entry, names)) for entry in prune_tiles(root, everything=everything)]
    for environment in list_environments(root):
        if (everything or not environment.is_current) and remove_environment(environment):
            removed.append((environment.n_bytes, _environment_name(environment)))
    for graph in list_graphs(root) if everything else ():
        remove_graph(graph.path)
        removed.append((graph.n_bytes, _graph_name(graph)))
    for each in list_folders(root / FOLDER) if everything else ():
        delete_folder(root / FOLDER, each.name)
        removed.append((each.n_bytes, _prompts_name(each.name)))
    for n_bytes, name in removed:
        say(f"{format_bytes(n_bytes):>9}  {name}")
    for kind in ("tiles", FOLDER, "graphs", "optimum"):
        for path in sort_out(root / kind, kind)[1]:
            say(f"not edgedec's, and stays: {one_line(path)}")
    say(f"{format_bytes(sum(n_bytes for n_bytes, _ in removed))} freed")


def verify(*, quiet: Quiet = False) -> None:
    """Read all tile files and delete damaged ones, which the next start writes anew.

    Tiles that took the place of a model's GGUF are read, too; damaged ones stay, and edgedec pull --force fetches the
    model again.
    """
    from edgedec_runtimes.cpu.tiles.listing import delete_tile_file, list_tiles

    def is_sound(path: Path, label: str, cancel: CancelToken, on_progress: OnProgress) -> bool:
        try:
            _check_tiles(path, label, cancel, on_progress)
        except ModelFormatError as error:
            say(str(error).replace(REMEDY, stored.get(path, REMEDY)))
            if path not in stored:
                say(f"{format_bytes(delete_tile_file(path))} freed")
            return False
        return True

    def work(cancel: CancelToken) -> int:
        with ProgressLine(quiet=quiet) as on_progress:
            return sum(is_sound(path, label, cancel, on_progress) for path, label in labels.items())

    names, models = _model_names(), [model for model in list_models() if is_tiled(model.path)]
    stored = {standing(each.path): f"download the model again: edgedec pull --force {each.name}" for each in models}
    labels = {each.path: _tile_name(each, names) for each in list_tiles(cache_folder()) if each.state != "unfinished"}
    labels |= {standing(model.path): one_line(model.name) for model in models}
    n_sound = interruptible(work)
    say(f"{n_sound} of {len(labels)} tile files are sound")


command: dict[str, Callable[..., None]] = {"list": list_files, "prune": prune, "verify": verify}


def _check_tiles(path: Path, label: str, cancel: CancelToken, on_progress: OnProgress) -> None:
    """Check the CRCs of a tile file (ModelFormatError where it is damaged, StorageError where it can't be read)."""
    from edgedec_runtimes.cpu.tiles.file import map_tiles

    def show_file(progress: Progress) -> None:
        on_progress(replace(progress, detail=f"tiles of {label}"))

    try:
        with map_tiles(path, label) as tiles:
            tiles.verify(on_progress=show_file, cancel=cancel)
    except FileNotFoundError:
        return  # deleted since it was listed
    except OSError as error:
        raise StorageError(f"the tiles of {label} can't be read: {error.strerror or error}; check the disk") from error


def _model_names() -> dict[Path, str]:
    """Return the names of the models that `edgedec list` shows, by path."""
    return {model.path: model.name for model in list_models()}


def _tile_name(entry: "TileEntry", names: Mapping[Path, str]) -> str:
    """Return the names of a tile file's models, and the file's state where it is not current.

    A model that `edgedec list` does not show has the name of its file.
    """
    models = ", ".join(dict.fromkeys(one_line(names.get(path, path.name)) for path in entry.models))
    if not models:
        models = "a model that is being rearranged" if entry.state == "unfinished" else "an unknown model"
    return models if entry.state == "current" else f"{models} ({_STATES[entry.state]})"


def _prompts_name(folder: str) -> str:
    return f"prompts that {one_line(folder.rpartition('-')[0])} has read"


def _environment_name(environment: "Environment") -> str:
    state = "" if environment.is_current else " (of another release, or unfinished)"
    return f"optimum, for edgedec export --via optimum{state}"


def _graph_name(graph: "CachedGraph") -> str:
    return f"graph of {one_line(graph.source) or 'an unfinished export'}, for a GPU"


def _document(entry: "TileEntry") -> dict[str, Any]:
    return {
        "path": os.fspath(entry.path),
        "models": [os.fspath(path) for path in entry.models],
        "layout": entry.layout,
        "size_bytes": entry.n_bytes,
        "last_used_s": entry.last_used_s,
        "state": entry.state,
    }

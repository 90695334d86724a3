"""What edgedec keeps on this machine besides the program itself, and deleting it: for `edgedec uninstall`.

Only what edgedec puts there by itself is found: edgedec.storage.cache_files knows its files. A cache folder that is
shared with other files (EDGEDEC_CACHE) keeps those.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgedec.storage.cache_files import cache_folder, delete, is_ours, sort_out
from edgedec_models.cache import list_models, remove_model
from edgedec_models.folders import config_folder, models_folder
from edgedec_models.storage import size_of, storage_errors

MODEL, HEADS = "model", "draft heads"

_IN_CACHE = {
    "tiles": "tiles, which make starts fast",
    "prompts": "prompts that were read",
    "heads": HEADS,
    "learned": "what was learned from your files",
    "answers": "answers that serve --keep-answers kept",
    "probes": "measurements of this machine",
    "npu": "compiled graphs of NPUs",
    "graphs": "graphs for GPUs",
    "optimum": "optimum's packages, for exports",
    "chat-history": "what was typed in chats",
}
_IN_CONFIG = {"presets": "presets", "catalogue.toml": "your own catalogue"}


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that edgedec keeps.

    Attributes:
        kind: What it is, for a person; MODEL and HEADS are kinds, too.
        path: A file or a folder; of a model, its first file.
        n_bytes: The space that edgedec's files take on the disk.
        name: Of a model, its name; else "".
        files: The files in the folder, and of optimum the folders, that are edgedec's.
        others: What else is in the folder, which stays.
    """

    kind: str
    path: Path
    n_bytes: int
    name: str = ""
    files: Sequence[Path] = ()
    others: Sequence[Path] = ()


def find_leftovers() -> list[Leftover]:
    """Return what edgedec keeps on this machine: the models of its cache, then the rest of the cache, then settings.

    Models elsewhere (EDGEDEC_MODELS, Ollama's) are not in the list: edgedec did not put them there.

    Raises:
        StorageError: A folder can't be read.
    """
    models = [
        Leftover(MODEL, model.path, model.size_bytes, model.name) for model in list_models() if model.origin == "cache"
    ]
    in_cache = [(cache_folder(), name, kind) for name, kind in _IN_CACHE.items()]
    in_cache += [(config_folder(), name, kind) for name, kind in _IN_CONFIG.items()]
    return models + [_leftover(root, name, kind) for root, name, kind in in_cache if os.path.lexists(root / name)]


def _leftover(root: Path, name: str, kind: str) -> Leftover:
    path = root / name
    with storage_errors("list", path):
        if path.is_dir():
            files, others = sort_out(path, name)
        else:
            files, others = ([path], []) if is_ours(path, root, "") else ([], [path])
        parts = [part for path in files for part in (path.rglob("*") if path.is_dir() else [path])]
        n_bytes = sum(size_of(part) for part in parts if not part.is_dir())
    return Leftover(kind, path, n_bytes, "", files, others)


def delete_leftovers(leftovers: Iterable[Leftover]) -> int:
    """Delete what find_leftovers found, and return the bytes freed. What is gone already counts nothing.

    The folders of the models, of the cache and of the configuration are deleted, too, where nothing is left in them.

    Raises:
        PullError: Another process is fetching one of the models at the moment.
        StorageError: Something can't be deleted; what came before it in the list is deleted.
    """
    n_freed, had_models = 0, False
    for leftover in leftovers:
        if leftover.kind == MODEL:
            n_freed += remove_model(leftover.name)
            had_models = True
        for path in leftover.files:
            with storage_errors("delete", path):
                delete(path, leftover.path)
        if leftover.kind != MODEL:
            n_freed += leftover.n_bytes
            _remove_if_empty(leftover.path)
    if had_models:
        _tidy(models_folder())
    for folder in (cache_folder(), config_folder()):
        _remove_if_empty(folder)
    return n_freed


def completion_files() -> list[Path]:
    """Return the scripts for tab completion that `edgedec --install-completion` wrote; a shell's file names them."""
    home = Path.home()
    places = (".bash_completions/edgedec.sh", ".zfunc/_edgedec", ".config/fish/completions/edgedec.fish")
    return [home / place for place in places if (home / place).is_file()]


def _tidy(folder: Path) -> None:
    """Delete the locks of downloads that are gone, and empty folders, in the folder of models."""
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in names if name.endswith(".lock")):
            if not path.with_suffix("").exists() and not size_of(path):
                with storage_errors("delete", path):
                    path.unlink(missing_ok=True)
        _remove_if_empty(Path(parent))


def _remove_if_empty(folder: Path) -> None:
    with storage_errors("delete", folder):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()

"""What edgedec keeps on this machine besides the program itself, and deleting it: for `edgedec uninstall`.

Only what edgedec puts there by itself is found: known names in the folders of the cache and of the configuration. A
cache folder that is shared with other files (EDGEDEC_CACHE) keeps those.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import StorageError
from edgedec_models.cache import list_models, remove_model
from edgedec_models.folders import cache_folder, config_folder, models_folder
from edgedec_models.storage import size_of, storage_errors

MODEL, HEADS = "model", "draft heads"

_IN_CACHE = {
    "tiles": "tiles, which make starts fast",
    "prompts": "prompts that were read",
    "heads": HEADS,
    "learned": "what was learned from your files",
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
        n_bytes: The space it takes on the disk.
        name: Of a model, its name; else "".
    """

    kind: str
    path: Path
    n_bytes: int
    name: str = ""


def find_leftovers() -> list[Leftover]:
    """Return what edgedec keeps on this machine: the models of its cache, then the rest of the cache, then settings.

    Models elsewhere (EDGEDEC_MODELS, Ollama's) are not in the list: edgedec did not put them there.

    Raises:
        StorageError: A folder can't be read.
    """
    models = [
        Leftover(MODEL, model.path, model.size_bytes, model.name) for model in list_models() if model.origin == "cache"
    ]
    named = [(cache_folder() / name, kind) for name, kind in _IN_CACHE.items()]
    named += [(config_folder() / name, kind) for name, kind in _IN_CONFIG.items()]
    found = [Leftover(kind, path, _size(path)) for path, kind in named if os.path.lexists(path)]
    return models + found


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
        else:
            n_freed += leftover.n_bytes if _delete(leftover.path) else 0
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


def _size(path: Path) -> int:
    """Return the size of a file, or of all files below a folder, in bytes; links inside the folder are not followed."""
    return sum(size_of(file) for file in _files(path)) if path.is_dir() else size_of(path)


def _files(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise StorageError(f"cannot list {error.filename}: {error.strerror}") from error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent, name) for name in names)


def _delete(path: Path) -> bool:
    """Delete a file, or what is in a folder and the folder; of a link to a folder, what is in it and the link."""
    with storage_errors("delete", path):
        if not os.path.lexists(path):
            return False
        if not path.is_dir():
            path.unlink()
            return True
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        if path.is_symlink():
            path.unlink()
        else:
            path.rmdir()
    return True


def _tidy(folder: Path) -> None:
    """Delete the locks of downloads that are gone, and empty folders, in the folder of models."""
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in names if name.endswith(".lock")):
            if not path.with_suffix("").exists():
                _delete(path)
        _remove_if_empty(Path(parent))


def _remove_if_empty(folder: Path) -> None:
    with storage_errors("delete", folder):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()

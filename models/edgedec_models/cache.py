"""List the models that are stored on this machine, and remove them.

A name never becomes a path here: remove_model deletes files that it found by listing the cache, so a name with
separators, `..` or links cannot make it delete other files.
"""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from edgedec.callers import did_you_mean
from edgedec.errors import ModelNotFoundError, RequestError, StorageError
from edgedec.gguf.places import standing, tiled_place
from edgedec.storage.cache_files import cache_folder
from edgedec_models.addresses import url_path
from edgedec_models.catalogue import Entry, load_catalogue, reference_of
from edgedec_models.fetching.lock import locked_now
from edgedec_models.fetching.partial import partial_path
from edgedec_models.folders import models_folder, own_folder
from edgedec_models.hubs.hub_spec import HEAD_CONFIG, LISTING, HubSpec, choose, parse_hub, shards_of
from edgedec_models.presets import remove_preset
from edgedec_models.record import WantedFile, is_recorded
from edgedec_models.storage import size_of, storage_errors
from edgedec_runtimes.tile_files.record import read_json, read_record, rename_tiles, sidecar

# FILE.gguf and what the cache keeps beside it: partial files, records, locks, files that are being written. Tiles that
# took its place lie in a folder of their own.
_TILES = re.compile(r"(?P<stem>.+)\.tiles")
_COMPANION = re.compile(
    r"(?P<file>.+\.gguf)(?:\.whole)?(?:\.partial|\.part\d+\.whl(?:\.partial)?)?(?:\.json(?:\.[\w-]+\.tmp)?|\.lock)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this machine.

    Attributes:
        name: The name that resolves to it: of a model of a hub the catalogue's, if it has one for it.
        path: Its file, or its first shard where it is split; the file does not exist while the model is incomplete.
        size_bytes: Space on the disk, with all shards and partial files.
        origin: Whether it is in the cache or in the user's own folder.
        complete: Whether all of it has been fetched.
        address: The hf: name of a model that the catalogue has a name for; else "".
    """

    name: str
    path: Path
    size_bytes: int
    origin: Literal["cache", "EDGEDEC_MODELS"]
    complete: bool
    address: str = ""


def list_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """Return the models of the cache, sorted by name, and then those of EDGEDEC_MODELS; no picture encoders (mmproj).

    Args:
        cache_dir: Root of the cache; None for the default.

    Raises:
        StorageError: A folder cannot be read.
    """
    stored, short = (
        [model for model, _ in _stored(cache_dir) if not is_projector_name(model.path)],
        _short_names(cache_dir),
    )
    models = [
        replace(model, name=short[model.path], address=model.name) if model.path in short else model for model in stored
    ]
    return sorted(models, key=lambda model: model.name) + _own_models()


def entry_of(path: Path) -> Entry | None:
    """Return the catalogue's entry of a model in the cache by its file; None for other files.

    Raises:
        RequestError: A catalogue is malformed.
        StorageError: A folder cannot be read.
    """
    names = [model.name for model in list_models() if model.path == path and model.origin == "cache"]
    return load_catalogue().get(names[0]) if names else None


def _short_names(cache_dir: Path | None) -> dict[Path, str]:
    """Return the catalogue's names for models of a hub that are in the cache; none where a catalogue is malformed."""
    from edgedec_models.hubs.hub import find_cached, hub_folder

    root, short, entries = models_folder(cache_dir), dict[Path, str](), dict[str, Entry]()
    if (root / "hf").is_dir():
        with suppress(RequestError):
            entries = load_catalogue()
    for entry in entries.values():
        if entry.reference is not None and not standing(root / f"{entry.name}.gguf").exists():
            spec = parse_hub(entry.reference)
            if (path := find_cached(spec, hub_folder(spec, root))) is not None:
                short.setdefault(path, entry.name)
    return short


def remove_model(name: str, cache_dir: Path | None = None) -> int:
    """Delete a model from the cache, complete or not, and return the freed bytes; hf:OWNER/REPO deletes all its models.

    A draft head that was fetched for a model of the catalogue goes with it, and a picture encoder with the last model
    of its repository or of its name.

    Args:
        cache_dir: Root of the cache; None for the default.

    Raises:
        ModelNotFoundError: The cache holds nothing of this name; the message has similar names.
        PullError: Another process is fetching it at the moment.
        StorageError: A file cannot be deleted.
    """
    from edgedec_models.draft_heads import forget_head

    root = models_folder(cache_dir)
    stored = _stored(cache_dir)
    matches = _matching(name, stored, root)
    if not matches:
        raise ModelNotFoundError(_not_stored(name, [model.name for model, _ in stored]))
    matches += [
        pair for pair in stored if pair[0].name == f"{name}.head" and is_recorded(WantedFile("", pair[0].path, ""))
    ]
    models = [model.path for model, _ in stored if not is_projector_name(model.path)]
    gone = {model.path for model, _ in matches}.intersection(models)
    others = [path for path in models if path not in gone]
    matches += [pair for pair in stored if is_projector_name(pair[0].path) and _goes(pair[0].path, gone, others, root)]
    matches = [pair for i, pair in enumerate(matches) if pair not in matches[:i]]
    n_freed = 0
    with ExitStack() as locks:
        for model, files in matches:
            _refuse_outside(model.path, root)
            for shard in shards_of(model.path.name):
                locks.enter_context(locked_now(model.path.with_name(shard), model.name))
            n_freed += sum(_delete(file) for file in files if not file.name.endswith(".lock"))
            with suppress(OSError):  # there is none, or it has tiles of other models
                tiled_place(model.path).parent.rmdir()
    for model, _ in matches:
        forget_head(model.path, root.parent)
    for folder in filter(
        Path.is_dir, {model.path.parent for model, _ in matches}
    ):  # a folder of another is gone with it
        _prune(folder, root)
    return n_freed


def _goes(projector: Path, gone: Collection[Path], others: Collection[Path], root: Path) -> bool:
    """Return whether a picture encoder goes with models: no other one has it by its name, or is in its repository."""
    from edgedec_runtimes.pictures.finding import base_name

    def home(path: Path) -> Path:
        parts = path.relative_to(root).parts
        return root.joinpath(*parts[:4]) if parts[0] == "hf" else path.parent

    def has(path: Path) -> bool:
        return path.parent == projector.parent and base_name(projector) in ("", base_name(path))

    place = home(projector)
    is_last = place != root and place in map(home, gone) and place not in map(home, others)
    return is_last or (any(map(has, gone)) and not any(map(has, others)))


def is_projector_name(path: Path) -> bool:
    """Return whether a file is a picture encoder by its name."""
    return "mmproj" in path.name.lower()


def _stored(cache_dir: Path | None) -> list[tuple[CachedModel, list[Path]]]:
    """Return the models of the cache, sorted by name, each with all its files."""
    root = models_folder(cache_dir)
    groups: dict[Path, list[Path]] = {}
    for path in list(_walk(root)):
        if path.suffix == ".gguf" and not _is_own(path):
            rename_tiles(path)
    for path in _walk(root):
        if path.parent.name == "tiles" and (match := _TILES.fullmatch(path.name)):
            groups.setdefault(path.parent.with_name(f"{match['stem']}.gguf"), []).append(path)
        elif match := _COMPANION.fullmatch(path.name):
            first = shards_of(match["file"])[0]
            groups.setdefault(path.with_name(first), []).append(path)
        elif path.is_relative_to(root / "hf") and path.name != LISTING:  # of a draft head's checkpoint
            groups.setdefault(path.with_name(HEAD_CONFIG), []).append(path)
    models = [(_describe(path, files, root), files) for path, files in groups.items() if not _is_own(path)]
    return sorted([(model, files) for model, files in models if model.size_bytes], key=lambda pair: pair[0].name)


def _describe(path: Path, files: list[Path], root: Path) -> CachedModel:
    there = {path.name if file == tiled_place(path) else file.name for file in files}
    return CachedModel(
        name=_name_of(path, root),
        path=path,
        size_bytes=sum(size_of(file) for file in files if file.suffix not in (".json", ".lock", ".tmp")),
        origin="cache",
        complete=there.issuperset(shards_of(path.name)) and (path.name != HEAD_CONFIG or _has_weights(there)),
    )


def _has_weights(names: set[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names) and not any(".partial" in name for name in names)


def _name_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).parts
    if parts[0] == "hf" and len(parts) > 4:
        return HubSpec(parts[1], parts[2], revision=unquote(parts[3])).name_of("/".join(parts[4:]))
    if parts[0] == "url" and len(parts) == 3:
        record = read_record(path)
        return record.source if record else str(read_json(sidecar(partial_path(path))).get("source", path.name))
    return path.stem


def _matching(
    name: str, stored: list[tuple[CachedModel, list[Path]]], root: Path
) -> list[tuple[CachedModel, list[Path]]]:
    """Return the stored models that `name` stands for: a name of the list, a URL, or an hf: name."""
    if matches := [pair for pair in stored if pair[0].name == name]:
        return matches
    name = reference_of(name) or name
    if name.startswith(("http://", "https://")):
        return [pair for pair in stored if pair[0].path == url_path(name, root)]
    if not name.startswith("hf:"):
        return []
    spec = parse_hub(name)
    of_repo = {pair[0].name: pair for pair in stored if _is_of(spec, pair[0].name)}
    if not spec.what:
        return list(of_repo.values())
    shards = {model.path.name: shards_of(model.path.name) for model, _ in of_repo.values()}
    by_file = {parse_hub(each).what: pair for each, pair in of_repo.items()}
    try:
        chosen = choose([part for file in by_file for part in _with_shards(file, shards)], spec)
    except ModelNotFoundError:
        return []
    return [by_file[chosen[0]]]


def _with_shards(file: str, shards: dict[str, tuple[str, ...]]) -> list[str]:
    folder, slash, base = file.rpartition("/")
    return [f"{folder}{slash}{part}" for part in shards[base]]


def _is_of(spec: HubSpec, name: str) -> bool:
    if not name.startswith("hf:"):
        return False
    other = parse_hub(name)
    return (other.owner, other.repo, other.revision) == (spec.owner, spec.repo, spec.revision)


def _own_models() -> list[CachedModel]:
    folder = own_folder()
    if folder is None or not folder.is_dir():
        return []
    with storage_errors("list", folder):
        gguf_files = (path for path in folder.iterdir() if path.name.endswith(".gguf") and not is_projector_name(path))
        paths = sorted(path for path in gguf_files if path.is_file())
    return [CachedModel(path.stem, path, path.stat().st_size, "EDGEDEC_MODELS", True) for path in paths]


def _is_own(path: Path) -> bool:
    """Tell whether a file of the cache is in EDGEDEC_MODELS, which may be a folder of the cache."""
    folder = own_folder()
    return folder is not None and path.parent.resolve() == folder.resolve()


def _not_stored(name: str, names: list[str]) -> str:
    own_model = next((model for model in _own_models() if model.name == name), None)
    if own_model is not None:
        return (
            f"{name!r} is {own_model.path}, in your own folder (EDGEDEC_MODELS), where edgedec deletes nothing; delete "
            "the file yourself"
        )

    hint = did_you_mean(name, names)
    return f"the cache holds no model {name!r}{hint or '; `edgedec list` shows what it holds'}"


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below `root`; links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise StorageError(f"cannot list {error.filename}: {error.strerror}") from error

    if root.is_dir():
        for folder, _, files in os.walk(root, onerror=fail):
            yield from (Path(folder, file) for file in files)


def _refuse_outside(path: Path, root: Path) -> None:
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise StorageError(
            f"{path} leads outside the cache {root} through a link, and nothing was deleted; remove the link"
        )


def _delete(path: Path) -> int:
    n_bytes = size_of(path)
    with storage_errors("delete", path):
        path.unlink(missing_ok=True)
    return n_bytes


def _prune(folder: Path, root: Path) -> None:
    """Remove `folder` and the folders above it, up to the root, that hold at most a listing of their repository."""
    while folder != root and folder.is_relative_to(root):
        with storage_errors("delete", folder):
            if any(child.name != LISTING for child in folder.iterdir()):
                return
            (folder / LISTING).unlink(missing_ok=True)
            folder.rmdir()
        folder = folder.parent


@dataclass(frozen=True, slots=True)
class Freed:
    """What was deleted: bytes in all, and the bytes of tiles among them."""

    n_bytes: int
    n_tile_bytes: int = 0


def remove(name: str) -> Freed:
    """Delete a preset, or a model of the cache with its tiles; files elsewhere are never deleted.

    Raises:
        ModelNotFoundError: There is nothing of this name in the cache; the message has similar names.
        PullError: Another process is fetching the model at the moment.
        StorageError: A file can't be deleted.
    """
    from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_tiles_of

    if remove_preset(name):
        return Freed(0)
    before = {stored.path for stored in list_models() if stored.origin == "cache"}
    n_freed = remove_model(name)
    gone = before - {stored.path for stored in list_models()}
    n_tiles = sum(remove_tiles_of(cache_folder(), path) for path in gone) + remove_missing(cache_folder())
    return Freed(n_freed + n_tiles, n_tiles)

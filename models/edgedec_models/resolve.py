"""From the name of a model to its file on this machine: edgedec's resolver, and pull.

A name is looked up as, in this order: an existing path; NAME.gguf in EDGEDEC_MODELS; a name of the catalogue or of a
file in the cache; an alias of the catalogue, such as qwen3:4b; an address with hf:, ollama:, http://, https:// or
file://. Every start imports this file, so it
imports at its top only what a model needs that is in the cache already.
"""

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from edgedec.errors import ModelError, ModelNotFoundError, OfflineError, PullError, StorageError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec.storage.cache_files import cache_folder
from edgedec_models.fetching.offline import offline_reason
from edgedec_models.folders import flat_path, is_plain, models_folder, own_folder
from edgedec_models.record import WantedFile, is_recorded
from edgedec_runtimes.tile_files.record import rename_tiles

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # at least two characters, as C: is a drive
_ADDRESSES = ("hf:", "ollama:", "http:", "https:", "file:")


def resolve(name: str, options: ResolveOptions) -> Path | None:
    """Return the file that `name` stands for, and fetch it where that is allowed; None for an unknown kind of name.

    A model in the cache is used as it was stored, whatever the catalogue says by now.

    Raises:
        ModelNotFoundError: No model has this name; the message has similar names.
        ModelFormatError: A file that the user put into the cache is not the one that the catalogue describes.
        PullError, OfflineError, StorageError, CancelledError: The model could not be fetched.
    """
    is_new = False
    if not _is_path(name):
        folder = own_folder()
        path = flat_path(name, models_folder(options.cache_dir))
        is_own = is_plain(name) and folder is not None and os.path.isfile(flat_path(name, folder))
        if is_plain(name) and not is_own and is_recorded(WantedFile(name, path, "")):
            rename_tiles(path)
            return path
        name = _entry_name(name, options)
        is_new = is_plain(name) and not _is_file(flat_path(name, models_folder(options.cache_dir)))
    resolved = _find(name, options, force=False)
    if resolved is not None and resolved.is_relative_to(models_folder(options.cache_dir)):
        rename_tiles(resolved)
    if is_new and resolved is not None and not options.draft_head:
        _bring_head(name, resolved, options)
    return resolved


def pull(
    name: str, options: ResolveOptions, force: bool = False, *, takes_paths: bool = True, with_head: bool = True
) -> Path:
    """Fetch a model or a draft head unless it is there, and return its file.

    A file that is on this machine already is checked, too: one that was fetched by its checksum, another by its header.
    A repository of a hub may hold the checkpoint of a draft head; its config.json is then returned. A head that names
    its target is noted in the cache's folder of heads, so that `--draft auto` finds it for that model.

    Args:
        force: Verify again what is there, and replace what is wrong.
        takes_paths: A path that exists stands for its file. Otherwise the file system is never asked whether `name` is
            a path, as for names that come from other people.
        with_head: Fetch the head that comes with a model of the catalogue; the model alone is as good where it can't
            be fetched.

    Raises:
        ModelNotFoundError, ModelFormatError, PullError, OfflineError, StorageError, CancelledError: As `resolve`.
    """
    if not takes_paths or not _is_path(name):
        name = _entry_name(name, options)
    find = _find if takes_paths else _find_named
    path = find(name, replace(options, draft_head=True), force=force)
    if path is None:
        raise ModelNotFoundError(
            f"{name!r} is not a kind of name that can be pulled; give a name of the catalogue, hf:OWNER/REPO, "
            "ollama:NAME or an https:// address"
        )
    if path.is_relative_to(models_folder(options.cache_dir)):
        from edgedec_models.draft_heads import remember_if_head

        rename_tiles(path)
        remember_if_head(path, cache_folder(options.cache_dir))
    if not is_recorded(WantedFile(name, path, "")):
        _check(path)
    if with_head and is_plain(name):
        _bring_head(name, path, options)
    return path


def _check(path: Path) -> None:
    """Raise what read_gguf raises where a path that was not fetched is neither a whole GGUF, an export nor a head."""
    from edgedec.gguf.file import is_onnx, read_gguf  # here, as it imports numpy
    from edgedec.head_kinds import kind_of

    if not is_onnx(path) and kind_of(path) is None:
        read_gguf(path)


def _bring_head(name: str, model: Path, options: ResolveOptions) -> None:
    """Fetch the draft head that comes with a model of the catalogue, where it can be had."""
    from edgedec_models.catalogue import find_model
    from edgedec_models.model_heads import bring_head

    entry = find_model(name)
    if entry is not None and entry.head is not None:
        with suppress(ModelError, PullError, StorageError):
            bring_head(entry, model, options)


def _entry_name(name: str, options: ResolveOptions) -> str:
    """Return the name of a model that is given by an alias or in another case; any other name as it is."""
    kind = match[0].lower() if (match := _SCHEME.match(name)) else ""
    if kind in _ADDRESSES or "/" in name or "\\" in name:
        return name
    folders = [folder for folder in (own_folder(), models_folder(options.cache_dir)) if folder is not None]
    if is_plain(name) and any(_is_file(flat_path(name, folder)) for folder in folders):
        return name
    from edgedec_models.cache import list_models
    from edgedec_models.catalogue import find_model

    if (entry := find_model(name)) is not None:
        return entry.name
    return next((each.name for each in list_models(options.cache_dir) if each.name.lower() == name.lower()), name)


def _find(name: str, options: ResolveOptions, *, force: bool) -> Path | None:
    if _is_path(name):
        return Path(name)
    return _find_named(name, options, force=force)


def _find_named(name: str, options: ResolveOptions, *, force: bool) -> Path | None:
    """Return the file of a name that is no path; None for an unknown kind of name."""
    models = models_folder(options.cache_dir)
    kind = match[0].lower() if (match := _SCHEME.match(name)) else ""
    if kind == "hf:":
        return _hub(name, models, options, force=force)
    if kind == "ollama:":
        from edgedec_models.hubs.ollama import find_ollama

        return find_ollama(name)
    if kind in ("http:", "https:"):
        return _url(name, models, options, force=force)
    if kind == "file:":
        from edgedec_models.addresses import local_file

        return local_file(name)
    if not kind:
        return _bare(name, models, options, force=force)
    _refuse_tag(name, options)
    return None


def _is_path(name: str) -> bool:
    return os.path.exists(name) or (bool(name) and os.path.exists(standing(Path(name))))


def _is_file(path: Path) -> bool:
    return os.path.isfile(standing(path))


def _bare(name: str, models: Path, options: ResolveOptions, *, force: bool) -> Path:
    if not is_plain(name):
        raise ModelNotFoundError(_no_path(name))
    folder = own_folder()
    if folder is not None and os.path.isfile(path := flat_path(name, folder)):
        return path
    from edgedec_models.catalogue import find_entry

    path = flat_path(name, models)
    entry = find_entry(name)
    if entry is not None and entry.reference is not None and not _is_file(path):
        return _hub(entry.reference, models, options, force=force)
    if entry is not None and entry.reference is None:
        from edgedec_models.entries import pull_entry

        return pull_entry(entry, path, options, force=force)
    if _is_file(path):
        return path
    raise ModelNotFoundError(_no_path(name) if name.lower().endswith(".gguf") else _unknown(name, _hint(name, options)))


def _hub(name: str, models: Path, options: ResolveOptions, *, force: bool) -> Path:
    from edgedec_models.hubs.hub import bring_projector, endpoint, fetch_hub, find_cached, hub_folder
    from edgedec_models.hubs.hub_spec import parse_hub

    spec = parse_hub(name)
    folder = hub_folder(spec, models)
    if not force and (path := find_cached(spec, folder, draft_head=options.draft_head)):
        if options.draft_head and not offline_reason(options):  # pull
            bring_projector(spec, path, folder, options)
        return path
    if reason := offline_reason(options):
        state = "verifying it again needs" if force else f"it is not in the cache {folder}, and comes from"
        raise OfflineError(f"{reason}; {name}: {state} {endpoint()}/{spec.repo_id}")
    return fetch_hub(spec, folder, options, rehash=force)


def _url(url: str, models: Path, options: ResolveOptions, *, force: bool) -> Path:
    from edgedec_models.addresses import checksum_of, redact, url_path
    from edgedec_models.fetching.verify import find_fault, write_record

    path = url_path(url, models)
    source = redact(url.partition("#")[0])
    file = WantedFile(source, path, source, sha256=checksum_of(url))
    if not force and is_recorded(file):
        return path
    if reason := offline_reason(options):
        state = f"the cache {path.parent} does not hold the right file, which would have been fetched from"
        raise OfflineError(f"{reason}, and {state} {source}")
    from edgedec_models.fetching.download import download_gguf
    from edgedec_models.fetching.lock import locked

    with locked(path, source, options):
        if not _is_file(path) or find_fault(file, options, rehash=force):
            write_record(file, download_gguf(url.partition("#")[0], file, options))
    return path


def _no_path(name: str) -> str:
    repository = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name, re.ASCII) and not name.lower().endswith(".gguf")
    hint = f"; for a repository of the Hugging Face hub write hf:{name}" if repository else ""
    return f"the path {name!r} does not exist (the current folder is {os.getcwd()}){hint}"


def _unknown(name: str, hint: str) -> str:
    words = " ".join(re.findall(r"[A-Za-z0-9.]+", name))[:50] or "WORDS"
    return (
        f"no model is called {name!r}{hint or ';'} `edgedec list` shows the names, and `edgedec search {words}` those "
        "of the Hugging Face hub; a path, hf:OWNER/REPO, ollama:NAME or an https:// address work, too"
    )


def _hint(name: str, options: ResolveOptions) -> str:
    """Return what a name is instead, or the names like it of models here, presets and the catalogue."""
    from edgedec.callers import did_you_mean
    from edgedec_models.cache import list_models
    from edgedec_models.catalogue import load_catalogue
    from edgedec_models.presets import find_preset, preset_names

    if (preset := find_preset(name)) is not None:
        return f"; it is a preset of {preset.model!r}, which edgedec run, chat and serve take;"
    models = (model.name for model in list_models(options.cache_dir))
    return did_you_mean(name, [*models, *preset_names(), *load_catalogue()])


def _refuse_tag(name: str, options: ResolveOptions) -> None:
    """Raise ModelNotFoundError for a name in ollama's form, such as qwen3:0.6b, that is like a name we know."""
    if re.fullmatch(r"[\w.-]+:[\w.-]+", name, re.ASCII) and (hint := _hint(name.replace(":", "-"), options)):
        raise ModelNotFoundError(_unknown(name, hint))

"""Find the trained draft head of a model: one that lies beside it, was trained here, or is shipped with edgedec.

A head is looked for in this order:

1. Beside the model's file: NAME.head.gguf, or a folder NAME.head, for a model NAME.gguf. (A catalogue's head is called
   NAME.head, so that the cache keeps it there.)
2. In the folder `heads` of the cache: heads that lie there, and those that `remember_head` noted there, as
   `edgedec train-drafter` does with what it trained, and `edgedec pull` with what it fetched.
3. In the folders that plug-ins of the group `edgedec.head_folders` return, that of edgedec's own heads among them.

In 2 and 3 a head is taken only if its record names this very model by hashes: first one that learned from these
weights, else one that learned from another quantization of them.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgedec import plugins
from edgedec.errors import EdgedecError, StorageError
from edgedec.gguf.file import GGUF, read_gguf, read_header_of
from edgedec.gguf.metadata import get_text
from edgedec.storage.whole_file import write_atomically
from edgedec.trained_heads.card import Target
from edgedec.trained_heads.gguf_head import is_head
from edgedec.trained_heads.record import RECORD_FILE, RECORD_KEY, parse_record, read_record

HEADS = "heads"
"""The name of the cache's folder of trained heads, and the beginning of the names of plug-ins that have others."""
OFF = "off"
"""What load's `draft_head` is where no head is wanted."""
_NOTE = ".path"
_MOST_NOTE_BYTES = 1 << 16
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head that was found for a model.

    Attributes:
        path: The GGUF, or the folder of a checkpoint.
        beside: It lies beside the model; otherwise its hashes named the model.
    """

    path: Path
    beside: bool


def usable_head(model: Path, cache_dir: Path | None) -> tuple[Path | None, str]:
    """Return the head that is found for a model and fits it, or None; and a note where one was found that does not fit.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: The model's own file can't be read.
    """
    found = find_head(model, cache_dir)
    if found is None:
        return None, ""
    read_header_of(model)  # what is wrong with the model is no fault of the head
    try:
        require_fit(found.path, model)
    except EdgedecError as error:
        return None, f"the draft head {found.path.name} was found, but is not used: {error}"
    return found.path, ""


def require_fit(head: Path, model: Path) -> None:
    """Check that a head can be read and fits a model.

    Raises:
        ModelError, StorageError, MemoryCapError: It can't, or does not; the message says why.
    """
    from edgedec.trained_heads.load import load_head
    from edgedec.trained_heads.target import fit

    fit(load_head(head), read_header_of(model))


def find_head(model: Path, cache_dir: Path | None) -> FoundHead | None:
    """Return the draft head for a model's file or exported folder; None where there is none.

    A file among the candidates that is damaged, or no head, is passed over: nobody asked for it.

    Args:
        model: The model's GGUF, the first part of a split one, or the folder of an export.
        cache_dir: The cache's root; None for no cache.

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: The model's own file can't be read.
    """
    for path in beside(model):
        if path.is_file() or path.is_dir():
            return FoundHead(path, beside=True)
    candidates = [(path, target) for folder in _folders(cache_dir) for path, target in heads_in(folder)]
    if not candidates:
        return None
    from edgedec.trained_heads.target import target_of

    gguf = read_header_of(model)
    named = target_of(gguf, cache_dir)
    for wanted in ("weights_hash", "norms_hash"):
        for path, target in candidates:
            if getattr(named, wanted) and getattr(target, wanted) == getattr(named, wanted):
                return FoundHead(path, beside=False)
    return None


def beside(model: Path) -> tuple[Path, Path]:
    """Return the places beside a model where its head may lie: a file and a folder.

    >>> [path.name for path in beside(Path("big-Q4_K_M-00001-of-00003.gguf"))]
    ['big-Q4_K_M.head.gguf', 'big-Q4_K_M.head']
    """
    stem = _PART.sub("", model.name.removesuffix(".gguf"))
    return model.with_name(f"{stem}.head.gguf"), model.with_name(f"{stem}.head")


def heads_in(folder: Path) -> Iterator[tuple[Path, Target]]:
    """Yield the heads of a folder that name their target, sorted by name: GGUFs, and folders with a record.

    Nothing is yielded for a folder that does not exist.
    """
    try:
        places = sorted(folder.iterdir())
    except OSError:
        return
    for place in places:
        head = _noted(place) if place.suffix == _NOTE else place
        target = None if head is None else _target(head)
        if head is not None and target is not None:
            yield head, target


def remember_head(head: Path, cache_dir: Path) -> None:
    """Note where a head lies, so that it is found for its model wherever the model is.

    Args:
        head: The GGUF, or the folder of a checkpoint, whose record names its target.
        cache_dir: The cache's root.

    Raises:
        StorageError: The note can't be written.
    """
    path, note = head.absolute(), _note(head, cache_dir)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, os.fsencode(path))
    except OSError as error:
        raise StorageError(
            f"{note}: it can't be written ({error.strerror or error}); check the cache's disk"
        ) from error


def remember_if_head(path: Path, cache_dir: Path) -> None:
    """Note where a file of the cache lies, as `remember_head` does, where it is that of a head that names its target.

    Args:
        path: A GGUF, or a checkpoint's config.json.
        cache_dir: The cache's root.

    Raises:
        StorageError: The note can't be written.
    """
    head = path if path.suffix == ".gguf" else path.parent
    if _target(head) is not None:
        remember_head(head, cache_dir)


def forget_head(path: Path, cache_dir: Path) -> None:
    """Remove the note of a head, which `remember_if_head` made for the same path; nothing happens where there is none.

    Raises:
        StorageError: The note can't be removed.
    """
    note = _note(path if path.suffix == ".gguf" else path.parent, cache_dir)
    try:
        note.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{note}: it can't be removed ({error.strerror or error}); remove it yourself") from error


def _note(head: Path, cache_dir: Path) -> Path:
    return cache_dir / HEADS / f"{hashlib.sha256(os.fsencode(head.absolute())).hexdigest()[:16]}{_NOTE}"


def _noted(note: Path) -> Path | None:
    """Return the path that a note holds; None where it can't be read."""
    try:
        with note.open("rb") as file:
            return Path(os.fsdecode(file.read(_MOST_NOTE_BYTES)))
    except (OSError, ValueError):
        return None


def _target(place: Path) -> Target | None:
    """Return what a head says of its target; None for what is no head, is damaged, or says nothing."""
    try:
        if place.is_dir():
            return read_record(place).target if (place / RECORD_FILE).is_file() else None
        if place.suffix != ".gguf":
            return None
        return _gguf_target(read_gguf(place))
    except EdgedecError:
        return None


def _gguf_target(gguf: GGUF) -> Target | None:
    record = get_text(gguf, RECORD_KEY)
    return None if record is None or not is_head(gguf) else parse_record(record, gguf.paths[0]).target


def _folders(cache_dir: Path | None) -> Iterator[Path]:
    if cache_dir is not None:
        yield cache_dir / HEADS
    for plugin in plugins.plugins(plugins.HEAD_FOLDERS).values():
        folder: Any = None
        with suppress(Exception):  # one plug-in's fault must not keep a model from loading
            folder = plugin.load()()
        if isinstance(folder, Path):
            yield folder

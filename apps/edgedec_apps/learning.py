"""A user's files for the drafter `learned`: which are read, their tokens, their room, and the file that keeps them.

Suffixes are sorted by prefix doubling (Manber and Myers 1993, "Suffix arrays: a new method for on-line string
searches").
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.drafter import SortedText
from edgedec.drafters.suffix.learned_file import (
    BYTES_A_TOKEN,
    MAGIC,
    START,
    SUFFIX,
    Learned,
    LearnedSource,
    learned_path,
    read_learned,
)
from edgedec.drafters.suffix.store_file import vocabulary_hash
from edgedec.errors import RequestError, StorageError
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.storage.whole_file import write_atomically
from edgedec.tokenizer import Tokenizer

MOST_BYTES = 16_000_000
"""Bytes that what was learned for one vocabulary may take, where the user says nothing else: two million tokens."""
_LARGEST_FILE = 1 << 20
_NOT_ENTERED = {"__pycache__", "node_modules"}


@dataclass(frozen=True, slots=True)
class LearnReport:
    """What came of learning files.

    Attributes:
        learned: All that is known for the vocabulary now.
        n_files: Files that were read in this run.
        n_tokens: Their tokens.
        n_unread: Files that were left out: no text in UTF-8, larger than 1 MiB, or not readable.
        n_without_room: Files that were left out as the cap was reached.
        n_dropped: Files learned before that had to go for the new ones.
    """

    learned: Learned
    n_files: int
    n_tokens: int
    n_unread: int
    n_without_room: int
    n_dropped: int


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files that paths name, and those in folders, in the order of their names; absolute, each once.

    Hidden files and folders, links and folders of caches inside a folder are left out.

    Raises:
        RequestError: There is no such file or folder.
    """
    files: dict[Path, None] = {}
    for root in paths:
        path = Path(os.path.abspath(root))
        if not path.exists():
            raise RequestError(f"there is no file or folder {root}; name one that can be read")
        files.update(dict.fromkeys([path] if path.is_file() else _below(path)))
    return list(files)


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_ENTERED)
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def read_text_file(path: Path) -> str | None:
    """Return a file's text; None for one that is large, is no UTF-8, holds zero bytes, or can't be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        return None if len(data) > _LARGEST_FILE or b"\0" in data else data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def learn_files(
    root: Path,
    model: str,
    tokenizer: Tokenizer,
    paths: Sequence[Path],
    *,
    most_bytes: int = MOST_BYTES,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> LearnReport:
    """Add files to what was learned for a model's vocabulary; a file learned before is read anew.

    Where they don't all fit, files learned before are dropped, the oldest first; then the last of the new ones.

    Args:
        root: The cache folder.
        model: The model's name, for `edgedec learn --list`.
        paths: Files, and folders whose files are read.
        most_bytes: Most bytes of tokens and their order for the vocabulary.
        on_progress: Told of each file.
        cancel: Stops the work; what was learned before stays as it is.

    Raises:
        RequestError: There is no such file, or none of the files is a text.
        StorageError: The file of what was learned can't be read or written.
        CancelledError: `cancel` was cancelled.
    """
    path = learned_path(root, vocabulary_hash(tokenizer))
    learned = read_learned(path, tokenizer.n_vocab)
    before = Learned(path, (), ()) if learned is None else learned[0]
    files, new, n_left = files_of(paths), [], most_bytes // BYTES_A_TOKEN
    n_unread = n_without_room = 0
    for i, file in enumerate(files):
        check_cancelled(cancel, "learning files")
        report_progress(on_progress, "learning", i, len(files), "files", file.name)
        text = read_text_file(file)
        if not text:
            n_unread += 1
            continue
        tokens = np.array(tokenizer.encode(text, add_special=False), np.int32)
        if len(tokens) + 1 > n_left:
            n_without_room += 1
            continue
        n_left -= len(tokens) + 1
        new.append(LearnedSource(os.fspath(file), tokens))
    report_progress(on_progress, "learning", len(files), len(files), "files")
    if not new:
        raise RequestError(
            f"none of the {len(files)} files can be learned: {n_unread} are no text in UTF-8 of at most 1 MiB, and "
            f"{n_without_room} are larger than {most_bytes} bytes allow; name other files, or allow more"
        )
    merged = with_sources(before, model, new)
    n_before = len(merged.sources)
    while merged.n_bytes > most_bytes:
        merged = Learned(merged.file, merged.models, merged.sources[1:])
    write_learned(merged, cancel)
    n_tokens = sum(len(source.tokens) for source in new)
    return LearnReport(merged, len(new), n_tokens, n_unread, n_without_room, n_before - len(merged.sources))


def all_learned(root: Path) -> Iterator[Learned | StorageError]:
    """Yield what was learned for each vocabulary, or why its file can't be read."""
    for path in list_learned(root):
        try:
            learned = read_learned(path)
        except StorageError as error:
            yield error
            continue
        if learned is not None:
            yield learned[0]


def forget_files(root: Path, paths: Iterable[Path] | None) -> int:
    """Forget files of every vocabulary, or all of them for None; return how many were forgotten.

    A file of what was learned that can't be read is deleted where everything is forgotten.

    Raises:
        StorageError: A file of what was learned can't be written, deleted or, with paths, read.
    """
    n_forgotten = 0
    for file in list_learned(root):
        try:
            learned = read_learned(file)
        except StorageError:
            if paths is not None:
                raise
            learned = None
        current = Learned(file, (), ()) if learned is None else learned[0]
        remaining = Learned(file, (), ()) if paths is None else current
        for path in paths or ():
            remaining = without_below(remaining, Path(os.path.abspath(path)))
        n_forgotten += len(current.sources) - len(remaining.sources)
        if paths is None or len(remaining.sources) != len(current.sources):
            write_learned(remaining)
    return n_forgotten


_SORTED = 64  # tokens from a place on by which places are sorted


def sort_text(tokens: NDArray[np.int32], cancel: CancelToken | None = None) -> SortedText:
    """Return a text with the order of its suffixes; the time grows as n log n.

    Args:
        tokens: int32[n], the text, in which -1 ends each file.
        cancel: Stops the sorting.

    Raises:
        CancelledError: The token was cancelled.
    """
    n = len(tokens)
    rank = tokens.astype(np.int64) + 1
    order, width = np.argsort(rank, kind="stable"), 1
    while width < _SORTED and n:
        check_cancelled(cancel, "sorting what was learned")
        behind = np.zeros(n, np.int64)
        behind[: n - width] = rank[width:] + 1
        key = rank * (max(n, int(rank.max())) + 2) + behind
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank = np.empty(n, np.int64)
        rank[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
        width *= 2
        if rank[order[-1]] == n - 1:
            break
    return SortedText(np.ascontiguousarray(tokens, np.int32), order.astype(np.int32))


def write_learned(learned: Learned, cancel: CancelToken | None = None) -> None:
    """Sort what was learned and write its file, whole or not at all; without sources the file is deleted.

    Raises:
        StorageError: The file can't be written.
        CancelledError: The token was cancelled.
    """
    path = learned.file
    try:
        if not learned.sources:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        end = np.array([-1], np.int32)
        tokens = np.concatenate([part for source in learned.sources for part in (source.tokens, end)])
        text = sort_text(tokens.astype(np.int32), cancel)
        header = json.dumps(
            {"models": learned.models, "files": [[source.path, len(source.tokens)] for source in learned.sources]}
        ).encode()
        header += b" " * (-(START + len(header)) % 8)
        body = [struct.pack("<Q", len(header)), header, text.tokens.astype("<i4").tobytes()]
        body.append(text.order.astype("<i4").tobytes())
        digest = hashlib.sha256(b"".join(body)).digest()
        write_atomically(path, MAGIC, digest, *body, private=True)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror or error}") from error


def list_learned(root: Path) -> list[Path]:
    """Return the files of what was learned below a cache folder."""
    folder = root / "learned"
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []


def with_sources(learned: Learned, model: str, new: Sequence[LearnedSource]) -> Learned:
    """Return what is known with these files added; a file that was learned before is replaced."""
    names = {source.path for source in new}
    sources = tuple(source for source in learned.sources if source.path not in names)
    models = learned.models if model in learned.models else (*learned.models, model)
    return Learned(learned.file, models, (*sources, *(source for source in new if len(source.tokens))))


def without_below(learned: Learned, path: Path) -> Learned:
    """Return what is known without the file at a path, or without the files below it."""
    sources = tuple(
        source for source in learned.sources if path != Path(source.path) and path not in Path(source.path).parents
    )
    return Learned(learned.file, learned.models, sources)

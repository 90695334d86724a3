"""Writing the file of what `edgedec learn` has read, in the layout of edgedec.drafters.suffix.learned_file.

Suffixes are sorted by prefix doubling (Manber and Myers 1993, "Suffix arrays: a new method for on-line string
searches").
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.drafter import SortedText
from edgedec.drafters.suffix.learned_file import MAGIC, START, SUFFIX, Learned, LearnedSource
from edgedec.errors import StorageError
from edgedec.progress import CancelToken
from edgedec.storage.whole_file import write_atomically

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
        if cancel is not None:
            cancel.check("sorting what was learned")
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
    kept = tuple(source for source in learned.sources if source.path not in names)
    models = learned.models if model in learned.models else (*learned.models, model)
    return Learned(learned.file, models, (*kept, *(source for source in new if len(source.tokens))))


def without_below(learned: Learned, path: Path) -> Learned:
    """Return what is known without the file at a path, or without the files below it."""
    kept = tuple(
        source for source in learned.sources if path != Path(source.path) and path not in Path(source.path).parents
    )
    return Learned(learned.file, learned.models, kept)

"""The file of what `edgedec learn` has read: a user's files in a vocabulary's tokens, sorted for drafting.

Layout: magic; SHA-256 of all that follows; the length of a header (u64, little endian); the header, JSON, padded to a
multiple of eight; the tokens (i32), then the order of the suffixes (i32). The header names the models that were given
with `--for`, and each file with its number of tokens; the vocabulary's hash is the file's name. The SHA-256 guards
against damage, not against a forger: whatever a file holds can only waste drafts. Only its owner may read it (0600).
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.drafter import SortedText
from edgedec.errors import StorageError
from edgedec.progress import CancelToken
from edgedec.storage.whole_file import write_atomically

BYTES_A_TOKEN = 8
_MAGIC = b"edgedec learned files 1\n"
_HASH_BYTES = 32
_START = len(_MAGIC) + _HASH_BYTES + 8
_SUFFIX = ".learned"
_MOST_HEADER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class LearnedSource:
    """A file that was learned.

    Attributes:
        path: Its path when it was learned.
        tokens: int32[n], its tokens.
    """

    path: str
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned for one vocabulary.

    Attributes:
        file: The file that holds it.
        models: The models that were named when it was learned.
        sources: The files that were read, in the order in which they were learned.
    """

    file: Path
    models: tuple[str, ...]
    sources: tuple[LearnedSource, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tokens and of their order."""
        return BYTES_A_TOKEN * sum(len(source.tokens) + 1 for source in self.sources)


def learned_path(root: Path, vocabulary: bytes) -> Path:
    """Return the path of the file for a vocabulary, given its hash (store_file.vocabulary_hash), below the cache."""
    return root / "learned" / f"{vocabulary.hex()[:32]}{_SUFFIX}"


def largest_learned(root: Path) -> int:
    """Return the bytes of the largest file of learned files below the cache; 0 where there is none."""
    try:
        return max((file.stat().st_size for file in (root / "learned").glob(f"*{_SUFFIX}")), default=0)
    except OSError:  # a file that went meanwhile, or may not be looked at
        return 0


def write_learned(learned: Learned, cancel: CancelToken | None = None) -> None:
    """Sort what was learned and write its file, whole or not at all; without sources the file is deleted.

    Raises:
        StorageError: The file can't be written.
        CancelledError: The token was cancelled.
    """
    from edgedec.drafters.suffix.sorted_match import sort_text

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
        header += b" " * (-(_START + len(header)) % 8)
        body = [struct.pack("<Q", len(header)), header, text.tokens.astype("<i4").tobytes()]
        body.append(text.order.astype("<i4").tobytes())
        digest = hashlib.sha256(b"".join(body)).digest()
        write_atomically(path, _MAGIC, digest, *body, private=True)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror or error}") from error


def read_learned(path: Path, n_vocab: int | None = None) -> tuple[Learned, SortedText] | None:
    """Return what a file holds, its arrays mapped; None where there is no file.

    Args:
        path: The file.
        n_vocab: Tokens of the model's vocabulary, above which no token may be; None to leave that open.

    Raises:
        StorageError: The file can't be read, is damaged, or is no file of this kind.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise StorageError(f"what was learned can't be read from {path} ({error}); learn the files again") from error
    found = _parse(data, path, n_vocab)
    if found is None:
        raise StorageError(f"{path} is damaged, or of another release; delete it, and learn the files again")
    return found


def _parse(data: NDArray[np.uint8], path: Path, n_vocab: int | None) -> tuple[Learned, SortedText] | None:
    """Return what the bytes hold, None where they contradict themselves."""
    if len(data) < _START or bytes(data[: len(_MAGIC)]) != _MAGIC:
        return None
    if (
        bytes(data[len(_MAGIC) : len(_MAGIC) + _HASH_BYTES])
        != hashlib.sha256(data[len(_MAGIC) + _HASH_BYTES :].data).digest()
    ):
        return None
    n_header = int.from_bytes(bytes(data[_START - 8 : _START]), "little")
    n_left = len(data) - _START - n_header
    if n_header > _MOST_HEADER_BYTES or n_left < 0 or n_left % BYTES_A_TOKEN or (_START + n_header) % 8:
        return None
    header = _header(bytes(data[_START : _START + n_header]))
    n = n_left // BYTES_A_TOKEN
    if header is None or sum(length + 1 for _, length in header[1]) != n or n == 0:
        return None
    arrays = data[_START + n_header :].view("<i4")
    tokens, order = arrays[:n], arrays[n:]
    ends = np.cumsum([length + 1 for _, length in header[1]]) - 1
    most = np.iinfo(np.int32).max if n_vocab is None else n_vocab - 1
    if tokens.min() < -1 or tokens.max() > most or order.min() < 0 or order.max() >= n:
        return None
    if not np.array_equal(np.flatnonzero(tokens == -1), ends):
        return None
    starts = [0, *(ends[:-1] + 1).tolist()]
    sources = tuple(
        LearnedSource(name, tokens[start : start + length])
        for start, (name, length) in zip(starts, header[1], strict=True)
    )
    return Learned(path, header[0], sources), SortedText(tokens, order)


def _header(data: bytes) -> tuple[tuple[str, ...], list[tuple[str, int]]] | None:
    try:
        found = json.loads(data)
        models, files = found["models"], found["files"]
        if not all(isinstance(name, str) for name in models):
            return None
        if not all(isinstance(name, str) and type(n) is int and n >= 0 for name, n in files):
            return None
        return tuple(models), [(name, n) for name, n in files]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def list_learned(root: Path) -> list[Path]:
    """Return the files of what was learned below a cache folder."""
    folder = root / "learned"
    return sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []


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

"""Reading the file of what `edgedec learn` has read: a user's files in a vocabulary's tokens, sorted for drafting.

Layout: magic; SHA-256 of all that follows; the length of a header (u64, little endian); the header, JSON, padded to a
multiple of eight; the tokens (i32), then the order of the suffixes (i32). The header names the models that were given
with `--for`, and each file with its number of tokens; the vocabulary's hash is the file's name. The SHA-256 guards
against damage, not against a forger: whatever a file holds can only waste drafts. Only its owner may read it (0600).
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.drafter import SortedText
from edgedec.errors import StorageError

BYTES_A_TOKEN = 8
MAGIC = b"edgedec learned files 1\n"
_HASH_BYTES = 32
START = len(MAGIC) + _HASH_BYTES + 8
SUFFIX = ".learned"
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
    return root / "learned" / f"{vocabulary.hex()[:32]}{SUFFIX}"


def largest_learned(root: Path) -> int:
    """Return the bytes of the largest file of learned files below the cache; 0 where there is none."""
    try:
        return max((file.stat().st_size for file in (root / "learned").glob(f"*{SUFFIX}")), default=0)
    except OSError:  # a file that went meanwhile, or may not be looked at
        return 0


def read_learned(path: Path, n_vocab: int | None = None) -> tuple[Learned, SortedText] | None:
    """Return what a file holds, its arrays mapped; None where there is no file.

    Args:
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
    learned = _parse(data, path, n_vocab)
    if learned is None:
        raise StorageError(f"{path} is damaged, or of another release; delete it, and learn the files again")
    return learned


def _parse(data: NDArray[np.uint8], path: Path, n_vocab: int | None) -> tuple[Learned, SortedText] | None:
    """Return what the bytes hold, None where they contradict themselves."""
    if len(data) < START or bytes(data[: len(MAGIC)]) != MAGIC:
        return None
    if (
        bytes(data[len(MAGIC) : len(MAGIC) + _HASH_BYTES])
        != hashlib.sha256(data[len(MAGIC) + _HASH_BYTES :].data).digest()
    ):
        return None
    n_header = int.from_bytes(bytes(data[START - 8 : START]), "little")
    n_left = len(data) - START - n_header
    if n_header > _MOST_HEADER_BYTES or n_left < 0 or n_left % BYTES_A_TOKEN or (START + n_header) % 8:
        return None
    header = _header(bytes(data[START : START + n_header]))
    n = n_left // BYTES_A_TOKEN
    if header is None or sum(length + 1 for _, length in header[1]) != n or n == 0:
        return None
    arrays = data[START + n_header :].view("<i4")
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
        header = json.loads(data)
        models, files = header["models"], header["files"]
        if not all(isinstance(name, str) for name in models):
            return None
        if not all(isinstance(name, str) and type(n) is int and n >= 0 for name, n in files):
            return None
        return tuple(models), [(name, n) for name, n in files]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

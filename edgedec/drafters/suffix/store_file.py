"""The draft store: a file of the suffix drafter's earlier outputs, so that the next start knows them.

Layout, little endian: magic; SHA-256 of all that follows; hash of the vocabulary (32 bytes); number of texts (u32);
tokens of each text (u32); the token ids (i32), one text after the other. The SHA-256 guards against damage, not against
a forger: whatever a file holds can only waste drafts, never change the text. The file holds what the model answered, so
only its owner may read it.
"""

import hashlib
import os
import tempfile
from array import array
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.drafter import Store
from edgedec.drafters.suffix.automaton import STATE_BYTES
from edgedec.drafters.suffix.suffix import MOST_TOKENS, SuffixStore, Text
from edgedec.errors import ModelFormatError, StorageError, argument, as_storage_error
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.progress import reported
from edgedec.storage.whole_file import write_atomically
from edgedec.tokenizer import Tokenizer

_KIND = b"edgedec draft store "
_MAGIC = _KIND + b"1\n"
_HASH_BYTES = 32
_SAMPLED = 4096  # tokens of a vocabulary that are hashed: all of them would take half a second
_MOST_BYTES = len(_MAGIC) + 2 * _HASH_BYTES + 4 + 8 * MOST_TOKENS  # of a file in which each text is a single token


class DraftStore:
    """The file of a loaded model's suffix drafter.

    Args:
        path: The file; it need not exist yet.
        model: The model whose outputs it holds.
        variant: Which layers the model leaves out; models with other layers share no file, though they have one
            vocabulary.
    """

    def __init__(self, path: Path, model: Model, variant: str = "") -> None:
        self.path = path
        self._vocabulary = vocabulary_hash(model.tokenizer, variant)
        self._n_vocab = model.card.n_vocab
        self._forgotten = False

    def fill(self, store: Store, options: LoadOptions) -> str | None:
        """Teach the suffix drafter the newest texts of the file that its budget has room for.

        Returns a note for a person where the file is damaged, else None: a damaged file is begun anew, as nothing
        depends on it.

        Raises:
            ModelFormatError: The file is of another vocabulary or release.
            StorageError: The file can't be read.
            CancelledError: The options' cancel token was cancelled.
        """
        data = _read(self.path)
        texts = parse(data, self._vocabulary, self._n_vocab, self.path)
        limit = store.most_bytes
        learned = store["suffix"] = SuffixStore()
        for text in reported(
            newest(texts or [], limit // STATE_BYTES), "the draft store", options.on_progress, options.cancel
        ):
            learned.begin(limit)
            for token in text:
                learned.young.add(token)
        return f"the draft store {self.path} is damaged; it is begun anew" if texts is None else None

    def save(self, store: MutableMapping[str, Any]) -> None:
        """Add the texts of the requests since the last save to the file, which is replaced whole or not at all.

        The texts that other processes have added stay, except those that one adds in the same moment. A save that
        failed is not repeated.

        Raises:
            ModelFormatError: Meanwhile the file is of another vocabulary or release.
            StorageError: The file can't be read or written.
        """
        learned = store.get("suffix")
        added = learned.take_outputs() if isinstance(learned, SuffixStore) else []
        forgotten, self._forgotten = self._forgotten, False
        if not added and not forgotten:
            return
        held = parse(_read(self.path), self._vocabulary, self._n_vocab, self.path) or []
        texts = {text.tobytes(): text for text in reversed([*([] if forgotten else held), *added])}  # each once
        newest_texts = newest(list(reversed(texts.values())), MOST_TOKENS)
        with as_storage_error(f"the draft store {self.path} could not be written"):
            # Whole or not at all, and for its owner alone.
            write_atomically(self.path, serialize(newest_texts, self._vocabulary), private=True, sync=True)

    def forget(self) -> None:
        """Drop the texts that the file holds when it is saved next."""
        self._forgotten = True


def vocabulary_hash(tokenizer: Tokenizer, variant: str = "") -> bytes:
    """Return the SHA-256 of a vocabulary's size, of a variant's name, and of up to 4,096 of the vocabulary's tokens."""
    n_vocab = tokenizer.n_vocab
    digest = hashlib.sha256(f"{n_vocab}{variant}".encode())
    for token_id in range(0, n_vocab, max(1, n_vocab // _SAMPLED)):
        piece = tokenizer.piece(token_id)
        digest.update(b"%d:%b" % (len(piece), piece))
    return digest.digest()


def newest(texts: Sequence[Text], n_tokens: int) -> list[Text]:
    """Return the last texts that together have at most `n_tokens` tokens; a longer last text loses its beginning.

    >>> [text.tolist() for text in newest([array("i", [1, 2]), array("i", [3]), array("i", [4, 5])], 3)]
    [[3], [4, 5]]
    """
    chosen: list[Text] = []
    for text in reversed(texts):
        if not chosen and len(text) > n_tokens > 0:
            text = text[-n_tokens:]
        n_tokens -= len(text)
        if n_tokens < 0:
            break
        chosen.append(text)
    return chosen[::-1]


def serialize(texts: Sequence[Text], vocabulary: bytes) -> bytes:
    """Return the bytes of a draft store that holds these texts."""
    lengths = np.array([len(texts), *map(len, texts)], "<u4").tobytes()
    body = vocabulary + lengths + b"".join(np.asarray(text, "<i4").tobytes() for text in texts)
    return _MAGIC + hashlib.sha256(body).digest() + body


def parse(data: bytes, vocabulary: bytes, n_vocab: int, path: Path) -> list[Text] | None:
    """Return the texts of a draft store's bytes, oldest first; None for a damaged one.

    Args:
        data: The bytes; none where there is no file yet.
        vocabulary: The hash of the model's vocabulary.
        n_vocab: Tokens of the model's vocabulary.
        path: What errors call the file.

    Raises:
        ModelFormatError: The store is of another vocabulary or release.
        StorageError: The bytes are no draft store.
    """
    if not data:
        return []
    start = len(_MAGIC) + _HASH_BYTES
    if not data.startswith(_KIND):
        raise StorageError(f"{path} exists and is no draft store; name another file")
    if not data.startswith(_MAGIC[: len(data)]):
        raise ModelFormatError(f"{path} is a draft store of another edgedec release; name another file")
    body = data[start:]
    if data[len(_MAGIC) : start] != hashlib.sha256(body).digest():
        return None
    if not body.startswith(vocabulary):
        raise ModelFormatError(
            f"the draft store {path} holds texts of other layers ({argument('layer_skip')}), or was made with a "
            "model of another vocabulary; name another file, one for each"
        )
    return _texts(body[_HASH_BYTES:], n_vocab)


def _texts(data: bytes, n_vocab: int) -> list[Text] | None:
    """Return the texts behind the hashes, None where the counts contradict each other or an id is no token."""
    if len(data) < 4 or len(data) % 4:
        return None
    n_texts = int.from_bytes(data[:4], "little")
    if n_texts > len(data) // 8:  # each has a length and at least one token
        return None
    lengths = np.frombuffer(data, "<u4", n_texts, 4).astype(np.int64)
    tokens = np.frombuffer(data, "<i4", offset=4 + 4 * n_texts)
    if lengths.sum() != len(tokens) or not lengths.all():
        return None
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < n_vocab:
        return None
    return [array("i", part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])] if n_texts else []


def require_draft_store(path: Path) -> Path:
    """Return the real path of a draft store, so that a wrong one is refused before anything is loaded.

    Raises:
        StorageError: The path holds something other than a draft store, or nothing can be written there.
    """
    try:
        real_path = Path(os.path.realpath(path))  # a link stays one, and the working directory may change
        if real_path.exists() and not real_path.is_file():
            raise StorageError(f"{path} is no regular file; name another one for the draft store")
        if not real_path.parent.is_dir():
            raise StorageError(f"the draft store {path} can't be written: there is no directory {real_path.parent}")
        with tempfile.TemporaryFile(dir=real_path.parent):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"the draft store {path} can't be written there ({reason}); name another file") from error
    if _read(real_path, len(_KIND)) not in (_KIND, b""):
        raise StorageError(f"{path} exists and is no draft store; name another file")
    return real_path


def _read(path: Path, n_bytes: int = _MOST_BYTES + 1) -> bytes:
    """Return the first bytes of a file, none where there is no file."""
    try:
        with path.open("rb") as file:
            return file.read(n_bytes)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"the draft store {path} could not be read: {error.strerror or error}") from error

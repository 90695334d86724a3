"""A prompt cache file: the KV of a token prefix, to go on from in a later process.

Layout: magic, u32 version, u32 header length (little endian), JSON header {fingerprint, token_ids, n_exact,
n_payload_bytes, sha256 of the payload}, payload as the runtime's session saved it. The fingerprint names weights,
runtime release and options, as the payload fits nothing else.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import ModelFormatError, StorageError
from edgedec.storage.whole_file import write_atomically

_MAGIC = b"edgedec prompt cache\n"
_VERSION = 1
_LENGTHS = struct.Struct("<II")
_MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class PromptCache:
    """What a prompt cache file holds.

    Attributes:
        fingerprint: ModelCard.fingerprint of the model that made it.
        token_ids: The tokens whose KV it is.
        n_exact: How many of them a cold start would compute to the same bits.
        payload: What Session.save returned.
    """

    fingerprint: str
    token_ids: tuple[int, ...]
    n_exact: int
    payload: bytes


def write_prompt_cache(path: Path, cache: PromptCache) -> None:
    """Write the file, whole or not at all.

    Raises:
        StorageError: No space, no permission, or a file that is not ours stands there.
    """
    header = json.dumps(
        {
            "fingerprint": cache.fingerprint,
            "token_ids": cache.token_ids,
            "n_exact": cache.n_exact,
            "n_payload_bytes": len(cache.payload),
            "sha256": hashlib.sha256(cache.payload).hexdigest(),
        }
    ).encode()
    try:
        require_prompt_cache(path)
        write_atomically(path, _MAGIC + _LENGTHS.pack(_VERSION, len(header)) + header, cache.payload)
    except OSError as error:
        raise StorageError(f"the prompt cache {path} could not be written: {error.strerror or error}") from error


def read_prompt_cache(path: Path) -> PromptCache:
    """Read and check the file.

    Raises:
        ModelFormatError: It is no prompt cache, of another version, or damaged.
        StorageError: It can't be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"the prompt cache {path} could not be read: {error.strerror or error}") from error
    start = len(_MAGIC) + _LENGTHS.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise ModelFormatError(f"{path} is no prompt cache; name another file")
    version, n_header = _LENGTHS.unpack_from(data, len(_MAGIC))
    if version != _VERSION or n_header > min(_MAX_HEADER_BYTES, len(data) - start):
        raise ModelFormatError(f"{path} is a prompt cache of version {version}, expected {_VERSION}; delete it")
    payload = data[start + n_header :]
    try:
        header = json.loads(data[start : start + n_header])
        cache = PromptCache(
            str(header["fingerprint"]),
            tuple(int(token_id) for token_id in header["token_ids"]),
            int(header["n_exact"]),
            payload,
        )
        whole = header["n_payload_bytes"] == len(payload)
        sound = whole and header["sha256"] == hashlib.sha256(payload).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFormatError(f"the prompt cache {path} is damaged ({error}); delete it") from error
    if not sound or not 0 <= cache.n_exact <= len(cache.token_ids):
        raise ModelFormatError(f"the prompt cache {path} is damaged or cut short; delete it")
    return cache


def require_prompt_cache(path: Path) -> None:
    """Return if the path is free or a prompt cache stands there; nothing else is ever overwritten.

    Raises:
        StorageError: Something else stands there, or it can't be read.
    """
    try:
        if not path.parent.is_dir():
            raise StorageError(f"the prompt cache {path} can't be written: there is no directory {path.parent}")
        if not path.exists():
            return
        if not path.is_file():
            raise StorageError(f"{path} is no regular file; name another one for the prompt cache")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) not in (_MAGIC, b""):
                raise StorageError(f"{path} exists and is no prompt cache; name another file")
    except OSError as error:
        raise StorageError(f"the prompt cache {path} could not be read: {error.strerror or error}") from error

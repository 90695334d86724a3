"""A prompt cache file: the KV cache of a prompt, from which another process goes on.

Layout: magic, u32 version, u32 length of the header (little endian), JSON header {fingerprint, token_ids, n_exact,
scales of the adapters, n_payload_bytes, sha256 of the payload}, payload as Session.save returned it. The fingerprint
names the weights, the runtime's release and its options, as the payload fits no others.
"""

import hashlib
import json
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgedec.api.engine import Engine
from edgedec.callers import checks_arguments
from edgedec.decoding.session_pool import SessionSlot
from edgedec.errors import ModelFormatError, SessionError, StorageError, as_storage_error
from edgedec.storage.whole_file import write_atomically

_MAGIC = b"edgedec prompt cache\n"
_VERSION = 1
_LENGTHS = struct.Struct("<II")
_MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class PromptCache:
    """The contents of a prompt cache file.

    Attributes:
        fingerprint: ModelCard.fingerprint of the model whose KV cache it is.
        token_ids: The tokens in the KV cache.
        n_exact: How many of them, from the start, have the bits of a cold start.
        payload: What Session.save returned.
        scales: Session.scales, those of the adapters that the KV cache was made with; None where an earlier version
            wrote the file, always with those of the engine.
    """

    fingerprint: str
    token_ids: tuple[int, ...]
    n_exact: int
    payload: bytes
    scales: tuple[float, ...] | None = None


@checks_arguments
def save_prompt_cache(engine: Engine, path: str | os.PathLike[str]) -> None:
    """Write the KV cache of an engine's last request to a file, for load_prompt_cache in another process.

    Raises:
        StorageError: The file can't be written, or another file has its name.
        CapabilityError: The session can't be saved.
    """
    with engine.pool.all():
        write_prompt_cache(Path(path), cache_of(engine.pool.last))


@checks_arguments
def load_prompt_cache(engine: Engine, path: str | os.PathLike[str]) -> int:
    """Restore an engine's KV cache from a file of save_prompt_cache; return how many tokens it holds.

    Only requests with the adapters' scales of the file go on from it; others drop what it held.

    Raises:
        ModelFormatError: The file is damaged, or was made with another model, release or options.
        StorageError: The file can't be read.
    """
    path = Path(path)
    cache = read_prompt_cache(path, engine.card.fingerprint)
    scales = engine.lora if cache.scales is None else cache.scales
    if len(scales) != len(engine.card.adapters):
        raise ModelFormatError(f"the prompt cache {path} is damaged (scales of {len(scales)} adapters); delete it")
    with engine.pool.all():
        engine.pool.last.adapt(scales)
        restore_cache(engine.pool.last, cache)
    return len(cache.token_ids)


def cache_of(slot: SessionSlot) -> PromptCache:
    """Return what a session's KV cache holds; tokens that a draft or a failed step left at its end are dropped.

    Where nothing of it is known, as after an encoder read a text, there are no tokens, and the payload is empty.

    Raises:
        CapabilityError: The session can't be saved.
    """
    session, chunk = slot.session, slot.session.model.capabilities.prefill_chunk
    n = min(len(slot.cached_ids), session.n_cached)
    if n == 0:
        return PromptCache(session.model.card.fingerprint, (), 0, b"", session.scales)
    payload = None
    with suppress(SessionError):  # the session is branched
        if n == session.n_cached:
            payload = session.save()
    if payload is None:
        session.forward(np.array(slot.cached_ids[n - 1 : n], np.int32), n_past=n - 1)
        slot.n_exact = min(slot.n_exact, n if chunk == 1 else (n - 1) // chunk * chunk)
        payload = session.save()
    token_ids = tuple(slot.cached_ids[:n])
    return PromptCache(session.model.card.fingerprint, token_ids, min(slot.n_exact, n), payload, session.scales)


def restore_cache(slot: SessionSlot, cache: PromptCache) -> None:
    """Put what a file held into a session's KV cache (ModelFormatError where it doesn't fit)."""
    slot.cached_ids, slot.n_exact = [], 0
    if cache.token_ids:
        slot.session.load(cache.payload, len(cache.token_ids))
    slot.cached_ids, slot.n_exact = list(cache.token_ids), cache.n_exact


def write_prompt_cache(path: Path, cache: PromptCache) -> None:
    """Write a prompt cache file, whole or not at all.

    Raises:
        StorageError: The file can't be written, or a file that is no prompt cache has its name.
    """
    header = json.dumps(
        {
            "fingerprint": cache.fingerprint,
            "token_ids": cache.token_ids,
            "n_exact": cache.n_exact,
            "scales": cache.scales,
            "n_payload_bytes": len(cache.payload),
            "sha256": hashlib.sha256(cache.payload).hexdigest(),
        }
    ).encode()
    with as_storage_error(f"the prompt cache {path} could not be written"):
        require_prompt_cache(path)
        write_atomically(path, _MAGIC + _LENGTHS.pack(_VERSION, len(header)) + header, cache.payload, private=True)


def read_prompt_cache(path: Path, fingerprint: str) -> PromptCache:
    """Return what a prompt cache file holds, checked.

    Args:
        fingerprint: That of the model that will go on from it (ModelCard.fingerprint).

    Raises:
        ModelFormatError: The file is no prompt cache, of another version, damaged, or made with another model, runtime
            release or options.
        StorageError: The file can't be read.
    """
    with as_storage_error(f"the prompt cache {path} could not be read"):
        data = path.read_bytes()
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
            None if header.get("scales") is None else tuple(float(scale) for scale in header["scales"]),
        )
        whole = header["n_payload_bytes"] == len(payload)
        sound = whole and header["sha256"] == hashlib.sha256(payload).hexdigest()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFormatError(f"the prompt cache {path} is damaged ({error}); delete it") from error
    if not sound or not 0 <= cache.n_exact <= len(cache.token_ids):
        raise ModelFormatError(f"the prompt cache {path} is damaged or cut short; delete it")
    if cache.fingerprint != fingerprint:
        raise ModelFormatError(
            f"the prompt cache {path} was made with another model, runtime release or options; delete it"
        )
    return cache


def require_prompt_cache(path: Path) -> None:
    """Raise StorageError unless the path names no file, or a prompt cache; nothing else is overwritten."""
    with as_storage_error(f"the prompt cache {path} could not be read"):
        if not path.parent.is_dir():
            raise StorageError(f"the prompt cache {path} can't be written: there is no directory {path.parent}")
        if not path.exists():
            return
        if not path.is_file():
            raise StorageError(f"{path} is no regular file; name another one for the prompt cache")
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) not in (_MAGIC, b""):
                raise StorageError(f"{path} exists and is no prompt cache; name another file")

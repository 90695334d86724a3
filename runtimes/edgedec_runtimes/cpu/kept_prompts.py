"""Prompts on the disk: blocks of 256 tokens of a session's KV cache, which later sessions and processes begin with.

A block is addressed by what it holds: SHA-256 over the address of the block before it (of the model, its arithmetic, KV
type and adapters for the first one) and its tokens. So prompts that begin alike share blocks, and a block that is found
has the bits that reading would give. The last block of a prompt is shorter, of whole pages, unless a trained draft head
follows: so the next turn of a conversation reads what is new. Of a model with an encoder one block is all of the
source, as a part of it is of no use. ADDRESS.kv has keys and values, in the pages of the KV
cache. Where a model has recurrent states or short convolutions, ADDRESS.state has these behind a block: behind every
fourth one, and behind the last ones of a prompt. From there a text can go on. ADDRESS.head-MARK has what a trained
draft head knows of a block. Its last token's part also depends on the token behind: behind another one, the head may
draft otherwise.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import EdgedecError, counted
from edgedec_runtimes.cpu.draft_head.state import CpuDraftHeadState
from edgedec_runtimes.cpu.kv_types import PAGE_TOKENS
from edgedec_runtimes.cpu.library import address, check, native
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.cpu.state_memory import BLOCK_TOKENS, PLACE_BYTES, QUEUED
from edgedec_runtimes.shared.block_files import FOLDER, BlockFiles, folder_name
from edgedec_runtimes.shared.session_state import CheckedItem

_STATE_BLOCKS = 4
_LEAST_GAIN = 64  # tokens
_MOST_VECTOR_BYTES = 1 << 30  # of pictures, in a file of states


@dataclass(slots=True)
class _Reading:
    """A prompt that a session reads.

    Attributes:
        ids: int64, its tokens; negative ones are rows of pictures, by what they show.
        names: The addresses of its blocks.
        bounds: Where they begin and end: the first at 0, each of the others where the one before it ends.
        begun_s: When it began.
        n_kept: How many of the first blocks are on the disk, or on their way.
        n_loaded: How many of its tokens came from the disk.
        head: The kind of the files of the draft head that follows the session; empty for none.
        n_of_head: As n_kept, of these files.
    """

    ids: NDArray[np.int64]
    names: list[str]
    bounds: list[int]
    begun_s: float
    n_kept: int = 0
    n_loaded: int = 0
    head: str = ""
    n_of_head: int = 0

    def wants_state(self, n_tokens: int) -> bool:
        """Return whether states are kept behind the first tokens."""
        n = bisect_left(self.bounds, n_tokens)
        is_end = 0 < n < len(self.bounds) and self.bounds[n] == n_tokens
        return is_end and (n % _STATE_BLOCKS == 0 or n >= len(self.ids) // BLOCK_TOKENS)

    def may_end(self, end: int) -> bool:
        """Return whether a text may go on behind some tokens: it has a token there, and no picture on both sides."""
        return end < len(self.ids) and (self.ids[end - 1] >= 0 or self.ids[end] >= 0)

    def is_read_by(self, item: CheckedItem, begin: int, end: int) -> bool:
        """Return whether rows of an item are those of the prompt at their places."""
        ids = self.ids[item.n_past + begin : item.n_past + end]
        parts = [
            np.full(end - begin, -1, np.int32) if group.tokens is None else group.tokens[begin:end]
            for group, begin, end in item.parts(begin, begin + len(ids))
        ]
        return np.array_equal(np.maximum(ids, -1), np.concatenate([*parts, np.empty(0, np.int32)]))


def addresses(first: bytes, ids: NDArray[np.int64], bounds: Sequence[int]) -> list[str]:
    """Return the addresses of the blocks of a text; `first` is what its bits depend on beside its tokens."""
    names = [sha256(first).hexdigest()]
    for begin, end in pairwise(bounds):
        names.append(_next_address(names[-1], ids[begin:end]))
    return names[1:]


def _next_address(previous: str, ids: NDArray[np.int64]) -> str:
    """Return the address of a block with these tokens behind another block."""
    return sha256(bytes.fromhex(previous) + ids.astype("<i8").tobytes()).hexdigest()


def kept_in(cache: Path, model: str, most_bytes: int, fingerprint: str, *, has_places: bool) -> "KeptPrompts":
    """Return what keeps the prompts of a model in edgedec's cache, with those of others at most so many bytes."""
    root, name = cache / FOLDER, folder_name(model, fingerprint)
    folder = next(root.glob(f"*{name[-9:]}"), root / name)  # an earlier version named it after what the file says
    files = BlockFiles(folder, most_bytes, sum_of, n_queued=QUEUED)
    return KeptPrompts(files, has_places=has_places)


def sum_of(data: NDArray[np.uint8]) -> int:
    """Return a checksum of 64 bits, at the speed of the memory."""
    return int(native().ec_sum(address(data), data.nbytes))


class KeptPrompts:
    """Brings the prompts that the sessions of a model read to the disk, and back."""

    def __init__(self, files: BlockFiles, *, has_places: bool) -> None:
        self.files = files
        self._readings: WeakKeyDictionary[CpuSession, _Reading] = WeakKeyDictionary()
        self._has_places = has_places

    def begin(self, session: CpuSession, token_ids: Sequence[int], n_held: int) -> int:
        """Begin to read a prompt whose first `n_held` tokens the session holds; return how many it holds then.

        Those that the disk has are loaded, but never the prompt's last token, nor a part of a picture.
        """
        self._readings.pop(session, None)
        ids, files = np.array(token_ids, np.int64), self.files
        bounds = session.block_bounds(token_ids)
        if len(bounds) < 2:
            return n_held
        with session.using():
            has_pages, has_state = _page_bytes(session) > 0, _state_bytes(session, BLOCK_TOKENS) > 0
            n_ready, head = native().ec_session_held_before(session.handle, n_held), _head(session)
        if head is not None and bounds[-1] % BLOCK_TOKENS:
            bounds.pop()
        reading = _Reading(ids, addresses(session.mark, ids, bounds), bounds, time.time())
        names = reading.names
        reading.head = "" if head is None else f"head-{head.head.mark.hex()[:16]}"
        missing = (i for i, name in enumerate(names) if has_pages and not files.has(f"{name}.kv"))
        n = reading.n_kept = next(missing, len(names))
        unknown = (i for i, name in enumerate(names) if reading.head and not files.has(f"{name}.{reading.head}"))
        reading.n_of_head = next(unknown, len(names))
        kinds = ["kv"] * has_pages + ["state"] * has_state
        blocks = self._held_blocks(reading, n, kinds)
        end = blocks[-1][1] if blocks else 0
        if end - n_ready >= _LEAST_GAIN:
            n_before, n_held = n_held, self._load(session, reading, n_held, blocks, has_state=has_state)
            reading.n_loaded = max(n_held - min(n_before, n_ready), 0)
            if n_held < end:  # a file was damaged, or is gone by now
                reading.n_kept = bisect_right(bounds, n_held) - 1
        kinds += filter(None, [reading.head])
        files.use([f"{name}.{kind}" for name, _ in blocks for kind in kinds], time.time())
        self._readings[session] = reading
        return n_held

    def _held_blocks(self, reading: _Reading, n: int, kinds: Sequence[str]) -> list[tuple[str, int]]:
        """Return the names and ends of the blocks to begin with: of the first n, and the end of an earlier prompt."""
        ids, blocks = reading.ids, [*zip(reading.names, reading.bounds[1:], strict=True)][:n]

        def is_held(name: str, end: int) -> bool:
            return reading.may_end(end) and all(self.files.has(f"{name}.{kind}") for kind in kinds)

        while blocks:
            name, begin = blocks[-1]
            for end in range(begin + BLOCK_TOKENS - PAGE_TOKENS, begin, -PAGE_TOKENS):
                if not reading.head and begin % BLOCK_TOKENS == 0 and end < len(ids):
                    last = _next_address(name, ids[begin:end])
                    if is_held(last, end):
                        return [*blocks, (last, end)]
            if is_held(name, begin):
                break
            blocks.pop()
        return blocks

    def described(self, session: CpuSession) -> list[str]:
        """Return sentences on the prompt that a session read last: what came from the disk, and what ails the files."""
        n = reading.n_loaded if (reading := self._readings.get(session)) is not None else 0
        notes = [f"{counted(n, 'token')} of the prompt came from the prompt cache on the disk"] if n else []
        return [*notes, *filter(None, [self.files.note])]

    def n_rows_at(self, item: CheckedItem, begin: int, most: int) -> int:
        """Return how many rows of an item, from one on, go into a forward: at most `most`, up to where states are kept.

        Call it with the model's lock held.
        """
        reading, n_tokens = self._readings.get(item.session), item.n_past + begin
        if reading is None or item.parents is not None:
            return most
        i = bisect_right(reading.bounds, n_tokens)
        n = reading.bounds[i] - n_tokens if i < len(reading.bounds) else most
        if n >= most or not reading.wants_state(n_tokens + n):
            return most
        block = item.groups[0].block
        is_mutual = block is not None and block.mutual
        return most if is_mutual or not _state_bytes(item.session, BLOCK_TOKENS) else n

    def note(self, item: CheckedItem, begin: int, end: int) -> None:
        """Let the blocks that a session has read be written, now that it has read more; as many as are taken.

        Call it with the model's lock held, when rows [begin, end) of an item are evaluated.
        """
        session: CpuSession = item.session
        reading = self._readings.get(session)
        if reading is None:
            return
        if item.n_past + begin < len(reading.ids):
            apart = item.parents is not None or item.positions is not None
            if apart or not reading.is_read_by(item, begin, end):
                del self._readings[session]  # it is another text
                return
        elif reading.n_kept == reading.n_of_head == len(reading.names):
            return
        with suppress(EdgedecError, MemoryError):  # the weights are damaged, which the next forward says
            self._write(session, reading)

    def _write(self, session: CpuSession, reading: _Reading) -> None:
        files, n_tokens, n_whole = self.files, session.n_cached, session.state.n_whole
        n_read = bisect_right(reading.bounds, n_whole) - 1
        n_spare = int(_state_bytes(session, n_tokens) > 0)  # blocks can wait; states are gone with the next forward
        while reading.n_kept < n_read and files.n_free > n_spare:
            name = f"{reading.names[reading.n_kept]}.kv"
            if _page_bytes(session) and not files.has(name):
                data = self._pages(session, reading.bounds[reading.n_kept], reading.bounds[reading.n_kept + 1])
                files.write(name, data, reading.begun_s - 0.001 * reading.n_kept)
            reading.n_kept += 1
        while reading.n_of_head < n_read and files.n_free > n_spare and (head := _head(session)) is not None:
            begin = reading.n_of_head * BLOCK_TOKENS
            of_head = head.saved_pages(begin, begin + BLOCK_TOKENS, _block_bytes(head))
            if of_head is None:
                break
            name = f"{reading.names[reading.n_of_head]}.{reading.head}"
            files.write(name, of_head, reading.begun_s - 0.001 * reading.n_of_head)
            reading.n_of_head += 1
        if n_whole == n_tokens and reading.wants_state(n_tokens) and n_spare:
            name = f"{reading.names[bisect_left(reading.bounds, n_tokens) - 1]}.state"
            if files.n_free and not files.has(name):
                files.write(name, _state(session, n_tokens), reading.begun_s - 0.001 * n_tokens // BLOCK_TOKENS)

    def _load(
        self, session: CpuSession, reading: _Reading, n_held: int, blocks: Sequence[tuple[str, int]], *, has_state: bool
    ) -> int:
        """Load blocks as far as the session lacks them; return how many tokens it holds then.

        Keys and values take effect block by block, other sessions' forwards between them; states only with all blocks.
        """
        names, bounds = [name for name, _ in blocks], [0, *(end for _, end in blocks)]
        n_blocks, n = len(blocks), bounds[-1]
        done = bisect_right(bounds, min(n_held, session.state.n_whole)) - 1
        begun, is_done = done, False
        with session.using() if has_state else nullcontext(), suppress(EdgedecError):  # closed, or no memory
            while done < n_blocks and self._load_block(session, names[done], bounds[done], bounds[done + 1]):
                done += 1
            is_done = done == n_blocks and (not has_state or self._load_state(session, names[-1], n))
        with suppress(EdgedecError), session.using():
            if not is_done and has_state:  # keys and values may be there, and states of another place
                session.state.restore(0, True)
                return 0
            if done == begun and not has_state:
                return n_held
            if has_state:
                session.state.restore(n, True, session.state.held_places(n))
            self._load_head(session, reading, done)
        return session.n_cached

    def _load_head(self, session: CpuSession, reading: _Reading, n_blocks: int) -> None:
        """Let the session's draft head know what the disk has of the first blocks; nothing unless it has all of them.

        Call it with the model's lock held. Of a text whose beginning the head does not know, nothing is kept.
        """
        if (head := _head(session)) is None:
            return
        head.reset()
        n_bytes, is_known = _block_bytes(head), n_blocks <= reading.n_of_head
        for i, name in enumerate(reading.names[:n_blocks] if is_known else ()):
            data = self.files.read(f"{name}.{reading.head}", n_bytes, n_bytes)
            if is_known := data is not None:
                head.take_pages(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS, data)
            else:
                head.reset()
                break
        if not is_known:
            reading.n_of_head = len(reading.names)

    def _load_block(self, session: CpuSession, name: str, begin: int, end: int) -> bool:
        """Load a block from its file, behind the blocks that the session holds; return whether that worked."""
        with session.using():
            n_pages, n_bytes = self._sizes(session, end - begin)
        data = np.empty(0, np.uint8) if n_pages == 0 else self.files.read(f"{name}.kv", n_bytes, n_bytes)
        if data is None:
            return False
        with session.using():
            code = native().ec_session_load_pages(session.handle, begin, _of_pages(end), address(data), n_pages)
            check(code, "loading a prompt")
            places = None
            if len(data) > n_pages:
                entries = np.frombuffer(data[n_pages:].tobytes(), np.int32).reshape(-1, 3)
                places = np.concatenate([session.state.held_places(begin), entries])
            session.state.restore(end, True, places)
        return True

    def _load_state(self, session: CpuSession, name: str, n_tokens: int) -> bool:
        """Load the states behind the first tokens, and what pictures were read as; return whether it did."""
        n_bytes = _state_bytes(session, n_tokens)
        data = self.files.read(f"{name}.state", n_bytes, n_bytes + _MOST_VECTOR_BYTES)
        if data is None:
            return False
        vectors, load = data[n_bytes:], native().ec_session_load_state
        if load(session.handle, n_tokens, address(data), n_bytes):
            return False
        return not native().ec_session_load_vectors(session.handle, n_tokens, address(vectors), len(vectors))

    def _pages(self, session: CpuSession, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the data of a block."""
        n_pages, n_bytes = self._sizes(session, end - begin)
        data = np.empty(n_bytes, np.uint8)
        code = native().ec_session_save_pages(session.handle, begin, _of_pages(end), address(data), n_pages)
        check(code, "keeping a prompt")
        if n_bytes > n_pages:
            places = np.ascontiguousarray(session.state.held_places(end)[begin:], np.int32)
            data[n_pages:] = places.reshape(-1).view(np.uint8)
        return data

    def _sizes(self, session: CpuSession, n_tokens: int) -> tuple[int, int]:
        """Return the bytes of the pages of a block of some tokens, and of all of the block."""
        n_pages = _page_bytes(session) * _of_pages(n_tokens) // PAGE_TOKENS
        return n_pages, n_pages + n_tokens * PLACE_BYTES * self._has_places


def _of_pages(n_tokens: int) -> int:
    """Return how many tokens the pages have room for that so many tokens take: a source may end within a page."""
    return -(-n_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _head(session: CpuSession) -> CpuDraftHeadState | None:
    """Return what a draft head knows of a session's text; None where none follows it. The caller holds the lock."""
    head = session.follower
    return head if isinstance(head, CpuDraftHeadState) and head.page_bytes() else None


def _block_bytes(head: CpuDraftHeadState) -> int:
    """Return the bytes of a block of what a draft head knows."""
    return head.page_bytes() * BLOCK_TOKENS // PAGE_TOKENS


def _page_bytes(session: CpuSession) -> int:
    """Return the bytes of a page of the KV cache; 0 where the model has no attention."""
    return int(native().ec_session_page_bytes(session.handle))


def _state_bytes(session: CpuSession, n_tokens: int) -> int:
    """Return the bytes of states and columns behind some tokens; 0 where the model has neither."""
    return int(native().ec_session_state_bytes(session.handle, n_tokens))


def _state(session: CpuSession, n_tokens: int) -> NDArray[np.uint8]:
    """Return the data of the states behind the first tokens."""
    n_bytes = _state_bytes(session, n_tokens)
    n_vectors = int(native().ec_session_vector_bytes(session.handle, n_tokens))
    data = np.empty(n_bytes + n_vectors, np.uint8)
    places = None if session.state.places is None else address(session.state.places)
    code = native().ec_session_save_state(session.handle, n_tokens, places, address(data), n_bytes)
    check(code, "keeping a prompt")
    vectors = data[n_bytes:]
    check(native().ec_session_save_vectors(session.handle, n_tokens, address(vectors), n_vectors), "keeping a prompt")
    return data

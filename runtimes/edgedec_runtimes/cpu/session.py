"""One sequence's KV cache on the cpu runtime."""

import ctypes
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import EdgedecError, ModelFormatError, RequestError, SessionError
from edgedec.logit_ops import LogitOps
from edgedec.sampling import SamplingParams
from edgedec.stats import DecodeStats
from edgedec_runtimes.cpu.adapters import set_scales
from edgedec_runtimes.cpu.draft_head.state import CpuDraftHeadState
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead
from edgedec_runtimes.cpu.expert_counts import described, expert_reads, touched_experts
from edgedec_runtimes.cpu.kv_types import PAGE_TOKENS
from edgedec_runtimes.cpu.library import Group, Item, address, check, last_error, native, new_handle
from edgedec_runtimes.cpu.native_tables import NUMBERS
from edgedec_runtimes.cpu.state_memory import BLOCK_TOKENS
from edgedec_runtimes.shared.library_model import LibraryModel, freed_with
from edgedec_runtimes.shared.own_session import OwnSession
from edgedec_runtimes.shared.session_state import CheckedItem

_LENGTH = struct.Struct("<Q")


class NativeRows:
    """Rows of a session as the native library takes them: made once, and filled anew for each native forward.

    Tokens, parents and row numbers are copied to buffers that stay where they are: to ask numpy for an address takes
    longer.

    Attributes:
        item: The description of the rows.
        pointer: To the description.
        logit_rows: Which of the item's wanted rows are among these rows.
        tapped: f32[n_taps, n_rows, n_embd], where the native library puts the output of tapped layers.
    """

    def __init__(self, session: ctypes.c_void_p, n_embd: int, n_rows: int) -> None:
        self._n_embd = n_embd
        self._tokens, self._wanted, self._parents = np.zeros((3, n_rows), np.int32)
        self._tokens_address = address(self._tokens)
        self._parents_address = address(self._parents)
        self._pointed_to: list[object] = []
        self._group = Group(tokens=self._tokens_address)
        self.item = Item(session=session, groups=ctypes.pointer(self._group), n_groups=1, wanted=address(self._wanted))
        self.pointer = ctypes.pointer(self.item)
        self.logit_rows = slice(0, 0)
        self.tapped = np.empty((0, 0, n_embd), np.float32)

    def fill(self, c: CheckedItem, begin: int, end: int, mass: NDArray[np.float32] | None = None) -> None:
        """Describe rows [begin, end) of an item, whose attention is added to `mass` where that is given."""
        item, n = self.item, end - begin
        mask, first = c.logit_rows, 0
        if n < c.n_rows:  # a part of a long chain
            first, last = bisect_left(mask, begin), bisect_left(mask, end)
            mask = mask[first:last] - begin
        n_wanted = len(mask)
        self._wanted[:n_wanted] = mask
        self.logit_rows = slice(first, first + n_wanted)
        item.n_past, item.n_rows, item.n_wanted = c.n_past + begin, n, n_wanted
        places = c.session.state.places
        item.places = None if places is None else address(places)
        item.parents = None
        if c.parents is not None:
            self._parents[:n] = c.parents
            item.parents = self._parents_address
        if c.is_special or self._pointed_to:
            self._fill_special(c, begin, end, mass)
        if not c.is_special:
            self._group.n_rows = n
            tokens = c.groups[0].tokens
            assert tokens is not None, "what is not special has tokens"
            self._tokens[:n] = tokens if n == c.n_rows else tokens[begin:end]

    def _fill_special(self, c: CheckedItem, begin: int, end: int, mass: NDArray[np.float32] | None) -> None:
        """Set the fields of a special item, or take them back."""
        item, block, taps, held = self.item, c.groups[0].block, np.array(c.taps, np.int32), list[object]()

        def place(array: NDArray[Any] | None) -> int | None:
            held.append(array)
            return None if array is None else address(array)

        self.tapped = np.empty((len(taps), end - begin, self._n_embd), np.float32)
        item.n_taps, item.taps, item.tapped = len(taps), place(taps), place(self.tapped)
        item.block = NUMBERS["EC_BLOCK_MUTUAL"] if block is not None and block.mutual else 0
        item.n_mass, layers, weights = 0, None, None
        if mass is not None and (of_rows := np.stack([row[begin:end] for row in c.mass.values()])).any():
            layers, weights = np.array([*c.mass], np.int32), of_rows
            item.n_mass, item.n_mass_heads, item.n_mass_slots = mass.shape
        item.mass_layers, item.mass_weights, item.mass = place(layers), place(weights), place(mass)
        groups = []
        for group, first, last in c.parts(begin, end) if c.is_special else ():
            layer_set = group.span.layers
            vectors = None if group.vectors is None else group.vectors[first:last]
            groups.append(
                Group(
                    n_rows=last - first,
                    first_layer=group.span.enter,
                    tokens=None if group.tokens is None else place(group.tokens[first:last]),
                    vectors=place(vectors),
                    n_added=0 if vectors is None else vectors.shape[1] // self._n_embd - 1,
                    attn=None if layer_set is None else place(layer_set.attn.astype(np.uint8)),
                    mlp=None if layer_set is None else place(layer_set.mlp.astype(np.uint8)),
                )
            )
        array = (Group * len(groups))(*groups)
        item.groups, item.n_groups = array if groups else ctypes.pointer(self._group), max(len(groups), 1)
        self._pointed_to = [*held, array] if c.is_special else []


class CpuSession(OwnSession):
    """Implements edgedec.model.Session.

    Attributes:
        handle: The native session; use it inside using().
        rows: The native description of its rows in a forward.
        family: The same object for a session and all forks of it.
    """

    def __init__(self, model: LibraryModel[Any, Any], handle: ctypes.c_void_p, n_ctx: int) -> None:
        """Take over a native session."""
        super().__init__(model, n_ctx)
        self.handle = handle
        self._finalizer = freed_with(self, native().ec_session_close, handle)
        self.rows = NativeRows(handle, model.card.n_embd, model.tree_rows)
        self.family = object()

    def be_followed(self, head: CpuDraftHead, ops: LogitOps, *, is_fork: bool = False) -> None:
        """Have a draft head follow the session's text; the native state of a fork is made already."""
        self.follower = CpuDraftHeadState(head, self.handle, self.using, ops)
        if not is_fork:
            self.follower.reset()

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """In the end, explain what came from the disk, and how many experts forwards went through and read."""
        try:
            yield
        finally:
            if stats is not None:
                stats.explanation += self._model.recalled(self)
                with suppress(EdgedecError), self.using():  # of a closed session nothing is told
                    stats.explanation += described(touched_experts(self._model.handle, self._model.tree_rows))
                    stats.explanation += expert_reads(self._model.handle).described()

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Begin to read a prompt; see edgedec.model.RecallingSession."""
        return self._model.recall(self, token_ids, n_held)

    def block_bounds(self, token_ids: Sequence[int]) -> list[int]:
        """Return where the blocks of a prompt on the disk begin and end; [0] where nothing of it is kept there."""
        n = len(token_ids)
        whole = [*range(0, n + 1, BLOCK_TOKENS)]
        end = n // PAGE_TOKENS * PAGE_TOKENS
        return [*whole, end] if 0 < whole[-1] < end else whole

    def _adapt(self) -> None:
        set_scales(self.handle, self._scales)

    def _move(self, slots: NDArray[np.int32]) -> None:
        if slots[-1] == self.n_cached + len(slots) - 1:  # they ascend, so each is in its place already
            return
        check(native().ec_session_move(self.handle, address(slots), len(slots), self.n_cached), "keeping a path")

    @property
    def gathered_heads(self) -> int:
        """The key-value heads of each layer, where they can see slots of their own (gather()); else 0."""
        with self.using():
            return int(native().ec_session_gathered_heads(self.handle))

    def gather(self, source: "CpuSession", slots: NDArray[np.int32], n_past: int) -> None:
        """Copy keys and values from slots of another session, which are chosen for each head, behind `n_past` tokens.

        Args:
            source: That session.
            slots: int32[n_layer, gathered_heads, n], those of a head ascending. All heads have the same last slot;
                further rows stand at the positions behind it.
            n_past: Tokens of this session that stay.

        Raises:
            SessionError: One of the two sessions is closed or branched, or does not hold these slots.
            RequestError: The slots have another shape.
        """
        with self._model.lock:
            self.state.check_settled("filled")
            source.state.check_settled("read")
            n = slots.shape[-1]
            self.state.check_past(n_past, n)
            if slots.shape != (self._model.card.n_layer, self.gathered_heads, n) or not n:
                raise RequestError(f"slots have the shape {slots.shape}; it must be (layers, their heads, at least 1)")
            if not 0 <= slots.min() <= slots.max() < source.state.n_whole:
                raise SessionError(f"slots up to {slots.max()} are read; the session holds {source.state.n_whole}")
            of_heads = np.ascontiguousarray(slots, np.int32)
            code = native().ec_session_gather(self.handle, source.handle, address(of_heads), n, n_past)
            check(code, "gathering keys and values")
            places = source.state.held_places(source.n_cached)[slots.max(axis=(0, 1))]
            self.state.restore(n_past + n, True, np.concatenate([self.state.held_places(n_past), places]))
            super()._take_beside(b"", n_past + n)

    def _fork(self) -> "CpuSession":
        """Return a second session; the pages of the cached prefix are shared until one of the two writes there.

        Pages behind the prefix, which a longer text before has left, are freed.
        """
        twin = new_handle(lambda to: native().ec_session_fork(self.handle, self.n_cached, to), "forking a session")
        session = type(self)(self._model, twin, self.n_ctx)
        session.family = self.family
        if isinstance(self.follower, CpuDraftHeadState):
            session.be_followed(self.follower.head, self.follower.ops, is_fork=True)
        self._model.adopt(session)
        return session

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        kv = np.empty(native().ec_session_saved_bytes(self.handle, n), np.uint8)
        places = None if self.state.places is None else address(self.state.places)
        check(native().ec_session_save(self.handle, n, places, address(kv), len(kv)), "saving a session")
        return self.state.written[:, :n], kv

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        return (np.bool_, (len(self.state.written), n)), (np.uint8, (native().ec_session_saved_bytes(self.handle, n),))

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NDArray[np.bool_]:
        written, kv = arrays
        check(native().ec_session_load(self.handle, n, address(kv), len(kv)), "restoring a session")
        return written

    def _beside(self, n: int) -> bytes:
        """Return the vectors that the session needs to go back, with their bytes before them, and what a head knows."""
        vectors, of_head = np.empty(native().ec_session_vector_bytes(self.handle, n), np.uint8), super()._beside(n)
        if not len(vectors) and not of_head:
            return b""
        code = native().ec_session_save_vectors(self.handle, n, address(vectors), len(vectors))
        check(code, "saving a session")
        return _LENGTH.pack(len(vectors)) + vectors.tobytes() + of_head

    def _take_beside(self, data: bytes, n: int) -> None:
        n_bytes = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
        vectors = np.frombuffer(data[_LENGTH.size :][:n_bytes], np.uint8)
        if native().ec_session_load_vectors(self.handle, n, address(vectors), len(vectors)):
            raise ModelFormatError(f"the saved state can't be used: {last_error()}; evaluate the tokens again")
        super()._take_beside(data[_LENGTH.size + n_bytes :], n)

    def _free(self) -> None:
        self._finalizer()

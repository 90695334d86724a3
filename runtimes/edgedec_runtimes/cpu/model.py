"""A model on the cpu runtime: native weights, and forwards that go through the layers in chunks."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import SharedForward
from edgedec.errors import EdgedecError, MemoryCapError, ModelFormatError, OptionError, StorageError
from edgedec.gguf.tile_header import REMEDY
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.cpu.adapters import NO_ADAPTERS
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead
from edgedec_runtimes.cpu.expert_counts import ExpertReads, expert_reads, touched_experts
from edgedec_runtimes.cpu.library import (
    CANCELLED,
    KERNEL_ROWS,
    NOT_FINITE,
    UNREADABLE,
    Item,
    address,
    check,
    last_error,
    native,
    new_handle,
)
from edgedec_runtimes.cpu.logit_ops import NativeRowOps
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.cpu.state_memory import BLOCK_TOKENS
from edgedec_runtimes.cpu.tiles.cache import Tiles
from edgedec_runtimes.cpu.tiles.file import map_tiles
from edgedec_runtimes.cpu.tiles.listing import delete_tile_file
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.session_state import CheckedItem

if TYPE_CHECKING:
    from edgedec_runtimes.cpu.kept_prompts import KeptPrompts

CAPABILITIES = Capabilities(
    rollback=True,
    trees=True,
    fork=True,
    layers=True,
    groups=True,
    taps=True,
    hidden_input=True,
    vector_rows=True,
    positions=True,
    keeps_prompts=True,
    max_rows=256,
    prefill_chunk=1,
)

Piece = tuple[CheckedItem, Forward, int, int, int]
"""An item, where its results go, the row of all logits that its first one is, and which of its rows, [begin, end)."""


class CpuModel(LibraryModel[ctypes.c_void_p, CpuSession]):
    """Implements edgedec.model.Model.

    Attributes:
        tiles: The weights.
        adapters: What the native model borrows of its adapters.
        keeping: Where prompts are kept on the disk: edgedec's cache, the model's name, most bytes; None for nowhere.
        kept_prompts: Keeps prompts on the disk, once there was one that is long enough.
        session_type: The class of its sessions.
    """

    adapters = NO_ADAPTERS
    batch_invariant: int | Literal[True] = True  # by construction: see native/kernels/kernels.h
    keeping: tuple[Path, str, int] | None = None
    kept_prompts: "KeptPrompts | None" = None
    session_type: type[CpuSession] = CpuSession

    def __init__(  # more than 7 parameters: one for each part that the runtime makes of a model
        self,
        handle: ctypes.c_void_p,
        tiles: Tiles | StreamedTiles,
        tokenizer: Tokenizer,
        card: ModelCard,
        capabilities: Capabilities,
        kv_type: int,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        logit_rows: int,
        n_rows: int = KERNEL_ROWS,
    ) -> None:
        """Take over the native model; what is not told here is as in LibraryModel.

        Args:
            tiles: Its weights.
            capabilities: What it can do: CAPABILITIES, or fewer.
            kv_type: Element type of the sessions' KV cache, as the library numbers it.
            logit_rows: Rows of logits whose memory is kept between forwards; a forward that returns more allocates it.
            n_rows: Most rows of a native forward.
        """
        self._heads: list[CpuDraftHead] = []
        free = partial(_free, handle, tiles, self._heads)
        super().__init__(handle, card, capabilities, tokenizer, terms, free, tree_rows=n_rows)
        self.tiles = tiles
        self._kv_type = kv_type
        self._ops = NativeRowOps(native().ec_model_instruction_set(handle))
        self._logits = np.empty((logit_rows, card.n_vocab), np.float32)
        self._logits_address = address(self._logits)
        self._best = (ctypes.c_int32 * n_rows)()
        self._flag_address = ctypes.addressof(self.stop.flag)

    @property
    def instruction_set(self) -> str:
        """Which kernels compute ("avx512vnni", ...)."""
        with self.lock:
            return str(native().ec_model_instruction_set(self.handle).decode())

    def streamed_bytes(self) -> int:
        """Return how many bytes of weights were read for forwards so far; 0 where all stay in memory."""
        with self.lock:
            return int(native().ec_model_streamed_bytes(self.handle))

    def experts_touched(self) -> dict[int, float]:
        """Return how many different experts of a layer the rows of a forward went through so far.

        It is the mean over layers and forwards, by the number of rows that a layer evaluated; {} without experts.
        """
        with self.lock:
            return touched_experts(self.handle, self.tree_rows)

    def expert_reads(self) -> ExpertReads:
        """Return how often experts were wanted and where they were then; all 0 where the experts stay in memory."""
        with self.lock:
            return expert_reads(self.handle)

    def session(self, n_ctx: int) -> CpuSession:
        """Open an empty session; the system allocates its pages as they are written."""
        with self.lock:
            if n_ctx < 1 or n_ctx > 1 << 24:
                raise OptionError("n_ctx", n_ctx, f"a session holds 1 to {1 << 24} tokens")
            handle = new_handle(
                lambda to: native().ec_session_open(self.handle, n_ctx, self._kv_type, to),
                f"a session of {n_ctx} tokens",
            )
            try:
                session = self.adopt(self.session_type(self, handle, n_ctx))
            except MemoryError as error:
                raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error
            if self._heads and not self._heads[0].closed:
                session.be_followed(self._heads[0], self._ops)
            return session

    def recall(self, session: CpuSession, token_ids: Sequence[int], n_held: int) -> int:
        """Return how many tokens of a prompt a session holds, after it took what the disk has of it."""
        if self.kept_prompts is None:
            if self.keeping is None or len(token_ids) < BLOCK_TOKENS:
                return n_held
            from edgedec_runtimes.cpu.kept_prompts import kept_in  # most processes have no long prompt

            self.kept_prompts = kept_in(*self.keeping, self.card.fingerprint, has_places=self.has_places)
        return self.kept_prompts.begin(session, token_ids, n_held)

    def recalled(self, session: CpuSession) -> list[str]:
        """Return sentences on what of a session's latest prompt came from the disk."""
        return [] if self.kept_prompts is None else self.kept_prompts.described(session)

    def close(self) -> None:
        """Free the weights and every session, and wait for prompts that are being written."""
        super().close()
        if self.kept_prompts is not None and self.lock.is_ours:
            self.kept_prompts.files.close()

    def follow_with(self, head: CpuDraftHead) -> None:
        """Have a draft head follow the text of every session that is opened from now on; the model closes the head."""
        self._heads.append(head)

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate long chains in chunks by themselves, the ends of all items together."""
        results, place = self._results(checked)
        n_total, n_done = 0, 0
        for item in checked:
            item.session.state.begin(item)
            n_total += item.n_rows
        for pieces in _groups(checked, results, self.kept_prompts, self.tree_rows):
            self._run_together(pieces, place)
            if on_progress is not None and n_total > self.tree_rows:
                n_done += sum(end - begin for _, _, _, begin, end in pieces)
                on_progress(Progress("prefill", n_done, n_total, "tokens"))
        if self._heads and self._heads[0].card.rows is not None:
            for item, result in zip(checked, results, strict=True):
                result.shared = SharedForward(0.0, item.n_rows + native().ec_draft_added_rows(item.session.handle))
        return results

    def _results(self, checked: list[CheckedItem]) -> tuple[list[Forward], int]:
        """Return where the results of each item go, and the address of the array with the logits of all items.

        The results of sessions that are no forks of each other, and go on at their own pace, are arrays of their own.
        """
        results: list[Forward] = []
        n_wanted = first = 0
        for item in checked:
            n_wanted += len(item.logit_rows)
        logits, place = self._logits, self._logits_address
        is_own = n_wanted > len(logits)
        if len(checked) > 1:
            is_own = is_own or len({item.session.family for item in checked}) > 1
        if is_own:
            logits = np.empty((n_wanted, self.card.n_vocab), np.float32)
            place = address(logits)
        for item in checked:
            last = first + len(item.logit_rows)
            hidden: dict[int, NDArray[np.float32]] = {}
            for tap in item.taps:
                hidden[tap] = np.empty((item.n_rows, self.card.n_embd), np.float32)
            mass = None
            if item.mass:
                shape = (len(item.mass), self.capabilities.attention_mass, item.n_past + item.n_rows)
                mass = np.zeros(shape, np.float32)
            results.append(Forward(logits[first:last], hidden, self._ops, [], mass, is_own))
            first = last
        return results, place

    def _run_together(self, pieces: list[Piece], place: int) -> None:
        """Evaluate at most `tree_rows` rows in one native forward; the logits of all items lie at `place`."""
        for item, result, _, begin, end in pieces:
            item.session.rows.fill(item, begin, end, result.mass)
        first_item, _, first, _, _ = pieces[0]
        rows = first_item.session.rows
        items, logits = rows.pointer, place + 4 * self.card.n_vocab * (first + rows.logit_rows.start)
        if len(pieces) > 1:
            items = (Item * len(pieces))(*[piece[0].session.rows.item for piece in pieces])
        code = native().ec_forward(self.handle, items, len(pieces), logits, self._best, self._flag_address)
        if code:
            self._refuse(code)
        n_found = 0
        for item, result, _, begin, end in pieces:
            n_end = n_found + item.session.rows.item.n_wanted
            result.best.extend(self._best[n_found:n_end])
            n_found = n_end
            if item.taps:
                for tap, states in zip(item.taps, item.session.rows.tapped, strict=True):
                    result.hidden[tap][begin:end] = states
            item.session.state.advance(end - begin)
            if self.kept_prompts is not None:
                self.kept_prompts.note(item, begin, end)

    def _refuse(self, code: int) -> NoReturn:
        """Raise the error of a forward; an error of the weights is raised by every later use, too."""
        if code == CANCELLED:
            self.stop.check()
        if code == NOT_FINITE or (code == UNREADABLE and isinstance(self.tiles, Tiles)):
            self.lock.refusal = explain(code, last_error(), self.tiles)
            raise self.lock.refusal
        check(code, "a forward")
        raise AssertionError("a forward that failed has an error")


def _groups(
    checked: list[CheckedItem], results: list[Forward], prompts: "KeptPrompts | None", n_most: int
) -> list[list[Piece]]:
    """Cut items into forwards of at most `n_most` rows: first the beginnings of long chains, then all ends.

    The rows of logits of a forward follow one another. So an end begins a new one where its beginning had some, too.
    Where prompts are kept, a chain is also cut where its states are. Rows of tokens that see their block are one block
    each, as all rows of such a native forward see each other.
    """

    def most(item: CheckedItem, begin: int) -> int:
        if item.is_special and (block := item.groups[0].block) is not None and item.groups[0].tokens is not None:
            return min(n_most, block.n_rows - (item.n_past + begin) % block.n_rows)
        return n_most if prompts is None else prompts.n_rows_at(item, begin, n_most)

    if len(checked) == 1 and checked[0].n_rows <= most(checked[0], 0):  # a step: nothing to cut or to join
        return [[(checked[0], results[0], 0, 0, checked[0].n_rows)]]
    beginnings: list[list[Piece]] = []
    ends: list[list[Piece]] = [[]]
    n_last, first = 0, 0
    for item, result in zip(checked, results, strict=True):
        begin, n = 0, item.n_rows
        while n - begin > (n_rows := most(item, begin)):
            beginnings.append([(item, result, first, begin, begin + n_rows)])
            begin += n_rows
        if ends[-1] and (n_last + n - begin > n_most or (begin and len(item.logit_rows) > 1)):
            ends.append([])
            n_last = 0
        ends[-1].append((item, result, first, begin, n))
        n_last += n - begin
        first += len(item.logit_rows)
    return beginnings + ends if checked else []


def _free(handle: ctypes.c_void_p, tiles: Tiles | StreamedTiles, heads: Sequence[CpuDraftHead]) -> None:
    for head in heads:
        head.close()
    native().ec_model_destroy(handle)
    tiles.close()


def explain(code: int, reason: str, tiles: Tiles | StreamedTiles) -> EdgedecError:
    """Return the error of a forward that can't read its weights, or whose logits are not finite.

    Damaged tiles are deleted, so that the next load of the model makes them anew.

    Args:
        code: The code of the forward, UNREADABLE or NOT_FINITE.
        reason: The native library's message.
    """
    damage = _delete_if_damaged(tiles)
    if code == NOT_FINITE:
        if damage:
            return ModelFormatError(f"{reason}: {damage}")
        return ModelFormatError(
            f"{reason}, and the tiles of {tiles.label} are undamaged: the model's file itself is damaged, or holds no "
            "working model; download it again"
        )
    cause = damage or f"the tiles of {tiles.label} are sound now; load the model again"
    return StorageError(f"{reason}: {cause}")


def _delete_if_damaged(tiles: Tiles | StreamedTiles) -> str:
    """Read the tile file, delete it where it is damaged, and say what was found and done; "" where it is sound."""
    path = tiles.path
    if path is None:
        return ""
    try:
        with map_tiles(path, tiles.label) as tiles_map:
            tiles_map.verify()
    except ModelFormatError as error:
        if path.suffix == ".gguf":  # there is no other file of the model
            return f"{str(error).removesuffix(f'; {REMEDY}')}; download the model again with edgedec pull --force"
        with suppress(StorageError):  # then the next load finds it damaged
            delete_tile_file(path)
        return f"{error}. Their file was deleted: load the model again"
    except OSError as error:
        return f"the tiles of {tiles.label} can't be opened any more ({error.strerror or error}); load the model again"
    return ""

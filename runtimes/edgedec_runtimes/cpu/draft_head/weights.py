"""A trained draft head on the cpu runtime: its native weights."""

import ctypes
import hashlib
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.cpu.library import DraftHeadConfig, address, check, native
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.target import Fitted

MATRICES = ("fc", "q", "k", "v", "o", "gate", "up", "down", "output", "embedding")
VECTORS = ("input_norm", "hidden_norm", "post_attention_norm", "output_norm", "fc_norm", "rope_divisors")
_FC_NORMS = {"none": 0, "joined": 1, "each": 2}
_HASHED = ("fc", "q", "o", "down", "output_norm")
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_EXACT = ("fc", "embedding")
_BLOCK = 32
_WIDEST = 256  # columns of the largest blocks
_PIECE_BYTES = 8 << 20

U8 = NDArray[np.uint8]


class CpuDraftHead:
    """A head's weights in the native library, for the sessions of one model.

    Attributes:
        handle: The native head.
        token_ids: int32[n], the target's id of each token that the head can draft.
        mark: 32 bytes that tell this head from others.
        n_bytes: Bytes of its weights.
        closed: Whether the weights were freed.
        followers: What it knows of each session's text (CpuDraftHeadState).
        card: The facts of the head.
        notes: What the user should know of the head and its target, in sentences.
    """

    def __init__(
        self,
        model: ctypes.c_void_p,
        fitted: Fitted,
        output_rows: Callable[[NDArray[np.int32]], HeadTensor],
        token_bytes: Callable[[], int],
    ) -> None:
        """Arrange a head's weights for a native model.

        Args:
            model: The native model.
            fitted: The head.
            output_rows: Returns the rows of the target's output matrix that belong to some tokens, which a head borrows
                that has none.
            token_bytes: Returns the bytes of weights that a token of the target reads.

        Raises:
            SessionError: The native library refuses a shape.
            MemoryCapError: There is no memory for the weights.
        """
        head, self.notes = fitted.head, fitted.notes
        self.card = card = head.card
        self.token_ids = np.ascontiguousarray(head.d2t, np.int32)
        taps = np.array(card.taps, np.int32)
        self.handle = ctypes.c_void_p()
        self.mark = _mark(head)
        config = _config(card)
        code = native().ec_draft_head_create(
            *(model, ctypes.byref(config), address(taps), address(self.token_ids), ctypes.byref(self.handle))
        )
        check(code, f"the draft head {card.name}")
        self._finalizer = weakref.finalize(self, native().ec_draft_head_destroy, self.handle)
        self._finalizer.atexit = False
        self.closed = False
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._token_bytes = token_bytes
        self._level_bytes = 0  # of the weights that every drafted token reads
        self._tiles: list[U8] = []
        for which, name in enumerate(MATRICES):
            tensor = head.tensors.get(name)
            if tensor is not None:
                self._set_matrix(which, name, stored(name, tensor))
            elif name == "output":
                self._set_matrix(which, name, stored(name, output_rows(self.token_ids), borrowed=True))
        for which, name in enumerate(VECTORS):
            if name in head.tensors:
                values = np.ascontiguousarray(head.tensors[name].floats())
                check(native().ec_draft_head_set_vector(self.handle, which, address(values), len(values)), name)
        check(native().ec_draft_head_finish(self.handle), f"the draft head {card.name}")
        self.n_bytes = sum(tiles.nbytes for tiles in self._tiles)

    def _set_matrix(self, which: int, name: str, tensor: HeadTensor) -> None:
        n_rows, n_cols = tensor.shape
        tiles = np.empty(native().ec_tile_bytes(int(tensor.type), n_rows, n_cols), np.uint8)
        data = np.ascontiguousarray(tensor.data)
        rows = (int(tensor.type), n_rows, n_cols, 0, n_rows)
        check(native().ec_tile_pack(*rows, address(data), data.nbytes, address(tiles), tiles.nbytes), name)
        what = (which, int(tensor.type), n_rows, n_cols)
        check(native().ec_draft_head_set_matrix(self.handle, *what, address(tiles), tiles.nbytes), name)
        self._tiles.append(tiles)
        if name not in ("fc", "embedding"):
            self._level_bytes += tiles.nbytes

    @cached_property
    def share(self) -> float:
        """Bytes of weights that a drafted token reads, as a share of those that a token of the target reads.

        `fc` is left out: it is read once for all tokens that stand since the last draft.
        """
        return self._level_bytes / self._token_bytes()

    def close(self) -> None:
        """Free the weights, which no session may follow then; calling it again does nothing."""
        self._finalizer()
        self._tiles.clear()
        self.n_bytes = 0
        self.closed = True


def borrowed_rows(gguf: GGUF, token_ids: NDArray[np.int32], name: str = "output.weight") -> HeadTensor:
    """Return the rows of one of the target's matrices that belong to some tokens, in their order and type.

    A target without an output matrix uses its embeddings as one.
    """
    info = gguf.tensors.get(name) or gguf.tensors["token_embd.weight"]
    n_cols, n_rows = info.shape
    row_bytes = info.n_bytes // n_rows
    rows = np.empty((len(token_ids), row_bytes), np.uint8)
    order = np.argsort(token_ids, kind="stable")
    ascending = token_ids[order]
    step = max(1, _PIECE_BYTES // row_bytes)
    for begin in range(0, n_rows, step):
        first, last = np.searchsorted(ascending, (begin, begin + step))
        if first < last:
            n = min(step, n_rows - begin)
            piece = np.frombuffer(gguf.read_tensor_bytes(info.name, begin * row_bytes, n * row_bytes), np.uint8)
            rows[order[first:last]] = piece.reshape(n, row_bytes)[ascending[first:last] - begin]
    return HeadTensor((len(token_ids), n_cols), GGMLType(info.type), rows.reshape(-1))


def stored(name: str, tensor: HeadTensor, *, borrowed: bool = False) -> HeadTensor:
    """Return a matrix of a head as it is stored for running, by its name in edgedec_runtimes.trained_heads.head.

    Every drafted token reads the head's matrices, so those of floats are rounded to Q4_0, and so are rows that are
    borrowed from the target where its type is larger. Only fc and the embedding, of which little is read, are rounded
    to Q8_0. What the head's own file has in blocks stays as it is, and so do rows that are no whole blocks of 32.
    """
    to = _stored_type(name, tensor.type, tensor.shape[1], borrowed)
    if to == tensor.type:
        return tensor
    return _to_q8_0(tensor) if to is GGMLType.Q8_0 else _to_q4_0(tensor)


def stored_bytes(name: str, tensor: HeadTensor) -> int:
    """Return the bytes that a matrix of a head's own takes when it is loaded."""
    return _row_bytes(_stored_type(name, tensor.type, tensor.shape[1], False), tensor.shape[1]) * tensor.shape[0]


def _stored_type(name: str, type: GGMLType, n_cols: int, borrowed: bool) -> GGMLType:
    whole, is_large = n_cols % _BLOCK == 0, _row_bytes(type, _WIDEST) > _row_bytes(GGMLType.Q4_0, _WIDEST)
    if not whole or not (type in _FLOATS or (borrowed and is_large)):
        return type
    return GGMLType.Q8_0 if name in _EXACT else GGMLType.Q4_0


def _row_bytes(type: GGMLType, n_cols: int) -> int:
    return n_cols // type.block_size * type.block_bytes


def _to_q8_0(tensor: HeadTensor) -> HeadTensor:
    blocks = tensor.floats().reshape(-1, _BLOCK)
    scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales > 0, 1 / scales.astype(np.float32), 0).astype(np.float32)
    data = np.empty((len(blocks), 2 + _BLOCK), np.uint8)
    data[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    levels = np.clip(np.rint(blocks * inverse[:, None]), -127, 127).astype(np.int8)
    data[:, 2:] = levels.view(np.uint8)
    return HeadTensor(tensor.shape, GGMLType.Q8_0, data.reshape(-1))


def _to_q4_0(tensor: HeadTensor) -> HeadTensor:
    n_rows, n_cols = tensor.shape
    data = np.empty(_row_bytes(GGMLType.Q4_0, n_cols) * n_rows, np.uint8)
    source = np.ascontiguousarray(tensor.data)
    rows = (int(tensor.type), n_rows, n_cols)
    check(
        native().ec_rows_to_q4_0(*rows, address(source), source.nbytes, address(data), data.nbytes), "a head's matrix"
    )
    return HeadTensor(tensor.shape, GGMLType.Q4_0, data)


def output_type(gguf: GGUF) -> GGMLType:
    """Return the type of a target's output matrix, of which a head borrows rows."""
    return GGMLType((gguf.tensors.get("output.weight") or gguf.tensors["token_embd.weight"]).type)


def output_bytes(card: HeadCard, type: GGMLType) -> int:
    """Return the bytes of the rows that a head borrows of an output matrix of that type; 0 where it has its own."""
    if card.own_output:
        return 0
    return _row_bytes(_stored_type("output", type, card.n_embd, True), card.n_embd) * card.n_vocab_draft


def _config(card: HeadCard) -> DraftHeadConfig:
    return DraftHeadConfig(
        *(card.n_vocab_draft, card.n_embd, card.n_head, card.n_head_kv, card.head_dim, card.n_ff, len(card.taps)),
        *(_FC_NORMS[card.fc_norm], card.norm_before_residual, card.feeds_back_normed),
        *(card.rms_epsilon, card.rope_base),
    )


def _mark(head: Head) -> bytes:
    """Return 32 bytes that tell a head from others."""
    digest = hashlib.sha256(repr(head.card).encode())
    for name in _HASHED:
        if name in head.tensors:
            digest.update(head.tensors[name].data.tobytes())
    digest.update(head.d2t.tobytes())
    return digest.digest()

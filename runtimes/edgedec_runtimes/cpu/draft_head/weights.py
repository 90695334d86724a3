"""A trained draft head on the cpu runtime: its native weights."""

import ctypes
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import DraftPrice
from edgedec.gguf.file import GGUF
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.cpu.draft_head.parts import is_read_by_tokens, is_read_once, native_config, place_of
from edgedec_runtimes.cpu.library import address, check, native, new_handle
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.cpu.tensor_places import EMBEDDING, OUTPUT
from edgedec_runtimes.cpu.tiles.cache import Job, Tiles, TileTensor, open_tiles
from edgedec_runtimes.cpu.weights import LAYOUT, config_of, set_weights, tile_job
from edgedec_runtimes.shared.library_model import freed_with
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.target import Fitted

_HASHED = (
    "fc",
    "joint",
    "rows",
    "rows_base",
    "q",
    "o",
    "down",
    "output_norm",
    "layers.0.q",
    "layers.0.o",
    "layers.0.down",
    "markov_w2",
    "selector_hidden",
)
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_EXACT = tuple(
    """
    fc joint rows embedding markov_w1 markov_gate markov_joint attention_conv_proj mlp_conv_proj selector_predecessor
    selector_successor selector_hidden
    """.split()
)
_BLOCK = 32
_WIDEST = 256  # columns of the largest blocks
_PIECE_BYTES = 8 << 20
ROUNDING = "head 1"
"""Version of how borrowed rows are rounded: rows that another version rounded are made again."""

U8 = NDArray[np.uint8]


class CpuDraftHead:
    """A head's weights in the native library, for the sessions of one model.

    Attributes:
        handle: The native head.
        token_ids: int32[n], the target's id of each token that the head can draft.
        mark: 32 bytes that tell this head from others.
        n_bytes: Bytes of its weights.
        below: The share of a forward of the target below the layer at which the head splits forwards.
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
        token_bytes: int,
        *,
        below_bytes: int = 0,
        n_ctx: int = 1,
        shared_output: GGMLType | None = None,
        of_target: Job | None = None,
    ) -> None:
        """Arrange a head's weights for a native model.

        Args:
            model: The native model.
            fitted: The head.
            output_rows: Returns the rows of the target's output matrix that belong to some tokens, which a head borrows
                that has none.
            token_bytes: Bytes of weights that a token of the target reads.
            below_bytes: Those below the layer at which the head splits forwards.
            n_ctx: Tokens of a session, which the rotations of a head's layers may depend on.
            shared_output: The type of the target's output matrix, where a head that joins pairs reads its rows there;
                None: such a head borrows them, too.
            of_target: The job of the target's tiles, in whose cache the borrowed rows are kept as the head reads them;
                None: they are made in memory.

        Raises:
            SessionError: The native library refuses a shape.
            MemoryCapError: There is no memory for the weights.
        """
        head, self.notes = fitted.head, fitted.notes
        self.card = card = head.card
        self.token_ids = np.ascontiguousarray(head.d2t, np.int32)
        taps = np.array(card.taps, np.int32)
        self.mark = _mark(head)
        windows = np.array(card.block.windows if card.block is not None else (), np.int32)
        layers = None if head.layers is None else read_layers(head.layers, card.n_vocab_draft)
        shape = None if layers is None else ctypes.byref(config_of(layers.network))
        config, windows_at = ctypes.byref(native_config(card)), address(windows) if len(windows) else None
        parts = config, shape, address(taps), address(self.token_ids), windows_at
        self.handle = new_handle(
            lambda to: native().ec_draft_head_create(model, *parts, to), f"the draft head {card.name}"
        )
        self._finalizer = freed_with(self, native().ec_draft_head_destroy, self.handle)
        self.below = below_bytes / token_bytes
        self.closed = False
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._token_bytes = token_bytes
        self._bytes_once = 0  # of the weights that a draft reads
        self._bytes_of_token = below_bytes if card.exits else 0  # that each of its tokens reads
        self._tiles: list[U8] = []
        self._opened: list[Tiles] = []
        self._set_tensors(head)
        if "output" not in head.tensors:
            if layers is not None and shared_output is not None:
                self._bytes_of_token += native().ec_tile_bytes(int(shared_output), len(self.token_ids), card.n_embd)
            else:
                self._borrow_output(output_rows, of_target)
        if layers is not None:
            of_layers = open_tiles(layers.job)
            self._opened.append(of_layers)
            set_weights(native().ec_draft_head_layers(self.handle), layers.gguf, layers.network, of_layers, n_ctx)
            self._bytes_of_token += bytes_of_token(layers.network)
        check(native().ec_draft_head_finish(self.handle), f"the draft head {card.name}")
        self.n_bytes = sum(tiles.nbytes for tiles in self._tiles) + sum(tiles.n_bytes for tiles in self._opened)

    def _set_tensors(self, head: Head) -> None:
        for name, tensor in head.tensors.items():
            if place_of(name, self.card).is_matrix:
                self._set_matrix(name, stored(name, tensor))
            else:
                self._set_vector(name, np.ascontiguousarray(tensor.floats()).reshape(-1))

    def _set_vector(self, name: str, values: NDArray[np.float32]) -> None:
        which, layer, _ = place_of(name, self.card)
        check(native().ec_draft_head_set_vector(self.handle, which, layer, address(values), len(values)), name)

    def _set_matrix(self, name: str, tensor: HeadTensor) -> None:
        tiles = np.empty(_tile_bytes(tensor.type, tensor.shape), np.uint8)
        _pack(tensor, tiles)
        self._tiles.append(tiles)
        self._place(name, tensor.type, tensor.shape, tiles)

    def _borrow_output(self, output_rows: Callable[[NDArray[np.int32]], HeadTensor], of_target: Job | None) -> None:
        """Set the rows of the target's output matrix, which are rounded once and then read from the tile cache."""
        if of_target is None:
            self._set_matrix("output", stored("output", output_rows(self.token_ids), borrowed=True))
            return
        shape = (len(self.token_ids), self.card.n_embd)
        type = _stored_type("output", output_type(of_target.gguf), self.card.n_embd, True)

        def fill(_: str, tiles: U8, start: int) -> None:
            _pack(stored("output", output_rows(self.token_ids), borrowed=True), tiles)

        tensors = (TileTensor("output of a draft head", _tile_bytes(type, shape)),)
        layout = f"{LAYOUT} {ROUNDING} {hashlib.sha256(self.token_ids.tobytes()).hexdigest()}"
        opened = open_tiles(
            replace(of_target, tensors=tensors, layout=layout, fill=fill, plain=(), rows_only=frozenset())
        )
        self._opened.append(opened)
        self._place("output", type, shape, opened[tensors[0].name])

    def _place(self, name: str, type: GGMLType, shape: tuple[int, ...], tiles: U8) -> None:
        place = place_of(name, self.card)
        what = (place.which, place.layer, int(type), *shape)
        check(native().ec_draft_head_set_matrix(self.handle, *what, address(tiles), tiles.nbytes), name)
        self._bytes_once += tiles.nbytes * is_read_once(name, self.card)
        self._bytes_of_token += tiles.nbytes * is_read_by_tokens(name, self.card)

    @cached_property
    def price(self) -> DraftPrice:
        """The bytes of weights that a draft reads, as shares of those that a token of the target reads."""
        n_bytes = self._token_bytes
        return DraftPrice(level=self._bytes_of_token / n_bytes, once=self._bytes_once / n_bytes)

    def close(self) -> None:
        """Free the weights, which no session may follow then; calling it again does nothing."""
        self._finalizer()
        self._tiles.clear()
        for opened in self._opened:
            opened.close()
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
    return GGMLType.Q8_0 if name.rpartition(".")[2] in _EXACT else GGMLType.Q4_0


def _tile_bytes(type: GGMLType, shape: tuple[int, ...]) -> int:
    n_bytes: int = native().ec_tile_bytes(int(type), *shape)
    return n_bytes


def _pack(tensor: HeadTensor, tiles: U8) -> None:
    """Write the tiles of a matrix."""
    data, (n_rows, n_cols) = np.ascontiguousarray(tensor.data), tensor.shape
    rows = (int(tensor.type), n_rows, n_cols, 0, n_rows)
    check(native().ec_tile_pack(*rows, address(data), data.nbytes, address(tiles), tiles.nbytes), "a head's matrix")


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


def _mark(head: Head) -> bytes:
    """Return 32 bytes that tell a head from others."""
    digest = hashlib.sha256(repr(head.card).encode())
    for name in _HASHED:
        if name in head.tensors:
            digest.update(head.tensors[name].data.tobytes())
    digest.update(head.d2t.tobytes())
    return digest.digest()


class HeadLayers(NamedTuple):
    """The layers of a head.

    Attributes:
        gguf: Their header.
        network: Their network; `n_vocab` counts the tokens that the head drafts.
        job: Makes their tiles, in memory.
    """

    gguf: GGUF
    network: Network
    job: Job


def read_layers(gguf: GGUF, n_vocab: int) -> HeadLayers:
    """Return the layers that the header of a model of the head's layers describes (raises what read_network raises)."""
    whole = read_network(gguf)
    matrices = tuple(placed for placed in whole.matrices if placed.which not in (EMBEDDING, OUTPUT))
    network = replace(whole, n_vocab=n_vocab, matrices=matrices)
    return HeadLayers(usual_tensors(gguf, network), network, tile_job(gguf, network, LoadOptions()))


def bytes_of_token(network: Network) -> int:
    """Return the bytes of tiles that a drafted token reads of the layers: of experts, those that it goes through."""
    total = Fraction(0)
    for tensor in (placed.tensor for placed in network.matrices):
        n_bytes = native().ec_tile_bytes(tensor.type, tensor.shape[1], tensor.shape[0])
        total += n_bytes * (Fraction(network.n_expert_used, network.n_expert) if "_exps." in tensor.name else 1)
    return int(total)

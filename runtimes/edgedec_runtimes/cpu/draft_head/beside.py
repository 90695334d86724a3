"""A draft head beside a target whose text another library evaluates.

The head computes with the native kernels. There the target has a stand-in with its sizes and without layers, and each
text has a native session that holds only what the head knows of it. After a forward the other runtime hands over the
hidden states that the head reads, and it passes on forks, and paths of trees that are kept.
"""

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.logit_ops import LogitOps
from edgedec_runtimes.cpu.draft_head.memory import require_runnable
from edgedec_runtimes.cpu.draft_head.state import CpuDraftHeadState
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead
from edgedec_runtimes.cpu.library import (
    KERNEL_ROWS,
    LOOK_UP,
    OK,
    Config,
    Group,
    Item,
    address,
    carry,
    check,
    forced_instruction_set,
    native,
    new_handle,
)
from edgedec_runtimes.shared.library_model import freed_with
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import HeadTensor
from edgedec_runtimes.trained_heads.target import Fitted

Embeddings = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""Returns the embeddings of tokens, int32[n] -> float32[n, n_embd], before any scaling."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A target's sizes, and what a head borrows of it.

    Attributes:
        n_vocab: Tokens of the target.
        n_embd: Length of its hidden states.
        embedding_scale: What embeddings are multiplied by before the first layer.
        embeddings: Finds embeddings; what it raises is raised by whatever reads or drafts with the head.
        output_rows: Returns the rows of the output matrix that belong to some tokens.
        token_bytes: Bytes of weights that a token of the target reads.
        close: Closes what embeddings are read from; it may be called again.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    embedding_scale: float
    embeddings: Embeddings
    output_rows: Callable[[NDArray[np.int32]], HeadTensor]
    token_bytes: int
    close: Callable[[], None]


class HeadBeside:
    """A head's native weights, for the texts of a model of another library.

    Attributes:
        head: The weights.
        layers: The layers of the target whose output the head reads, in the head's order.
    """

    def __init__(self, fitted: Fitted, target: Borrowed, n_threads: int) -> None:
        """Arrange the weights; the target is closed with them, and on an error.

        Raises:
            UnsupportedModelError: The kernels don't take the head, or it reads what enters the first layer.
            MemoryCapError: There is no memory for the weights.
            EdgedecError: What it borrows can't be read.
        """
        self._closed = weakref.finalize(self, target.close)
        require_runnable(fitted.head)
        self.layers = tapped_layers(fitted.head.card)
        self._look_up = LOOK_UP(_looked_up(target.embeddings, target.n_embd))  # must outlive the stand-in
        self._target = _stand_in(target, n_threads, self._look_up)
        self._freed = freed_with(self, native().ec_model_destroy, self._target)
        self.head = CpuDraftHead(self._target, fitted, target.output_rows, target.token_bytes)

    def text(self, n_ctx: int) -> "TextBeside | None":
        """Return what the head will know of an empty text of at most `n_ctx` tokens; None where the head was freed."""
        if self.head.closed:
            return None
        handle = new_handle(
            lambda to: native().ec_session_open(self._target, n_ctx, 0, to), f"a draft head for {n_ctx} tokens"
        )
        text = TextBeside(self, handle)
        check(native().ec_session_follow(handle, self.head.handle), "a draft head of a session")
        return text

    def close(self) -> None:
        """Free the weights; all texts must be closed. Calling it again does nothing."""
        self.head.close()
        self._freed()
        self._closed()


class TextBeside:
    """What a head knows of the text of one session of another library; use it inside the model's lock."""

    def __init__(self, beside: HeadBeside, handle: ctypes.c_void_p) -> None:
        """Take over a native session."""
        self._beside = beside
        self._handle = handle
        self._finalizer = freed_with(self, native().ec_session_close, handle)

    def state(self, using: Callable[[], AbstractContextManager[object]], ops: LogitOps) -> CpuDraftHeadState:
        """Return the head's state of the text.

        Args:
            using: Holds the model's lock inside its block, and refuses a closed session.
            ops: Operations on a row of the target's logits.
        """
        return CpuDraftHeadState(self._beside.head, self._handle, using, ops)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose output the head reads; none where it rests."""
        return self._beside.layers if native().ec_draft_saved_bytes(self._handle, 0) else ()

    def take(
        self, n_past: int, tokens: NDArray[np.int32], states: NDArray[np.float32], *, n_wanted: int, is_tree: bool
    ) -> None:
        """Take rows that were evaluated behind the first `n_past` tokens.

        Args:
            n_past: Tokens that the rows build on; what is known beyond them is dropped.
            tokens: int32[n], the rows' tokens.
            states: f32[n_layers, n, n_embd], what left `layers`.
            n_wanted: Of how many rows the logits are wanted: of a prompt of at most one.
            is_tree: Whether the rows are a tree, of which keep() may choose a path.
        """
        tokens, states = np.ascontiguousarray(tokens, np.int32), np.ascontiguousarray(states)
        group = Group(n_rows=len(tokens), tokens=address(tokens))
        item = Item(session=self._handle, n_past=n_past, n_rows=len(tokens), n_groups=1)
        item.groups = ctypes.pointer(group)
        item.n_wanted, item.n_taps, item.tapped = n_wanted, len(states), address(states)
        item.parents = address(tokens) if is_tree else None  # of which nothing is read
        check(native().ec_session_take(ctypes.byref(item)), "a draft head that reads a text")

    def move(self, slots: NDArray[np.int32], start: int) -> None:
        """Move rows of the latest forward, at the positions `slots`, int32[n] ascending, to those from `start` on."""
        check(native().ec_session_move(self._handle, address(slots), len(slots), start), "keeping a path")

    def fork(self, n_tokens: int) -> "TextBeside":
        """Return the same for a second session with the first `n_tokens` tokens of the text."""
        twin = new_handle(lambda to: native().ec_session_fork(self._handle, n_tokens, to), "forking a draft head")
        return TextBeside(self._beside, twin)

    def close(self) -> None:
        """Know nothing any more; calling it again does nothing."""
        self._finalizer()


def tapped_layers(card: HeadCard) -> tuple[int, ...]:
    """Return the layers whose output a head reads, by what it taps: the output of one layer enters the next.

    Raises:
        UnsupportedModelError: The head taps what enters the first layer, which no layer puts out, splits forwards, or
            sees the target's keys and values.
    """
    if card.splits_forwards:
        raise UnsupportedModelError(
            f"the draft head {card.name} has rows of one forward pass different layers, which only the cpu runtime can "
            "do; use that runtime and the GGUF, or another head"
        )
    if card.reads_target:
        raise UnsupportedModelError(
            f"the draft head {card.name} sees the model's keys and values, which only the cpu runtime shows it; use "
            "that runtime and the GGUF, or another head"
        )
    if 0 in card.taps:
        raise UnsupportedModelError(
            f"the draft head {card.name} reads what enters layer 0, and here only what leaves a layer can be read; use "
            "the cpu runtime and the GGUF, or a head that taps layers from 1 on"
        )
    return tuple(tap - 1 for tap in card.taps)


def _stand_in(target: Borrowed, n_threads: int, look_up: object) -> ctypes.c_void_p:
    """Return a native model with a target's sizes and without layers."""
    config = Config(target.n_vocab, target.n_embd, target.n_layer)
    for name in ("rms_epsilon", "residual_scale", "logit_scale", "attention_scale"):
        setattr(config, name, 1.0)
    config.embedding_scale = target.embedding_scale
    shape = ctypes.byref(config), n_threads, KERNEL_ROWS, forced_instruction_set()
    handle = new_handle(lambda to: native().ec_model_create(*shape, to), "the target of a draft head")
    check(native().ec_model_finish_elsewhere(handle, look_up), "the target of a draft head")
    return handle


def _looked_up(embeddings: Embeddings, n_embd: int) -> Callable[..., int]:
    """Return the function by which the native library finds embeddings (ec_look_up)."""

    def look_up(tokens: "ctypes._Pointer[ctypes.c_int32]", n: int, out: int, stride: int) -> int:
        try:
            rows = embeddings(np.ctypeslib.as_array(tokens, (n,)))
        except BaseException as error:  # Ctrl-C as well: no exception can pass through native code
            return carry(error)
        flat = np.ctypeslib.as_array((ctypes.c_float * ((n - 1) * stride + n_embd)).from_address(out))
        np.lib.stride_tricks.as_strided(flat, (n, n_embd), (4 * stride, 4))[:] = rows
        return OK

    return look_up

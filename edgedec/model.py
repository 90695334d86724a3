"""What a runtime loads (edgedec.runtime): weights (`Model`), which open sessions with a KV cache each (`Session`).

`n_past` is the number of tokens in a session's KV cache that a forward builds on; a *row* is one new token of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.callers import one_line
from edgedec.closeable import Closeable
from edgedec.cost_curve import Cost, SharedForward
from edgedec.errors import CapabilityError, argument
from edgedec.head_state import DraftCall, HeadState
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.memory_plan import MemoryTerm
from edgedec.model_card import Capabilities, ModelCard
from edgedec.pictures import Block
from edgedec.progress import OnProgress
from edgedec.sampling import SamplingParams
from edgedec.stats import DecodeStats
from edgedec.tokenizer import Tokenizer

Rows = Literal["all", "last"] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Which half-layers a forward runs; a half-layer that is left out passes the hidden state on unchanged.

    Attributes:
        attn: bool[n_layer], whether the attention block of each layer runs.
        mlp: bool[n_layer], whether the feed-forward block of each layer runs.
    """

    attn: NDArray[np.bool_]
    mlp: NDArray[np.bool_]

    @classmethod
    def of(cls, n_layer: int, keep: Sequence[int]) -> "LayerSet":
        """Return the set that runs exactly the layers in `keep`, both attention and feed-forward."""
        mask = np.zeros(n_layer, dtype=np.bool_)
        mask[list(keep)] = True
        return cls(attn=mask, mlp=mask.copy())

    @property
    def mask(self) -> NDArray[np.bool_]:
        """bool[n_layer, 2]: whether each layer's attention and feed-forward block run."""
        return np.stack([self.attn, self.mlp], axis=1)


@dataclass(slots=True)
class Forward:
    """The result of a forward; its arrays are views that are valid until the model's next forward, unless `is_own`.

    Attributes:
        logits: f32[n_wanted, n_vocab], the logits of the rows in `ForwardItem.rows`, in their order.
        hidden: For each tapped layer f32[n, n_embd], the hidden state of all n rows after that layer.
        ops: The functions that sampling calls on rows of logits.
        best: The most probable token of each row of logits, the lowest id on a tie; empty where the runtime leaves it
            to the caller to look for it.
        mass: f32[n_layers, n_heads, n_past + n], what `ForwardItem.mass` asked for; 0 where a layer has no such head.
        is_own: Whether the arrays belong to this result, and stay valid.
    """

    logits: NDArray[np.float32]
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    ops: LogitOps = NUMPY_ROW_OPS
    best: list[int] = field(default_factory=list)
    mass: NDArray[np.float32] | None = None
    is_own: bool = False

    __repr__ = one_line


@dataclass(slots=True)  # not frozen, as that takes a microsecond to make
class ForwardItem:
    """One session's part of a forward.

    Attributes:
        session: The session that the rows are added to.
        n_past: Cached tokens that the rows build on; what the cache holds beyond them is dropped.
        tokens: int32[n], the token of each row; None when `hidden` is given.
        hidden: f32[n, n_embd], the hidden states to resume from after layer `resume_after`, or None.
        resume_after: The layer that `hidden` is the output of; -1 for vectors in place of embeddings. Each further
            n_embd numbers of such a vector are added to the state behind one layer more, from layer 0 on.
        parents: int32[n], the index of each row's parent, which is below the row's own, or -1 for the cached prefix.
            None for a chain.
        layers: The layers to run; None for all.
        rows: The rows whose logits to return: "all", "last" or int32 row indices, ascending.
        taps: The layers whose output to return for every row.
        block: The picture's block that the vectors belong to; None for vectors that stand as tokens do. Of tokens: a
            mutual block of n positions, counted from 0: a row also sees those rows behind it that are in its n.
        first: The number of the first row within the block, whose earlier rows are the last cached ones.
        mass: Layers, and f32[w]: the attention of each head of these layers in the item's last w rows is added up by
            the position that it goes to, each row's times its number. None for none.
        positions: int32[n], the position that each row of a chain turns to; None where each one stands behind the
            farthest before it. Which rows see each other depends on slots alone.
    """

    session: "Session"
    n_past: int
    tokens: NDArray[np.int32] | None = None
    hidden: NDArray[np.float32] | None = None
    resume_after: int | None = None
    parents: NDArray[np.int32] | None = None
    layers: LayerSet | None = None
    rows: Rows = "last"
    taps: tuple[int, ...] = ()
    block: Block | None = None
    first: int = 0
    mass: tuple[tuple[int, ...], NDArray[np.float32]] | None = None
    positions: NDArray[np.int32] | None = None

    @property
    def n_rows(self) -> int:
        """How many rows there are, of tokens or of vectors."""
        return sum(len(rows) for rows in (self.tokens, self.hidden) if rows is not None)

    @property
    def is_chain(self) -> bool:
        """Whether the rows are a chain of tokens through all layers, of which only logits are wanted."""
        special = (self.hidden, self.resume_after, self.parents, self.layers, self.block, self.mass, self.positions)
        return self.tokens is not None and not self.taps and all(option is None for option in special)


class Session(Protocol):
    """One sequence's KV cache. One thread at a time uses a session; any thread may call cancel().

    A class that derives from it inherits the methods that have a body here. A runtime implements evaluate();
    edgedec.sessions.outer_session has the base of sessions around another one.
    """

    @property
    def model(self) -> "Model":
        """The model this session belongs to."""

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix (branches of a tree not included)."""

    @property
    def n_text_max(self) -> int:
        """Most tokens of a text on this session: n_ctx, or more where the context slides."""
        return self.n_ctx

    @property
    def shared(self) -> SharedForward | None:
        """The latest forward, where forwards are shared with other sessions; None where they never are."""
        return None

    @property
    def draft_head(self) -> HeadState | None:
        """The trained draft head that follows the session's text; None where none was loaded."""
        return None

    @property
    def scales(self) -> tuple[float, ...]:
        """What the part of each of ModelCard.adapters is multiplied by; 0 leaves an adapter out."""
        return ()

    def adapt(self, scales: tuple[float, ...]) -> None:
        """Set other scales of the adapters; the session holds no token then."""
        raise CapabilityError(f"no adapters can be used here; leave {argument('lora')} out")

    def room(self, n_tokens: int) -> int:
        """Return how many rows one forward may add to a text of `n_tokens` tokens."""
        return self.n_ctx - n_tokens

    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0
    ) -> AbstractContextManager[None]:
        """Begin a text whose first `n_prompt` tokens are its prompt; the text ends with the block.

        `sampling` and `seed` say how its tokens are drawn; None where none are.
        """
        return nullcontext()

    def count_text(self, stats: DecodeStats, n_generated: int) -> None:
        """Add to the statistics what the session knows of the latest text's first `n_generated` generated tokens."""
        return

    # A parameter for each attribute of an item, so that a forward of one session needs no item.
    def forward(
        self,
        tokens: NDArray[np.int32] | None = None,
        *,
        n_past: int,
        hidden: NDArray[np.float32] | None = None,
        resume_after: int | None = None,
        parents: NDArray[np.int32] | None = None,
        layers: LayerSet | None = None,
        rows: Rows = "last",
        taps: tuple[int, ...] = (),
        block: Block | None = None,
        first: int = 0,
        mass: tuple[tuple[int, ...], NDArray[np.float32]] | None = None,
        positions: NDArray[np.int32] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate new rows; evaluate() with an item of these attributes."""
        special = (layers, rows, taps, block, first, mass, positions)
        return self.evaluate(ForwardItem(self, n_past, tokens, hidden, resume_after, parents, *special), on_progress)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item of this session: new rows after the first `item.n_past` cached tokens.

        `on_progress` is called with the tokens of a long prefill. After an item with `parents` the session is branched:
        call keep(), or go back to its n_past or below.

        Raises:
            ContextFullError: n_past and the rows together are over n_ctx; nothing was evaluated.
            SessionError: n_past is over n_cached, or the session is closed.
            CapabilityError: The runtime does not declare what the forward needs.
            RequestError: A token id is outside the vocabulary, or `parents` or `rows` are malformed.
            CancelledError: cancel() was called; n_cached counts the chunks that were completed.
        """

    def answer(self, calls: Sequence[tuple["Session", DraftCall]]) -> list[SharedForward]:
        """Answer calls of one kind, which drafters make for this session's text and for those of forks of it.

        Returns what each of them was answered together with: a session may join them with calls for other texts. Raises
        what DraftCall.answer raises.
        """
        begun, (first, *others) = perf_counter(), [call for _, call in calls]
        first.answer(others)
        n_rows = sum(call.n_rows for _, call in calls)
        return [SharedForward(perf_counter() - begun, n_rows, len(calls))] * len(calls)

    def exact_rows(self, n_past: int) -> int | None:
        """Return how many rows of a forward at `n_past` may have the bits of single steps, as far as is known.

        None where no two rows have them, neither at `n_past` nor in a longer context. Evaluates nothing. By default it
        is what the model says for contexts of any length.
        """
        claim, most = self.model.batch_invariant, self.model.capabilities.max_rows
        exact = most if claim is True else min(claim, most)
        return exact if exact > 1 else None

    def has_exact_rows(self, n_past: int, n_rows: int, *, measure: bool = True) -> bool:
        """Return whether `n_rows` rows of a forward at `n_past`, and steps after them, have the bits of single steps.

        A runtime that has to measure this does so here, once for contexts of about this length, with forwards of its
        own at `n_past` (raises what they raise). With `measure` False, what is not known yet is False. By default it
        is what exact_rows() says.
        """
        return n_rows <= (self.exact_rows(n_past) or 1)

    def measuring_s(self, n_rows: int, cost: Cost) -> float:
        """Return the seconds that has_exact_rows() takes where it has to measure `n_rows` rows; 0 by default.

        `cost` says what a forward takes by the number of rows beyond the first.
        """
        return 0.0

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree (a root first, each row the parent of the next); drop its other rows.

        Raises:
            SessionError: The session is not branched.
            RequestError: `rows` is no path from a root.
        """

    def fork(self) -> "Session":
        """Open a second session that shares this one's cached prefix (CapabilityError where that can't be done)."""

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Load what is kept of a prompt behind `n_held` tokens, with the bits of reading it; return n_cached then."""
        return n_held

    def save(self) -> bytes:
        """Return the cached KV as bytes, which only the same model, runtime version and options can load."""

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned for `n_tokens` cached tokens (ModelFormatError when it does not fit)."""

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; does nothing where no forward is running."""

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""


class EncoderSession(Session, Protocol):
    """A session of a model that declares `final_states`."""

    def final_states(self, tokens: NDArray[np.int32], n_first: int | None = None) -> NDArray[np.float32]:
        """Return f32[n, n_embd], what the model makes of each token of a text; the cache is empty afterwards.

        Args:
            tokens: int32[n].
            n_first: How many tokens belong to the first of two texts, for a model that was trained on pairs; None for
                one text.

        Raises:
            SessionError: The session is closed.
            CancelledError: cancel() was called.
        """


class Model(Closeable, Protocol):
    """Loaded weights, shared by the sessions opened on them."""

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""

    @property
    def capabilities(self) -> Capabilities:
        """What this runtime can do with this model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""

    @property
    def batch_invariant(self) -> int | Literal[True]:
        """How many rows of one forward are bit-equal to single steps: True for any number, or the largest number.

        True holds in contexts of any length. A number holds in short contexts; Session.exact_rows says what holds in
        longer ones. A number covers chains, keep() and, with the capability `exact_trees`, trees; True also covers
        forks and several sessions in one forward. A runtime that has to measure the number measures it at the first
        read, with forwards of its own (which end the validity of earlier views), and remembers it.
        """

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""

    def session(self, n_ctx: int) -> Session:
        """Open an empty session of that many tokens (MemoryCapError when the system refuses the memory)."""

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions; return a result for each item (raises what Session.evaluate raises)."""

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""


def writes_texts(model: Model) -> bool:
    """Return whether a model was trained to write texts, and not to embed or rank them."""
    return model.card.pooling is None and not model.capabilities.final_states

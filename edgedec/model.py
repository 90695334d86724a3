"""What a runtime loads (edgedec.runtime): weights (`Model`), which open sessions with a KV cache each (`Session`).

`n_past` is the number of tokens in a session's KV cache that a forward builds on; a *row* is one new token of it.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.callers import one_line
from edgedec.closeable import Closeable
from edgedec.cost_curve import SharedForward
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
        shared: The forward with the rows of all sessions in it, where several may have had some; else None.
    """

    logits: NDArray[np.float32]
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    ops: LogitOps = NUMPY_ROW_OPS
    best: list[int] = field(default_factory=list)
    mass: NDArray[np.float32] | None = None
    is_own: bool = False
    shared: SharedForward | None = None

    __repr__ = one_line


class ExactRows(NamedTuple):
    """How many rows of a forward have the bits of single steps.

    Attributes:
        sure: So many rows have them.
        possible: So many may have them, as far as is known. None where no two rows have them, neither at this n_past
            nor in a longer context.
    """

    sure: int
    possible: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """The layers that rows pass: from `enter` on to before `leave` (None: to the end), but for those not in `layers`.

    Vectors that enter layer 0 stand in place of embeddings; at a later one they are what left the layer before.
    """

    enter: int = 0
    leave: int | None = None
    layers: LayerSet | None = None


ALL_LAYERS = Span()


@dataclass(slots=True)  # not frozen, as that takes a microsecond to make
class RowGroup:
    """Rows of a forward that pass the same layers: tokens, or vectors.

    Attributes:
        tokens: int32[n], the token of each row; None for vectors.
        vectors: f32[n, n_embd], what enters the span; None for tokens. In place of embeddings, each further n_embd
            numbers of a vector are added to the state behind one layer more, from layer 0 on.
        span: The layers that the rows pass.
        sees: None for a chain, whose rows see all before them. int32[n] for a tree: the number of each row's parent in
            the item, below the row's own, or -1 for the cached prefix. A block, whose rows see each other where it is
            mutual: of a picture's vectors; of tokens, counted from position 0 in such blocks.
        positions: int32[n], the position that each row of a chain of tokens turns to; None where each one stands
            behind the farthest before it. Which rows see each other depends on slots alone.
    """

    tokens: NDArray[np.int32] | None = None
    vectors: NDArray[np.float32] | None = None
    span: Span = ALL_LAYERS
    sees: NDArray[np.int32] | Block | None = None
    positions: NDArray[np.int32] | None = None

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        rows = self.vectors if self.tokens is None else self.tokens
        return 0 if rows is None else len(rows)

    @property
    def parents(self) -> NDArray[np.int32] | None:
        """The parents of a tree's rows; None where the rows are no tree."""
        return None if isinstance(self.sees, Block) else self.sees

    @property
    def block(self) -> Block | None:
        """The block that the rows are; None where they are none."""
        return self.sees if isinstance(self.sees, Block) else None

    def part(self, begin: int, end: int) -> "RowGroup":
        """Return the rows [begin, end) of a chain or of a block."""
        return replace(
            self,
            tokens=None if self.tokens is None else self.tokens[begin:end],
            vectors=None if self.vectors is None else self.vectors[begin:end],
            sees=None if self.block is None else replace(self.block, first=self.block.first + begin),
            positions=None if self.positions is None else self.positions[begin:end],
        )


@dataclass(slots=True)
class ForwardItem:
    """One session's part of a forward: rows, which take the slots behind the cached tokens in their order.

    Attributes:
        session: The session that the rows are added to.
        n_past: Cached tokens that the rows build on; what the cache holds beyond them is dropped.
        groups: The rows, in groups that pass the same layers. Rows that enter behind layer 0 go on where an earlier
            forward left them: below, their slots hold its keys and values.
        rows: The rows whose logits to return: "all", "last" or int32 row numbers, ascending.
        taps: The layers whose output to return for every row; a row that enters later has there what it enters with.
        mass: By layer f32[w]: the attention of each of its heads in the item's last w rows is added up by the position
            that it goes to, each row's times its number. The same w for all layers.
    """

    session: "Session"
    n_past: int
    groups: tuple[RowGroup, ...]
    rows: Rows = "last"
    taps: tuple[int, ...] = ()
    mass: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """How many rows there are in all groups."""
        return sum(group.n_rows for group in self.groups)

    @property
    def logit_rows(self) -> NDArray[np.int32]:
        """The numbers of the rows whose logits are wanted, as far as `rows` is in order."""
        if not isinstance(self.rows, str):
            return self.rows
        return np.arange(0 if self.rows == "all" else self.n_rows - 1, self.n_rows, dtype=np.int32)

    @property
    def is_tree(self) -> bool:
        """Whether some rows have parents, so that one path is to be kept."""
        return any(group.parents is not None for group in self.groups)

    @property
    def group(self) -> RowGroup:
        """The first group; a group without rows, which every runtime refuses, where there is none."""
        return self.groups[0] if self.groups else RowGroup()

    @property
    def chain(self) -> NDArray[np.int32] | None:
        """The tokens, where they are a chain through all layers of which only logits are wanted; else None."""
        group = self.group
        is_plain = group.span == ALL_LAYERS and group.sees is None and group.positions is None
        return group.tokens if is_plain and len(self.groups) == 1 and not self.taps and not self.mass else None


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
        """Most tokens of a text on this session; room(0) is how many the KV cache holds at a time."""

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix (branches of a tree not included)."""

    @property
    def draft_head(self) -> HeadState | None:
        """The trained draft head that follows the session's text; None where none was loaded."""
        return None

    @property
    def scales(self) -> tuple[float, ...]:
        """What the part of each of ModelCard.adapters is multiplied by; 0 leaves an adapter out.

        To set it empties the session (CapabilityError: the session has no adapters).
        """
        return ()

    @scales.setter
    def scales(self, scales: tuple[float, ...]) -> None:
        raise CapabilityError(f"no adapters can be used here; leave {argument('lora')} out")

    def room(self, n_tokens: int) -> int:
        """Return how many rows one forward may add to a text of `n_tokens` tokens."""
        return self.n_ctx - n_tokens

    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> AbstractContextManager[None]:
        """Begin a text whose first `n_prompt` tokens are its prompt; the text ends with the block.

        `sampling` and `seed` say how its tokens are drawn; None where none are. At the end of the block, the session
        adds to `stats` what it knows of the prompt and of the first `stats.n_generated_tokens` tokens behind it.
        """
        return nullcontext()

    def forward(
        self,
        tokens: NDArray[np.int32],
        *,
        n_past: int,
        parents: NDArray[np.int32] | None = None,
        layers: LayerSet | None = None,
        rows: Rows = "last",
        taps: tuple[int, ...] = (),
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate tokens, a chain or a tree; evaluate() with an item of one group."""
        groups = (RowGroup(tokens, span=ALL_LAYERS if layers is None else Span(layers=layers), sees=parents),)
        return self.evaluate(ForwardItem(self, n_past, groups, rows, taps), on_progress)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item of this session: new rows after the first `item.n_past` cached tokens.

        `on_progress` is called with the tokens of a long prefill. After an item with a tree the session is branched:
        call keep(), or go back to its n_past or below.

        Raises:
            ContextFullError: n_past and the rows together are over n_ctx; nothing was evaluated.
            SessionError: n_past is over n_cached, or the session is closed.
            CapabilityError: The runtime does not declare what the forward needs.
            RequestError: A token id is outside the vocabulary, or parents or rows are malformed.
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

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return how many rows of a forward at `n_past`, and steps after them, have the bits of single steps.

        By default it is what the model says for contexts of any length. Where `measure` rows may have them, a runtime
        that does not know it measures it, once for contexts of about this length, with forwards of its own at `n_past`
        (raises what they raise).
        """
        claim, most = self.model.batch_invariant, self.model.capabilities.max_rows
        exact = most if claim is True else min(claim, most)
        return ExactRows(exact, exact if exact > 1 else None)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree (a root first, each row the parent of the next); drop its other rows.

        Raises:
            SessionError: The session is not branched.
            RequestError: `rows` is no path from a root.
        """

    def fork(self) -> "Session":
        """Open a second session that shares this one's cached prefix (CapabilityError where that can't be done)."""

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


@runtime_checkable
class RecallingSession(Protocol):
    """A session that takes back what its runtime keeps of earlier prompts elsewhere, such as on the disk."""

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Load what is kept of a prompt behind `n_held` tokens, with the bits of reading it; return n_cached then."""


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

"""What a runtime is: loaded weights (`Model`), one sequence's KV cache on them (`Session`), one way in (`forward`).

A runtime implements these protocols and is found by entry point (group `edgedec.runtimes`). Names: `n_past` is the
number of tokens already in a session's KV cache that a forward builds on; a *row* is one new token of a forward.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, RequestError
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress
from edgedec.stats import DecodeStats
from edgedec.tokenizer import Tokenizer

Rows = Literal["all", "last"] | NDArray[np.int32]
_COUNTS = ("n_ctx", "n_parallel", "max_rows", "n_threads", "resident_bytes", "planning_bytes", "n_gpu_layers")


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Which half-layers a forward runs; those left out pass the hidden state through unchanged.

    Attributes:
        attn: bool[n_layer], attention block of each layer.
        mlp: bool[n_layer], feed-forward block of each layer.
    """

    attn: NDArray[np.bool_]
    mlp: NDArray[np.bool_]

    @classmethod
    def of(cls, n_layer: int, keep: Sequence[int]) -> "LayerSet":
        """Build the set that runs exactly the layers in `keep`, attention and feed-forward alike."""
        mask = np.zeros(n_layer, dtype=np.bool_)
        mask[list(keep)] = True
        return cls(attn=mask, mlp=mask.copy())


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do with one model; checked when the engine is built, never found out half-way.

    Attributes:
        rollback: `n_past` may be any value up to the tokens cached (False for most recurrent models, where it may
            only be the tokens cached, or 0).
        trees: `parents` may describe a tree.
        exact_trees: Rows of a tree are bit-equal to their chains as far as `batch_invariant` says; where they are not,
            strict numerics verify chains only.
        fork: A session can be forked, sharing its prefix.
        layers: `layers` may be a subset.
        taps: Hidden states after given layers can be returned.
        hidden_input: A forward can start from hidden states instead of tokens.
        max_rows: Most rows of logits that one forward returns.
        prefill_chunk: A prefill is evaluated in chunks that end at multiples of this many positions, and a prefix
            reused up to such a border has a cold start's bits; 1 where the bits don't depend on the chunks at all.
    """

    rollback: bool = True
    trees: bool = False
    exact_trees: bool = True
    fork: bool = False
    layers: bool = False
    taps: bool = False
    hidden_input: bool = False
    max_rows: int = 64
    prefill_chunk: int = 512

    def require(self, name: str, runtime: str) -> None:
        """Raise CapabilityError unless the capability of that name is there."""
        if not getattr(self, name):
            raise CapabilityError(
                f"the {runtime} runtime cannot do '{name}' for this model; "
                f"choose another runtime (edgedec doctor lists them) or leave the option out"
            )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts of a loaded model that the engine needs.

    Attributes:
        name: As the file calls itself; may be empty.
        architecture: As in the file ("llama", "qwen2", ...).
        runtime: Name of the runtime that loaded it.
        n_vocab: Length of a row of logits.
        n_embd: Length of a hidden state.
        n_layer: Number of layers.
        n_ctx_train: Longest context the model was trained for, in tokens.
        fingerprint: Identifies the weights and the numerics (file header, library version, options that
            change a logit); key of every cache.
        chat_template: Jinja source, or None.
        sampling_defaults: Options that the file recommends, by the names of SamplingParams.
        left_out: The half-layers (layer, 0 for attention or 1 for feed-forward) that no forward runs (lossy).
        share: Of the bytes of weights that a token of the whole model reads, those that one reads here; 0 to 1.
    """

    name: str
    architecture: str
    runtime: str
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_train: int
    fingerprint: str
    chat_template: str | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[tuple[int, int], ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Forward:
    """Result of a forward over n rows; the arrays are views that hold until the model's next forward.

    Attributes:
        logits: f32[n_rows, n_vocab], for the rows asked for, in their order.
        hidden: For each tapped layer, f32[n, n_embd]: the hidden state after that layer, for every row.
        ops: What to go over rows of logits with.
    """

    logits: NDArray[np.float32]
    hidden: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    ops: LogitOps = NUMPY_ROW_OPS


@dataclass(frozen=True, slots=True)
class ForwardItem:
    """One session's part of a forward.

    Attributes:
        session: Where the rows go.
        n_past: Cached tokens to build on; whatever the cache holds beyond is dropped.
        tokens: int32[n], or None when `hidden` is given.
        hidden: f32[n, n_embd], the hidden state to resume from after layer `resume_after`, or None.
        resume_after: The layer whose output `hidden` is.
        parents: int32[n], row index of each row's parent, -1 for the cached prefix; None for a chain. A parent
            stands before its children.
        layers: Subset of layers to run; None for all.
        rows: Which rows' logits to return: "all", "last" or int32 row indices, ascending.
        taps: Layers whose output to return for every row.
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


@dataclass(frozen=True, slots=True)
class SharedForward:
    """A forward that several sessions may have had rows in.

    Attributes:
        seconds: Its time.
        n_rows: Rows of all sessions in it.
        n_items: How many sessions had rows in it.
    """

    seconds: float = 0.0
    n_rows: int = 0
    n_items: int = 1


class Session(Protocol):
    """One sequence's KV cache. Used by one thread at a time, but for cancel().

    A class that derives from Session inherits `n_text_max`, `shared`, `room`, `generating`, `count_text` and `open`,
    with what holds for a runtime's own session: a text is at most as long as the KV cache, and no forward is shared.
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

    def room(self, n_tokens: int) -> int:
        """Return how many rows one forward may add to a text of `n_tokens` tokens."""
        return self.n_ctx - n_tokens

    def generating(self, n_prompt: int) -> AbstractContextManager[None]:
        """Begin a text whose first `n_prompt` tokens are its prompt; the text ends with the block."""
        return nullcontext()

    def count_text(self, stats: DecodeStats, n_generated: int) -> None:
        """Add to the statistics what the session knows of the latest text's first `n_generated` generated tokens."""
        return

    def open(self, n_ctx: int) -> "Session":
        """Open an empty session on the same model, whose forwards are shared with others' where this one's are."""
        return self.model.session(n_ctx)

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
        on_progress: OnProgress | None = None,
    ) -> Forward:
        """Evaluate new rows on top of the first `n_past` cached tokens; the one-element case of Model.forward.

        After a forward with `parents` the session is branched: call `keep`, or the next forward's n_past must be
        at or below this one's.

        Raises:
            ContextFullError: n_past + rows is over n_ctx; nothing was evaluated.
            SessionError: n_past over n_cached, the session is branched or closed.
            CapabilityError: Something that the runtime does not declare.
            RequestError: A token id outside the vocabulary, a malformed `parents`.
            CancelledError: cancel() was called; n_cached is at the last complete chunk.
        """

    def exact_rows(self, n_past: int) -> int | None:
        """Return how many rows of a forward at `n_past` may have the bits of single steps, as far as is known.

        None: no two rows have them, neither here nor in a longer context. Evaluates nothing.
        """

    def has_exact_rows(self, n_past: int, n_rows: int) -> bool:
        """Tell whether `n_rows` rows of a forward at `n_past` have the bits of single steps, and so have the steps
        after them.

        A runtime that has to measure this does so here, once for contexts of about this length, with forwards of its
        own at `n_past` (raises what they raise).
        """

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` (root first, each the parent of the next) of the last tree and drop its other rows.

        Raises:
            SessionError: The session is not branched.
            RequestError: `rows` is no path from the root.
        """

    def fork(self) -> "Session":
        """Open a second session that shares this one's cached prefix (CapabilityError where it can't)."""

    def save(self) -> bytes:
        """Serialize the cached KV; only the same model, runtime version and options can load it."""

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned for a cache of `n_tokens` tokens (ModelFormatError when it does not fit)."""

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""


class Model(Protocol):
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
        """How far the rows of a forward are bit-equal to single steps: True for any n, or the largest n.

        True holds in contexts of any length; a number holds in short ones, and Session.exact_rows says what holds in
        others. A runtime that has to measure this does so at the first read, with forwards of its own (which end the
        validity of earlier views), and remembers the answer. A number covers chains, keep() and, with the capability
        `exact_trees`, trees; forks and several sessions in one forward only where it is True.
        """

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""

    def session(self, n_ctx: int) -> Session:
        """Open an empty session of that many tokens (MemoryCapError when the system refuses the memory)."""

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions together; the one way into a model."""

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a runtime loads a model; a runtime refuses what it can't honour.

    Attributes:
        n_ctx: Tokens of a session that the caller means to open; None for min(trained, 4,096).
        n_parallel: Sessions of that size that share one forward.
        max_rows: Most rows of logits that one forward returns: a draft's nodes and one. 1 saves the memory that
            trees and forks need.
        n_threads: Threads of a forward; None for the cores this process may use.
        kv_type: Element type of the KV cache ("f16", "q8_0", ...).
        flash_attention: True, False, or None to let the runtime decide.
        mmap: Map the weights from the file instead of copying them.
        repack: Rearrange weights for speed where the runtime can, at the price of private memory.
        tile_cache: Keep weights that a runtime rearranged on the disk, below `cache_dir` (None there: the platform's
            default), so that the next start maps them.
        resident_bytes: Most bytes of weights that may be in memory; the others are read from the disk in each forward,
            which says how fast that can be in the memory plan. None for all of them.
        planning_bytes: What making the memory plan may take, for a while, beside what the process holds already; None:
            any. A runtime that would take more returns the terms that it knows without (MemoryTerm.partial).
        n_gpu_layers: Layers on the GPU; 0 for none, None for the runtime's default, -1 for all.
        device: Name of the device (`edgedec doctor` lists them), or None.
        cache_dir: Root of edgedec's cache, for what a runtime remembers between starts; None: remember nothing.
        on_progress: Called while loading; from the calling thread.
        cancel: Stops the loading.
    """

    n_ctx: int | None = None
    n_parallel: int = 1
    max_rows: int = 16
    n_threads: int | None = None
    kv_type: str = "f16"
    flash_attention: bool | None = None
    mmap: bool = True
    repack: bool = True
    tile_cache: bool = False
    resident_bytes: int | None = None
    planning_bytes: int | None = None
    n_gpu_layers: int | None = None
    device: str | None = None
    cache_dir: Path | None = None
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise RequestError(f"{name} is {value!r}; it must be a whole number")


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """What `edgedec doctor` says of a runtime: version, devices, and anything worth knowing."""

    version: str
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Runtime(Protocol):
    """What an entry point of `edgedec.runtimes` names: a class without arguments, or an object."""

    name: str

    def accepts(self, path: Path) -> str | None:
        """Return None when this runtime runs the model, else the reason why not; reads only the header."""

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan before anything sizeable is loaded."""

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load the weights.

        Raises:
            ModelError: The file can't be used; RuntimeUnavailableError, MemoryCapError, CancelledError likewise.
        """

    def report(self) -> RuntimeReport:
        """Describe the runtime on this machine (RuntimeUnavailableError where it does not work)."""


def default_n_ctx(n_ctx_train: int) -> int:
    """Return the context used when none is asked for: what the model was trained for, at most 4,096 tokens."""
    return min(n_ctx_train, 4096) if n_ctx_train > 0 else 4096

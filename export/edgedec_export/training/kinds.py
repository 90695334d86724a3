"""The kinds of drafters that are trained: what differs between a head, a block drafter and a narrow draft model."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec.errors import OptionError, RuntimeUnavailableError
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.gguf.tensor_types import GGMLType
from edgedec.plugins import install_command
from edgedec_export.block_types import BLOCK_ENCODERS
from edgedec_export.gguf_writer import OutTensor, new_file, write_gguf
from edgedec_export.target_rows import output_name
from edgedec_export.training import short_list
from edgedec_export.training.block.shape import block_card, block_shape, price_of
from edgedec_export.training.head_folder import write_head
from edgedec_export.training.lessons.lesson_files import LessonFile
from edgedec_export.training.narrow import gguf as narrow_gguf
from edgedec_export.training.narrow.shape import NarrowShape, shape_of
from edgedec_export.training.report import drafted_token_share
from edgedec_export.training.simulation import Drafted, reach
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard, Promise, RowShape
from edgedec_runtimes.trained_heads.gguf_split import OF_EXIT, OF_ROWS, split_metadata
from edgedec_runtimes.trained_heads.record import record_text
from edgedec_runtimes.trained_heads.row_places import best_places
from edgedec_runtimes.trained_heads.target import target_of

Files = Sequence[LessonFile]
TokenIds = NDArray[np.int32]
Weights = dict[str, Any]  # torch's tensors by name

if TYPE_CHECKING:
    from edgedec_export.training.block.student import BlockStudent
    from edgedec_export.training.head_student import HeadStudent
    from edgedec_export.training.learning import Student


_FITTED_FILES = 16  # of lessons, to which a new draft model's output is fitted


@dataclass(frozen=True, kw_only=True)
class AskedShape:
    """What a user asks of a drafter's shape; None for the default of its kind.

    Attributes:
        n_layers: Layers of a block drafter, None for two; or of a draft model, None for four.
        width: Elements of a draft model's hidden states; None for a third of the target's.
        block: Tokens that a block drafts; None for six, or for eight where the target is wide.
        rank: Rank of a block drafter's Markov head; None for 64, or for 128 where the target is wide.
    """

    n_layers: int | None = None
    width: int | None = None
    block: int | None = None
    rank: int | None = None


_TAKES: dict[str, tuple[str, ...]] = dict.fromkeys(("head", "block", "model", "transfer", "prompts", "exit"), ())
_TAKES |= {"block": ("n_layers", "block", "rank"), "model": ("n_layers", "width")}
N_ROWS = 3
"""Rows behind a token's, of the kinds that draft with rows in the target's own layers."""


@dataclass(kw_only=True)
class Kind(ABC):
    """A kind of drafter, for one target.

    Attributes:
        parts: The target.
        called: What the drafter is called in a sentence.
        checkpoint: The name of the file of checkpoints, beside the answers, which all kinds share.
        coverage: The share of the answers' tokens that it learns to tell apart, unless their number is given.
        n_rows: Rows of a batch.
        n_measurements: How often it is measured while it learns.
        n_measured: On how many answers; None for all that are held back.
    """

    parts: TargetParts

    called: ClassVar[str]
    checkpoint: ClassVar[str]
    coverage: ClassVar[float] = short_list.COVERAGE
    n_rows: ClassVar[int] = 2048
    n_measurements: ClassVar[int] = 16
    n_measured: ClassVar[int | None] = None

    @property
    def key(self) -> str:
        """A text that differs where two drafters of this kind differ in shape: nothing where the target decides it."""
        return ""

    @abstractmethod
    def new_student(self, token_ids: TokenIds, files: Files, *, seed: int, device: str) -> "Student":
        """Return a drafter with its tokens that has learned nothing."""

    @abstractmethod
    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return what a draft costs, in plain steps.

        Args:
            n_tokens: How many tokens can be drafted.
            drafted: What was drafted on answers held back.
            curve: What forwards cost.
        """

    @abstractmethod
    def write(self, out: Path, weights: Weights, token_ids: TokenIds, promise: Promise, about: dict[str, Any]) -> None:
        """Write the drafter with these tensors; `about` is the recipe and the report, for its record."""


@dataclass(kw_only=True)
class HeadKind(Kind):
    """Heads."""

    called = "the head"
    checkpoint = "checkpoint.pt"

    def card(self, n_tokens: int) -> HeadCard:
        """Return the card of a head that can draft so many tokens."""
        return card_of(self.parts, "", n_tokens, target_of(self.parts.gguf))

    def _student(self) -> "type[HeadStudent | BlockStudent]":
        from edgedec_export.training.head_student import HeadStudent

        return HeadStudent

    def new_student(self, token_ids: TokenIds, files: Files, *, seed: int, device: str) -> "Student":
        """Return a head; see Kind."""
        card, lessons = self.card(len(token_ids)), [lesson for lesson in files[0].read() if lesson.n_answer > 1]
        return self._student()(self.parts, card, token_ids, lessons, seed=seed, device=device)

    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return what a draft costs; see Kind."""
        return DraftPrice(drafted_token_share(self.card(n_tokens), bytes_per_step(self.parts), row_bytes(self.parts)))

    def _finished(self, weights: Weights, token_ids: TokenIds) -> dict[str, NDArray[np.float32]]:
        from edgedec_export.training.network import folded

        return folded(weights)

    def write(self, out: Path, weights: Weights, token_ids: TokenIds, promise: Promise, about: dict[str, Any]) -> None:
        """Write the head's folder."""
        card = replace(self.card(len(token_ids)), name=out.name, promise=promise)
        write_head(out, card, self._finished(weights, token_ids), token_ids, about)


@dataclass(kw_only=True)
class BlockKind(HeadKind):
    """Block drafters, whose blocks have the shape `shape`."""

    shape: BlockShape
    called = "the block drafter"
    checkpoint = "checkpoint-block.pt"
    n_measured = 96

    @property
    def key(self) -> str:
        """The shape."""
        return f" {self.shape}"

    def card(self, n_tokens: int) -> HeadCard:
        """Return the card; see HeadKind."""
        return block_card(self.parts, self.shape, n_tokens, target_of(self.parts.gguf))

    def _student(self) -> "type[HeadStudent | BlockStudent]":
        from edgedec_export.training.block.student import BlockStudent

        return BlockStudent

    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return what a draft costs, in plain steps: most of it once."""
        return price_of(self.card(n_tokens), bytes_per_step(self.parts), row_bytes(self.parts))

    def _finished(self, weights: Weights, token_ids: TokenIds) -> dict[str, NDArray[np.float32]]:
        from edgedec_export.training.block.network import finished

        return finished(self.card(len(token_ids)), weights, token_ids)


@dataclass(kw_only=True)
class NarrowKind(Kind):
    """Narrow draft models of the shape `shape`."""

    shape: NarrowShape
    called = "the draft model"
    checkpoint = "checkpoint-model.pt"
    coverage = 0.995
    n_rows = 512
    n_measurements = 8
    n_measured = 48

    @property
    def key(self) -> str:
        """The shape."""
        return f" {self.shape}"

    def new_student(self, token_ids: TokenIds, files: Files, *, seed: int, device: str) -> "Student":
        """Return a draft model, which begins with layers of the target and an output that is fitted to lessons."""
        from edgedec_export.training.narrow.initial import initial_weights
        from edgedec_export.training.narrow.student import NarrowStudent

        lessons = [lesson for file in files[:_FITTED_FILES] for lesson in file.read()]
        weights = initial_weights(self.parts, self.shape, lessons, seed)
        student = NarrowStudent(self.parts, self.shape, weights, token_ids, device)
        student.fit_output(lessons)
        return student

    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return what a draft costs, in plain steps; the output matrix is read whole for each token."""
        return DraftPrice(narrow_gguf.bytes_per_token(self.shape) / bytes_per_step(self.parts))

    def write(self, out: Path, weights: Weights, token_ids: TokenIds, promise: Promise, about: dict[str, Any]) -> None:
        """Write the GGUF."""
        arrays = {name: values.detach().cpu().float().numpy() for name, values in weights.items()}
        record = record_text(out.stem, target_of(self.parts.gguf), promise, about=about)
        narrow_gguf.write_narrow(out, self.parts, self.shape, arrays, record)


@dataclass(kw_only=True)
class SplitKind(Kind):
    """Heads that split the target's forwards, in a GGUF."""

    @abstractmethod
    def card(self, n_tokens: int) -> HeadCard:
        """Return the card of a head that can draft so many tokens."""

    def finished(self, weights: Weights) -> dict[str, NDArray[np.float32]]:
        """Return the head's tensors, named as in edgedec_runtimes.trained_heads.head."""
        return {name: values.detach().cpu().float().numpy() for name, values in weights.items()}

    def write(self, out: Path, weights: Weights, token_ids: TokenIds, promise: Promise, about: dict[str, Any]) -> None:
        """Write the GGUF with matrices of Q8_0."""
        record = record_text(out.stem, target_of(self.parts.gguf), promise, about=about)
        card, tensors = self.card(len(token_ids)), []
        for name, values in self.finished(weights).items():
            kind = GGMLType.Q8_0 if values.ndim == 2 and values.shape[1] % 32 == 0 else GGMLType.F32
            file_name = (OF_EXIT if card.exits else OF_ROWS)[name]
            data = BLOCK_ENCODERS[kind](values)
            tensors.append(OutTensor(file_name, values.shape[::-1], kind, partial(iter, [data])))
        with new_file(out, sources=self.parts.gguf.paths, force=True) as part:
            write_gguf(part, split_metadata(card, token_ids, record), tensors)


@dataclass(kw_only=True)
class RowKind(SplitKind):
    """Rows that draft in the target's own layers.

    Attributes:
        shape: How many there are, and the layer that they enter.
    """

    shape: RowShape
    called = "the rows"
    n_rows = 512
    n_measurements = 6
    n_measured = 48

    @property
    def checkpoint(self) -> str:  # type: ignore[override]
        """The name of the file of checkpoints."""
        return f"checkpoint-{'transfer' if self.shape.layer else 'prompts'}.pt"

    @property
    def key(self) -> str:
        """The shape."""
        return f" {self.shape}"

    def card(self, n_tokens: int) -> HeadCard:
        """Return the card; see SplitKind."""
        n, target = self.parts.network, target_of(self.parts.gguf)
        sizes = (n.n_embd, n.n_embd, 0, 0, 0, 0, n.rms_epsilon, 1.0, (), n_tokens, n.n_vocab)
        return HeadCard("", *sizes, target=target, rows=self.shape)

    def new_student(self, token_ids: TokenIds, files: Files, *, seed: int, device: str) -> "Student":
        """Return rows that begin as states, or as embeddings; nothing of them is random."""
        from edgedec_export.training.rows.student import RowStudent

        lessons = [lesson for lesson in files[0].read() if lesson.n_answer > 1]
        return RowStudent(self.parts, self.shape, token_ids, lessons, device=device)

    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return what a draft costs: the rows where they promise most, and reading the output rows once."""
        seconds = curve.up_to((self.shape.n + 1) ** 2)
        below, chances = self.shape.layer / self.parts.network.n_layer, reach(drafted, self.shape.n)
        placed = best_places(chances, self.shape.n, below, tuple(seconds))
        return DraftPrice(0.0, placed.extra + n_tokens * row_bytes(self.parts) / bytes_per_step(self.parts))

    def finished(self, weights: Weights) -> dict[str, NDArray[np.float32]]:
        """Return the tensors; see SplitKind."""
        from edgedec_export.training.rows.student import joined

        return joined(super().finished(weights), self.shape)


@dataclass(kw_only=True)
class ExitKind(SplitKind):
    """Exit heads, behind the first of the layers whose input lessons hold."""

    called = "the exit"
    checkpoint = "checkpoint-exit.pt"

    def card(self, n_tokens: int) -> HeadCard:
        """Return the card: the heads of the target's layers."""
        card = card_of(self.parts, "", n_tokens, target_of(self.parts.gguf))
        return replace(card, n_ff=0, taps=self.parts.taps[:1], exits=True)

    def new_student(self, token_ids: TokenIds, files: Files, *, seed: int, device: str) -> "Student":
        """Return an exit head, which begins as the attention block of the target's next layer."""
        from edgedec_export.training.exits.student import ExitStudent

        return ExitStudent(self.parts, self.card(len(token_ids)), token_ids, device=device)

    def price(self, n_tokens: int, drafted: Sequence[Drafted], curve: CostCurve) -> DraftPrice:
        """Return a draft's cost: a token reads the layers below, the attention block and the output rows."""
        n, read = self.parts.network, layer_bytes(self.parts.gguf.paths[0])
        block = GGMLType.Q4_0.block_bytes / 32 * n.n_embd * n.head_dim * 2 * (n.n_head + n.n_head_kv)
        n_bytes = int(read.halves[: self.parts.taps[0]].sum()) + block + n_tokens * row_bytes(self.parts)
        return DraftPrice(n_bytes / bytes_per_step(self.parts))


def kind_of(name: str, parts: TargetParts, asked: AskedShape) -> Kind:
    """Return a kind by its name.

    Args:
        name: "head", "block", "model", "transfer", "prompts" or "exit".
        parts: The target.
        asked: What is asked of the drafter's shape.

    Raises:
        OptionError: There is no such kind, it does not take what is asked, or it can't have this shape.
    """
    if name not in _TAKES:
        raise OptionError("kind", name, f"it must be one of {', '.join(_TAKES)}")
    for option in (each.name for each in fields(AskedShape)):
        value = getattr(asked, option)
        if value is not None and option not in _TAKES[name]:
            kinds = " and ".join(kind for kind, options in _TAKES.items() if option in options)
            raise OptionError(option, value, f"a drafter of the kind {name} has no such choice, only the kinds {kinds}")
    if name == "model":
        return NarrowKind(parts=parts, shape=shape_of(parts.network, asked.n_layers, asked.width))
    if name == "block":
        shape = block_shape(parts.network.n_embd, asked.n_layers, asked.block, asked.rank)
        return BlockKind(parts=parts, shape=shape)
    if name == "exit":
        return ExitKind(parts=parts)
    if name in ("transfer", "prompts"):
        rows = RowShape(N_ROWS, parts.taps[1] if name == "transfer" else 0)
        return RowKind(parts=parts, shape=rows)
    return HeadKind(parts=parts)


def row_bytes(parts: TargetParts) -> float:
    """Return the bytes of a row of the target's output matrix."""
    tensor = parts.gguf.tensors[output_name(parts.gguf)]
    return tensor.n_bytes / tensor.shape[1]


def bytes_per_step(parts: TargetParts) -> int:
    """Return the bytes of weights that a plain step of the target reads."""
    tensors = parts.gguf.tensors
    tied = output_name(parts.gguf) == "token_embd.weight"
    return sum(tensor.n_bytes for name, tensor in tensors.items() if tied or name != "token_embd.weight")


CPU_INDEX = ("--index-url", "https://download.pytorch.org/whl/cpu") if sys.platform == "linux" else ()
"""Arguments of pip, for a torch without CUDA; elsewhere than on Linux the package has none."""


def require_torch() -> None:
    """Raise RuntimeUnavailableError where torch is not installed; nothing is imported."""
    if find_spec("torch") is None:
        command = install_command("train")
        smaller = f"; for a machine without a GPU: {command} {' '.join(CPU_INDEX)}" if CPU_INDEX else ""
        raise RuntimeUnavailableError(f"training a head needs torch, which is not installed: {command}{smaller}")

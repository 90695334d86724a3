"""Models whose library does not say which rows of a forward are bit-equal to single steps: they are measured."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from edgedec.memory_plan import MemoryTerm
from edgedec.model import ExactRows, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.shared.invariance import MeasuredRows, measured_invariance
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession

H = TypeVar("H")
S = TypeVar("S", bound=Session)


class MeasuredModel(LibraryModel[H, S]):
    """A LibraryModel that finds out by forwards of its own how many rows are bit-equal to single steps."""

    def __init__(  # LibraryModel's parameters, and one more
        self,
        handle: H,
        card: ModelCard,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        free: Callable[[], None],
        cache_dir: Path | None,
        tree_rows: int = 0,
        logit_rows: int = 0,
    ) -> None:
        """Take over what the library has opened, as LibraryModel; what is measured is kept in `cache_dir`, if any."""
        super().__init__(handle, card, capabilities, tokenizer, terms, free, tree_rows, logit_rows)
        self._cache_dir = cache_dir

    @cached_property
    def batch_invariant(self) -> int:  # measured at the first read
        """The largest n whose rows were found to be bit-equal to single steps, in a short context."""
        return measured_invariance(self, self._cache_dir)

    @cached_property
    def exact(self) -> MeasuredRows:
        """What is known of bit-equal rows in longer contexts."""
        return MeasuredRows(self, self._cache_dir)


class MeasuredSession(OwnSession):
    """A session of a MeasuredModel."""

    _model: MeasuredModel[Any, Any]

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return how many rows are bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.at(self, n_past, measure)

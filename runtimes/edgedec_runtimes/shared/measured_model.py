"""Models whose library does not say which rows of a forward are bit-equal to single steps: they are measured."""

from functools import cached_property
from typing import Any, TypeVar

from edgedec.model import ExactRows, Session
from edgedec_runtimes.shared.invariance import MeasuredRows, measured_invariance
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.own_session import OwnSession

H = TypeVar("H")
S = TypeVar("S", bound=Session)


class MeasuredModel(LibraryModel[H, S]):
    """A LibraryModel that finds out by forwards of its own how many rows are bit-equal to single steps.

    What is measured is kept in the `cache_dir` that it was made with, if any.
    """

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

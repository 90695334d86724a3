"""The sessions of models that were trained to embed texts, whatever computes them: they have `final_states` alone."""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError
from edgedec.model import ExactRows, Forward, ForwardItem
from edgedec.progress import OnProgress
from edgedec_runtimes.shared.own_session import OwnSession


class EncoderSession(OwnSession):
    """The part of edgedec.model.EncoderSession that does not depend on what computes."""

    _model: Any

    def final_states(self, tokens: NDArray[np.int32], n_first: int | None = None) -> NDArray[np.float32]:
        """Return f32[n, n_embd], the final state of each token; see edgedec.model.EncoderSession."""
        with self.using():
            states: NDArray[np.float32] = self._model.final_states(self, tokens, n_first)
            return states

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Raise CapabilityError: an embedding model has no logits."""
        raise CapabilityError(
            f"{self._model.card.name!r} is an embedding model, which has no logits; use embed(), or load another model"
        )

    def exact_rows(self, n_past: int, measure: int = 0) -> ExactRows:
        """Return that no two rows are exact: the model has no steps."""
        return ExactRows(1, None)

    def _fork(self) -> NoReturn:
        self._model.capabilities.require("fork", self._model.card.runtime)
        raise AssertionError("the capability is not declared")

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return ()

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Any:
        return True

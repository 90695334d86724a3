"""The part of a session that is the same for all that evaluate what they are asked for as one ForwardItem."""

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from edgedec.model import Forward, ForwardItem, LayerSet, Rows, Session
from edgedec.progress import OnProgress


class ItemSession(Session):
    """A Session whose subclasses implement `evaluate` instead of `forward`."""

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
        """Evaluate new rows; see edgedec.model.Session."""
        item = ForwardItem(self, n_past, tokens, hidden, resume_after, parents, layers, rows, taps)
        return self.evaluate(item, on_progress)

    def exact_rows(self, n_past: int) -> int | None:
        """Return what the model says for contexts of any length."""
        claim, most = self.model.batch_invariant, self.model.capabilities.max_rows
        exact = most if claim is True else min(claim, most)
        return exact if exact > 1 else None

    def has_exact_rows(self, n_past: int, n_rows: int) -> bool:
        """Tell whether the model says so for contexts of any length."""
        return n_rows <= (self.exact_rows(n_past) or 1)

    @abstractmethod
    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item of this session (raises what Session.forward raises)."""

"""A drafter for tests, which override what they look at."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DrafterNeeds


class StubDrafter:
    """Proposes nothing, needs nothing and holds nothing."""

    needs = DrafterNeeds()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose nothing."""
        return EMPTY_DRAFT

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the outcome."""

    def memory_bytes(self) -> int:
        """Nothing worth counting."""
        return 0

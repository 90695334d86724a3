"""learned: what mostly follows the text's last tokens in the user's own files, which `edgedec learn` has read.

RASD (Quan et al. 2025, arXiv:2503.03434) retrieves from a corpus and merges what it finds with the draft model's tree.
Retrieved branches whose first token the draft model or the head holds improbable are dropped before they are merged
(edgedec.scheduler.retrieval). Lossless, as it only proposes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, DraftContext, DrafterNeeds, Verification
from edgedec.drafters.suffix.matching import MatchRates
from edgedec.drafters.suffix.sorted_match import SortedMatch
from edgedec.errors import CapabilityError

NAME = "learned"
_LAST = 64  # tokens of a prompt that decide where the text stands


class LearnedDrafter:
    """Implements edgedec.draft.Drafter."""

    needs = DrafterNeeds()

    def __init__(self, context: DraftContext) -> None:
        """Draft from the files that were learned (CapabilityError where none were)."""
        if context.learned is None:
            raise CapabilityError(
                "nothing was learned for this model's vocabulary; run edgedec learn FOLDER --for MODEL"
            )
        rates = context.store.setdefault(NAME, MatchRates())
        assert isinstance(rates, MatchRates), "the store's entry of this name is ours"
        self._rates = rates
        self._match = SortedMatch(context.learned)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Find the end of the prompt in the learned files."""
        for token in token_ids[-_LAST:]:
            self._match.follow(token)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the longest match, most probable paths first."""
        return self._match.draft(self._rates, n_max)

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Follow the text by the tokens that it got."""
        for token in verification.token_ids:
            self._rates.observe(self._match, token)
            self._match.follow(token)

    def memory_bytes(self) -> int:
        """Return the bytes of the rates; the files are mapped, and the system takes their pages back at will."""
        return 1024

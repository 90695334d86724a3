"""learned: what mostly follows the text's last tokens in the user's own files, which `edgedec learn` has read.

RASD (Quan et al. 2025, arXiv:2503.03434) retrieves from a corpus and merges what it finds with the draft model's tree.
Retrieved branches whose first token the draft model or the head holds improbable are dropped before they are merged
(edgedec.scheduler.draft_tree). Lossless, as it only proposes.
"""

from edgedec.drafter import DraftContext
from edgedec.drafters.suffix.fixed_text import FixedTextDrafter
from edgedec.drafters.suffix.sorted_match import SortedMatch
from edgedec.errors import CapabilityError

NAME = "learned"
_LAST = 64  # tokens of a prompt that decide where the text stands


class LearnedDrafter(FixedTextDrafter):
    """Implements edgedec.drafter.Drafter."""

    def __init__(self, context: DraftContext) -> None:
        """Draft from the files that were learned (CapabilityError where none were)."""
        if context.learned is None:
            raise CapabilityError(
                "nothing was learned for this model's vocabulary; run edgedec learn FOLDER --for MODEL"
            )
        super().__init__(NAME, context, SortedMatch(context.learned), _LAST)

    def memory_bytes(self) -> int:
        """Return the bytes of the rates; the files are mapped, and the system takes their pages back at will."""
        return 1024

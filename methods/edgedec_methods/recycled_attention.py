"""Recycled Attention: heads see the slots that a row attended to, for so many tokens; then they are chosen again.

As `dropped-slots`, but what is written joins all slots each `every` tokens. The last RECENT rows are then evaluated
once more with all of them, and their attention says what the next rows see. (The paper takes that of one row, each 50
tokens.)

Lossy: from one choice to the next, what was left out is not seen.

Paper: Recycled Attention, Xu et al. 2024, arXiv:2411.05787
Option: `--method recycled-attention:0.1,every=64`
For: texts behind long prompts that come to speak of other parts of them
Measured: 1.5B, 16,000 tokens: a step in 0.67 of the time, by what steps and choices take (studied at 65d8b3a6)
Status: opt-in
"""

from dataclasses import dataclass
from typing import ClassVar

from edgedec.errors import OptionError
from edgedec.model import Session
from edgedec_methods.dropped_slots import RECENT, DroppedSlots, SparseSession


@dataclass(frozen=True, slots=True)
class RecycledAttention:
    """Implements edgedec.companion.Companion: the options of slots that are chosen again and again.

    Attributes:
        share: The share of the slots that each head sees.
        every: Tokens from one choice to the next.

    Raises:
        OptionError: The share is not above 0 and at most 1, or not given; or `every` is below RECENT.
    """

    share: float | None = None
    every: int = 64

    role: ClassVar[str] = ""
    what: ClassVar[str] = "slots that are chosen again"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        DroppedSlots(self.share)
        if not isinstance(self.every, int) or self.every < RECENT:
            raise OptionError("every", self.every, f"it is a number of tokens, at least {RECENT}")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session whose heads see a part of the slots (raises what SparseSession raises)."""
        return SparseSession(target, self.share or 1.0, 8, self.every)

"""common: what mostly follows the text's last tokens in a small text of everyday answers and code.

The drafter can propose before the text itself has taught the other drafters anything, as ADED's table can, which starts
from a corpus (Liu et al. 2024). Lossless, as it only proposes.
"""

from edgedec.drafter import DraftContext
from edgedec.drafter_traits import Shedding
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.drafters.suffix.fixed_text import FixedTextDrafter
from edgedec.drafters.suffix.matching import Match

_LAST = 32  # tokens of a prompt that decide where the text stands


class CommonDrafter(FixedTextDrafter):
    """Implements edgedec.drafter.Drafter."""

    shedding = Shedding(30, "the common text")

    def __init__(self, context: DraftContext) -> None:
        self._automaton = SuffixAutomaton() if context.common is None else context.common.automaton
        super().__init__("common", context, Match(self._automaton), _LAST)

    def memory_bytes(self) -> int:
        """Return about how much memory the small text takes, which all generations share."""
        return self._automaton.memory_bytes()

"""common: what mostly follows the text's last tokens in a small text of everyday answers and code.

The drafter proposes before the text itself has taught the other drafters anything, as ADED's table can, which starts
from a corpus (Liu et al. 2024). Lossless, as it only proposes. The small text lies beside this file. A small model made
it up, so its statements are not to be relied on.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgedec.drafter import DraftContext
from edgedec.drafter_traits import Demands, Place, Shedding
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.drafters.suffix.matching import FixedTextDrafter, Match
from edgedec.errors import EdgedecError
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Session
from edgedec.progress import reported
from edgedec.storage import probe_cache
from edgedec.tokenizer import Tokenizer

_LAST = 32  # tokens of a prompt that decide where the text stands
_MOST_TOKENS = 15_000  # of the text, whose contexts take 10 MB then; a vocabulary of bytes would make 52,000 of it
_PLANNED_BYTES = 10_000_000
_FILE = Path(__file__).with_name("common_text.txt")


class CommonText:
    """The text in one tokenizer's tokens, and the factory of the drafters that share it.

    Attributes:
        shedding: What is lost where memory runs short.
    """

    shedding = Shedding(30, "the common text")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._automaton: SuffixAutomaton | None = None

    def __call__(self, context: DraftContext) -> "CommonDrafter":
        """Make the drafter of one generation."""
        return CommonDrafter(context, self.automaton)

    @property
    def automaton(self) -> SuffixAutomaton:
        """The contexts of the text, made at the first use unless build() made them; they are only read from then on."""
        return self._automaton or self.build(LoadOptions())

    def build(self, options: LoadOptions) -> SuffixAutomaton:
        """Make the contexts now, so that no request waits for them (raises CancelledError by the options' cancel)."""
        automaton = SuffixAutomaton()
        for token in reported(self.token_ids, "everyday text", options.on_progress, options.cancel):
            automaton.add(token)
        self._automaton = automaton
        return automaton

    def shed(self) -> None:
        """Drop the contexts; they are made anew when they are used again."""
        self._automaton = None

    def memory_bytes(self) -> int:
        """Return about how much memory the contexts take; 0 where they are not made."""
        return 0 if self._automaton is None else self._automaton.memory_bytes()


def common_text(tokenizer: Tokenizer, cache_dir: Path | None, fingerprint: str) -> CommonText:
    """Return the text in a tokenizer's tokens, 15,000 at most; empty where it can't be encoded.

    Args:
        tokenizer: The target's.
        cache_dir: Where the tokens are remembered, as encoding takes a moment; None for nowhere.
        fingerprint: The target's, by which they are remembered.
    """
    return CommonText(_tokens(tokenizer, cache_dir, fingerprint)[:_MOST_TOKENS])


def _tokens(tokenizer: Tokenizer, cache_dir: Path | None, fingerprint: str) -> list[int]:
    try:
        text = _FILE.read_text(encoding="utf-8")
    except OSError:
        return []
    key = f"{fingerprint} {hashlib.sha256(text.encode()).hexdigest()}"
    stored = probe_cache.get(cache_dir, "common-text", key)
    if isinstance(stored, list) and all(isinstance(token, int) and 0 <= token < tokenizer.n_vocab for token in stored):
        return stored
    try:
        tokens = tokenizer.encode(text, add_special=False)
    except EdgedecError:
        return []
    probe_cache.put(cache_dir, "common-text", key, tokens)
    return tokens


class CommonDrafter(FixedTextDrafter):
    """Implements edgedec.drafter.Drafter."""

    demands = Demands(
        memory=lambda plan: [MemoryTerm("common text", _PLANNED_BYTES, "for the first drafts")],
        place=Place.LAST,
        called="common text",
    )

    def __init__(self, context: DraftContext, automaton: SuffixAutomaton | None = None) -> None:
        self._automaton = SuffixAutomaton() if automaton is None else automaton
        super().__init__("common", context, Match(self._automaton), _LAST)

    @staticmethod
    def opened(session: Session, plan: LoadPlan) -> CommonText:
        """Return the text in the target's tokens, made now, so that no request waits for it."""
        model = session.model
        text = common_text(model.tokenizer, plan.options.cache_dir, model.card.fingerprint)
        text.build(plan.options)
        return text

    def memory_bytes(self) -> int:
        """Return about how much memory the small text takes, which all generations share."""
        return self._automaton.memory_bytes()

"""A small text of everyday answers and code, from which drafters that know nothing yet learn what mostly follows what.

The text lies beside this file; a small model made it up, so what it says is not to be relied on. So small a text serves
the first tokens of an answer, before the answer itself has taught the drafters better.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from edgedec.drafters.reporting import reported
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.errors import EdgedecError
from edgedec.model import LoadOptions
from edgedec.storage import probe_cache
from edgedec.tokenizer import Tokenizer

_FILE = Path(__file__).with_name("common_text.txt")


class CommonText:
    """The text as a tokenizer sees it.

    Attributes:
        token_ids: Its tokens.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._automaton: SuffixAutomaton | None = None

    @property
    def automaton(self) -> SuffixAutomaton:
        """Its contexts, made now where build() was not called; only read from then on."""
        return self._automaton or self.build(LoadOptions())

    def build(self, options: LoadOptions) -> SuffixAutomaton:
        """Make the contexts, so that no request has to wait for them (CancelledError by the options' cancel)."""
        automaton = SuffixAutomaton()
        for token in reported(self.token_ids, "everyday text", options):
            automaton.add(token)
        self._automaton = automaton
        return automaton

    def shed(self) -> None:
        """Drop the contexts; they are made anew when they are asked for again."""
        self._automaton = None

    def memory_bytes(self) -> int:
        """Return about how much memory the contexts take."""
        return 0 if self._automaton is None else self._automaton.memory_bytes()


def common_text(tokenizer: Tokenizer, cache_dir: Path | None, fingerprint: str) -> CommonText:
    """Return the text for a tokenizer, empty where it can't be encoded; remembered, as encoding takes a moment."""
    return CommonText(_tokens(tokenizer, cache_dir, fingerprint))


def _tokens(tokenizer: Tokenizer, cache_dir: Path | None, fingerprint: str) -> list[int]:
    try:
        text = _FILE.read_text(encoding="utf-8")
    except OSError:
        return []
    key = f"{fingerprint} {hashlib.sha256(text.encode()).hexdigest()}"
    known = probe_cache.get(cache_dir, "common-text", key)
    if isinstance(known, list) and all(isinstance(token, int) and 0 <= token < tokenizer.n_vocab for token in known):
        return known
    try:
        tokens = tokenizer.encode(text, add_special=False)
    except EdgedecError:
        return []
    probe_cache.put(cache_dir, "common-text", key, tokens)
    return tokens

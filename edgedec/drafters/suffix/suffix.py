"""suffix: what followed the longest earlier occurrence of the text's end, in this text or in earlier ones.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt lookup (Saxena 2023), on suffix automata: the longest
match costs nothing to find, and continuations are ranked by how often they followed. Lossless, as it only proposes.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.drafter import STORE_BYTES, DraftContext, DrafterNeeds
from edgedec.drafter_traits import Demands, Shedding
from edgedec.drafters.suffix.automaton import STATE_BYTES, SuffixAutomaton
from edgedec.drafters.suffix.matching import Match, MatchRates
from edgedec.errors import counted
from edgedec.load_plan import LoadPlan
from edgedec.memory_plan import MemoryTerm

MOST_TOKENS = STORE_BYTES // STATE_BYTES  # the most that a store ever holds
STORE = "the suffix store"
"""What the texts of earlier requests are called where they are shed."""
_STATES_PER_TOKEN = 1.5  # of an automaton
_MAX_PROMPT = 32_768  # only so many last tokens of a prompt are looked at
_MOST_UNREAD = 256  # tokens of a text that came without a draft in between, of which the last ones are read
_MAX_ANCHOR = 8  # tokens of the prompt's end, which a predicted text is taken to follow

Text: TypeAlias = "array[int]"  # token ids, four bytes each


@dataclass(slots=True)
class SuffixStore:
    """The texts of earlier requests, which the drafters of later ones look into.

    Attributes:
        young: Texts of the latest requests.
        old: Texts of earlier requests; when `young` is full, it takes the place of `old`.
        outputs: Token ids of the texts in `young` that no file holds yet, oldest first.
        old_outputs: Token ids of the texts in `old` that no file holds yet, oldest first.
        rates: How often a match was right, by its length.
        shut: Whether the store takes no more texts.
    """

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    outputs: list[Text] = field(default_factory=list)
    old_outputs: list[Text] = field(default_factory=list)
    rates: MatchRates = field(default_factory=MatchRates)
    shut: bool = False

    def begin(self, limit_bytes: int) -> None:
        """Begin a new text, as the next token does not follow the one before; all texts may take `limit_bytes`."""
        if self.young.memory_bytes() > limit_bytes // 2:
            self.old, self.young = self.young, SuffixAutomaton()
            self.old_outputs, self.outputs = self.outputs, []
        self.young.last = 0

    def take_outputs(self) -> list[Text]:
        """Return the texts that no file holds yet, oldest first, and drop them from the lists, as a file takes them."""
        taken = [output for output in (*self.old_outputs, *self.outputs) if output]
        self.old_outputs, self.outputs = [], []
        return taken

    def shed(self) -> None:
        """Drop all texts and take no more; the token ids that a file has still to take stay."""
        self.young, self.old, self.shut = SuffixAutomaton(), SuffixAutomaton(), True

    def memory_bytes(self) -> int:
        """Return about how much memory the texts take; 0 once they are shed."""
        return 0 if self.shut else self.young.memory_bytes() + self.old.memory_bytes()


def index_terms(plan: LoadPlan) -> list[MemoryTerm]:
    """Return the term of the automata that drafters hold of the texts that are written."""
    n_ctx = plan.options.n_ctx or 0
    n_bytes = int(n_ctx * plan.options.n_parallel * plan.n_texts * _STATES_PER_TOKEN * STATE_BYTES)
    detail = f"for drafts, {counted(n_ctx, 'token')}"
    return [MemoryTerm("index of the text", n_bytes, detail, grows=True)] if n_ctx else []


class SuffixDrafter:
    """Implements edgedec.drafter.Drafter and Closing.

    Tokens that come while no draft is asked for, the prompt's first of all, are read when the next one is; to read a
    token takes longer than a small model does for one of several texts.
    """

    needs = DrafterNeeds()
    demands = Demands(store_file=True, memory=index_terms)
    shedding = Shedding(90, "the suffix drafter", keeps_store=True, spared=STORE)

    def __init__(self, context: DraftContext) -> None:
        self._lock = context.store.lock
        store = context.store.setdefault("suffix", SuffixStore())
        assert isinstance(store, SuffixStore), "the store's entry of this name is ours"
        self._store = store
        self._limit = context.store.most_bytes
        self._most_states = self._limit // STATE_BYTES
        self._text = SuffixAutomaton()
        self._predicted = SuffixAutomaton()
        self._output: Text = array("i")
        self._prompt: list[int] = []  # its tokens, as long as they are unread
        self._unread: list[int] = []  # tokens of the text behind the prompt
        self._drafted = False  # since the last learn()
        self._earlier: list[Match] = []
        self._expected = context.predicted
        self._kept_in, self._kept = store.young, 0  # where the text's latest token is among those of other texts

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt; only the tokens that follow it are kept for later requests."""
        with self._lock:
            self._store.begin(self._limit)
            self._text, self._predicted, self._unread = SuffixAutomaton(), SuffixAutomaton(), []
            self._output = array("i")
            self._store.outputs.append(self._output)
            # The text that the request predicts is learned as what follows the end of the prompt.
            for token in (*token_ids[-_MAX_ANCHOR:], *self._expected) if self._expected else ():
                if self._predicted.memory_bytes() > self._limit // 2:
                    break
                self._predicted.add(token)
            # In `young` are soon the texts that are written beside this one.
            automata = [self._store.young, *(a for a in (self._store.old, self._predicted) if len(a.next) > 1)]
            self._earlier = [Match(a) for a in automata]
            self._kept_in, self._kept = self._store.young, 0
            self._prompt = list(token_ids[-_MAX_PROMPT:])

    def _keep(self, token: int) -> None:
        """Add a token to the text in the store, where the tokens of other texts may have come meanwhile."""
        if self._store.shut:
            return
        young = self._store.young
        if self._kept_in is not young:
            self._kept_in, self._kept = young, 0
        young.last = self._kept
        young.add(token)
        self._kept = young.last

    def _take(self, token: int) -> None:
        """Add a token to the text; a text that fills its half of the budget is forgotten first."""
        if len(self._text.next) > self._most_states:
            self._text = SuffixAutomaton()
        self._text.add(token)
        for match in self._earlier:
            match.follow(token)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the longest match, most probable paths first."""
        with self._lock:
            if self._prompt or self._unread:
                self._read()
            self._drafted = True
            return self._longest().draft(self._store.rates, n_max)

    def _read(self) -> None:
        """Take the tokens that are unread; where they are many, the text goes on with the last ones."""
        for token in self._prompt:
            self._take(token)
        self._prompt = []
        if len(self._unread) > _MOST_UNREAD:
            self._text.last = 0
            for match in self._earlier:
                match.state = match.length = 0
        for token in self._newest_unread():
            self._take(token)
            self._keep(token)  # behind _take(): else the text would be found at its own end

    def _newest_unread(self) -> list[int]:
        """Return the last unread tokens, and count all of them as read."""
        if len(self._unread) > _MOST_UNREAD:
            self._kept = 0
        newest, self._unread = self._unread[-_MOST_UNREAD:], []
        return newest

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Learn the tokens that the text got."""
        with self._lock:
            if self._store.shut:
                self._predicted = SuffixAutomaton()
                self._earlier.clear()
            else:
                self._output.extend(verification.token_ids)
            if not self._drafted:
                self._unread.extend(verification.token_ids)
                return
            self._drafted = False
            for token in verification.token_ids:
                self._store.rates.observe(self._longest(), token)
                self._take(token)
                self._keep(token)

    def close(self) -> None:
        """Keep the rest of the text for later requests."""
        with self._lock:
            for token in self._newest_unread():
                self._keep(token)

    def _longest(self) -> Match:
        """Return the longest context at the text's end that occurred before, in this text or in an earlier one."""
        state = self._text.link[self._text.last] if self._text.last else 0
        longest = Match(self._text, state, self._text.length[state])
        for match in self._earlier:
            if match.length > longest.length:
                longest = match
        return longest

    def memory_bytes(self) -> int:
        """Return about how much memory the drafter and the store hold."""
        return self._text.memory_bytes() + self._predicted.memory_bytes() + self._store.memory_bytes()

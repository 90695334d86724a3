"""learned: what mostly follows the text's last tokens in the user's own files, which `edgedec learn` has read.

RASD (Quan et al. 2025, arXiv:2503.03434) retrieves from a corpus and merges what it finds with the draft model's tree.
Retrieved branches whose first token the draft model or the head holds improbable are dropped before they are merged
(edgedec.scheduler.draft_tree). Lossless, as it only proposes. The files' suffixes are sorted, so that every place of a
context is found by bisection (Manber and Myers 1993, "Suffix arrays: a new method for on-line string searches").
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from edgedec.draft import EMPTY_DRAFT, Draft
from edgedec.drafter import DraftContext, DrafterFactory, SortedText
from edgedec.drafter_traits import Demands, Place
from edgedec.drafters.draft_builder import Child, grow_tree
from edgedec.drafters.suffix.matching import LEAST_PATH, FixedTextDrafter, MatchRates
from edgedec.errors import CapabilityError
from edgedec.load_plan import LoadPlan
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Session
from edgedec.storage.cache_files import cache_folder

NAME = "learned"
_LAST = 64  # tokens of a prompt that decide where the text stands
_LONGEST = 32  # tokens of a context; with the nodes of a draft behind it, it stays below SORTED of SortedText
_SHORTENED = 16  # tokens of a context that became too long, or is looked for anew
_DEEPEST = 24  # tokens of a draft
_LOOKED_AT = 128  # places of a context whose next tokens are counted
_CHILDREN = 3


class Places(NamedTuple):
    """The places of a context: a range of the sorted order, and the tokens of the context."""

    low: int
    high: int
    length: int


Behind = tuple[Places, int | None]
"""Places, and a token behind them; None for the places themselves."""


class SortedMatch:
    """The longest context at a text's end that a sorted text knows, which is only read.

    Attributes:
        length: Tokens of the context.
    """

    def __init__(self, text: SortedText) -> None:
        self._text = text
        self._whole = Places(0, len(text.tokens), 0)
        self._places = self._whole
        self._end: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return self._places.length

    def follow(self, token: int) -> None:
        """Move on to the longest context that ends with this token."""
        self._end = [*self._end[1 - _LONGEST :], token]
        narrowed = self._narrowed(self._places, token)
        if narrowed.low < narrowed.high and narrowed.length < _LONGEST:
            self._places = narrowed
            return
        low, high = 0, min(self.length + 1, _SHORTENED, len(self._end))
        best = self._whole
        while low < high:  # where a context occurs, each shorter one does
            middle = (low + high + 1) // 2
            narrowed = self._found(self._end[-middle:])
            if narrowed.low < narrowed.high:
                low, best = middle, narrowed
            else:
                high = middle - 1
        self._places = best

    def _found(self, tokens: Iterable[int]) -> Places:
        places = self._whole
        for token in tokens:
            places = self._narrowed(places, token)
        return places

    def _narrowed(self, places: Places, token: int) -> Places:
        """Return the places of a context with one more token behind it."""
        tokens, order = self._text.tokens, self._text.order
        low, high, length = places

        def behind(place: int) -> int:
            return int(tokens[order[place] + length])

        if low < high:
            low = bisect_left(range(high), token, low, high, key=behind)
            high = bisect_right(range(high), token, low, high, key=behind)
        return Places(low, high, length + 1)

    def best(self) -> int | None:
        """Return the most frequent continuation of the context; None without a context."""
        ranked = self._ranked(self._places) if self.length else []
        return ranked[0][1] if ranked else None

    def _ranked(self, places: Places) -> list[tuple[float, int]]:
        """Return up to three continuations of a context, most frequent first: the share of each, and its token."""
        step = max(1, (places.high - places.low) // _LOOKED_AT)
        tokens = self._text.tokens[self._text.order[places.low : places.high : step] + places.length]
        token_ids, counts = np.unique(tokens, return_counts=True)
        best = np.argsort(-counts, kind="stable")[: _CHILDREN + 1]
        shares = zip((counts[best] / len(tokens)).tolist(), token_ids[best].tolist(), strict=True)
        return [(share, token) for share, token in shares if token >= 0][:_CHILDREN]

    def draft(self, rates: MatchRates, n_max: int) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the context, most probable paths first."""
        if not self.length:
            return EMPTY_DRAFT
        accept_rates = rates.values()

        def children(behind: Behind, depth: int) -> list[Child[Behind]]:
            if depth >= _DEEPEST:
                return []
            places, last = behind
            narrowed = places if last is None else self._narrowed(places, last)
            rate = accept_rates[(narrowed.length - 1).bit_length()]
            chances = [(rate * share, token) for share, token in self._ranked(narrowed)]
            return [(p, token, p, (narrowed, token)) for p, token in chances if p >= LEAST_PATH]

        here: Behind = (self._places, None)
        return grow_tree(here, children, n_max=n_max, least_path=LEAST_PATH, older_first=True)


def _terms(plan: LoadPlan) -> list[MemoryTerm]:
    """Return the term of the largest file below the cache: which one a model takes, its vocabulary decides."""
    from edgedec.drafters.suffix.learned_file import largest_learned

    n_bytes = largest_learned(cache_folder(plan.options.cache_dir))
    return [MemoryTerm("learned files", n_bytes, "mapped; those of edgedec learn")] if n_bytes else []


class LearnedDrafter(FixedTextDrafter):
    """Implements edgedec.drafter.Drafter, for a user's files in the target's tokens."""

    demands = Demands(memory=_terms, place=Place.LAST, called="your learned files")

    def __init__(self, context: DraftContext, text: SortedText | None = None) -> None:
        """Draft from the files that were learned (CapabilityError where none were)."""
        if text is None:
            raise CapabilityError(
                "nothing was learned for this model's vocabulary; run edgedec learn FOLDER --for MODEL"
            )
        super().__init__(NAME, context, SortedMatch(text), _LAST)

    @staticmethod
    def opened(session: Session, plan: LoadPlan) -> DrafterFactory | None:
        """Return the factory for the files of the target's vocabulary (StorageError where they can't be read).

        Where nothing was learned for it, a drafter that was asked for by name says so in each text.
        """
        from edgedec.drafters.suffix.learned_file import learned_path, read_learned
        from edgedec.drafters.suffix.store_file import vocabulary_hash

        model = session.model
        path = learned_path(cache_folder(plan.options.cache_dir), vocabulary_hash(model.tokenizer))
        learned = read_learned(path, model.card.n_vocab)
        if learned is None:
            return LearnedDrafter if plan.pinned else None
        return partial(LearnedDrafter, text=learned[1])

    def memory_bytes(self) -> int:
        """Return the bytes of the rates; the files are mapped, and the system takes their pages back at will."""
        return 1024

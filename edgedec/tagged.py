"""Free text in which what stands behind a mark keeps to a grammar, such as the calls of tools that a model may make.

A mark begins with a token of its own, as far as the vocabulary allows that (edgedec.mark_vocabulary). The grammar takes
the tokens behind it; where its text is whole and nothing may follow, the free text goes on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgedec.errors import RequestError
from edgedec.grammar import Grammar, GrammarState, Predicate
from edgedec.mark_vocabulary import MarkVocabulary, Mask, without


@dataclass(frozen=True, slots=True)
class Tags:
    """What Grammar.tagged() says.

    Attributes:
        marks: Each of them is followed by a text of the grammar.
        body: The grammar.
        first_only: Whether a mark is one only where nothing but white space stands before it.
    """

    marks: tuple[str, ...]
    body: Grammar
    first_only: bool = False

    @classmethod
    def of(cls, grammar: Grammar) -> "Tags":
        """Return what a grammar of the kind "tagged" says (RequestError where its source is not Grammar.tagged()'s)."""
        try:
            said: dict[str, Any] = json.loads(grammar.source)
            return cls(tuple(said["marks"]), Grammar(*said["body"]), said["first_only"])
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the grammar's marks can't be read ({error!r:.80}); use Grammar.tagged()") from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands.

    Attributes:
        tail: The end of the free text, as long as it may be the beginning of a mark.
        is_within: Whether the next token belongs to a text of the grammar.
        has_marks: Whether a mark may still come.
        is_over: Whether an end token came.
    """

    tail: bytes = b""
    is_within: bool = False
    has_marks: bool = True
    is_over: bool = False


class TaggedState:
    """Implements edgedec.grammar.GrammarState for free text with marks.

    Args:
        tags: The marks.
        vocabulary: What the tokens say as far as the marks are concerned.
        open_body: Returns the state of the grammar behind a mark, before its first token.

    Raises:
        RequestError: As `open_body`.
    """

    predicate: Predicate | None = None

    def __init__(self, tags: Tags, vocabulary: MarkVocabulary, open_body: Callable[[], GrammarState]) -> None:
        self._tags, self._vocabulary, self._open_body = tags, vocabulary, open_body
        self._places = [_Place()]  # one more than tokens
        self._bodies: list[GrammarState] = []  # of the marks so far
        self._ready = [open_body()]  # states before their first token; the first one shows that the grammar compiles

    @property
    def _place(self) -> _Place:
        return self._places[-1]

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""
        return self._place.is_over

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        return not self._place.is_within or self._bodies[-1].may_end

    def allowed(self) -> Mask:
        """Return bool[n_vocab]: which tokens may follow (RequestError as the grammar behind a mark)."""
        place, vocabulary = self._place, self._vocabulary
        if place.is_within:
            return self._bodies[-1].allowed()
        if place.is_over:
            return ~vocabulary.anything
        return without(vocabulary.anything, vocabulary.ruled_out(place.tail) if place.has_marks else [])

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow, perhaps not all of them."""
        return self._bodies[-1].forced() if self._place.is_within else ()

    def advance(self, token_id: int) -> bool:
        """Take a token and return True; where it is not allowed, change nothing and return False."""
        place = self._place
        if place.is_over:
            return False
        if place.is_within:
            return self._advance_within(place, token_id)
        if self._vocabulary.is_end(token_id):
            self._places.append(replace(place, is_over=True))
            return True
        text = place.tail + self._vocabulary.text(token_id)
        rest = self._vocabulary.behind_mark(text) if place.has_marks else None
        if rest is not None and rest.strip():
            return False
        if rest is not None:
            self._bodies.append(self._ready.pop() if self._ready else self._open_body())
            self._places.append(_Place(is_within=True, has_marks=not self._tags.first_only))
            return True
        begins = not self._tags.first_only or any(mark.encode().startswith(text.lstrip()) for mark in self._tags.marks)
        self._places.append(_Place(self._vocabulary.tail(text), has_marks=place.has_marks and begins))
        return True

    def _advance_within(self, place: _Place, token_id: int) -> bool:
        """Take a token of the grammar behind a mark."""
        body = self._bodies[-1]
        if not body.advance(token_id):
            return False
        is_over = self._vocabulary.is_end(token_id)
        self._places.append(replace(place, is_within=not is_over and not body.is_complete, is_over=is_over))
        return True

    def back(self, n_tokens: int) -> None:
        """Take back the last `n_tokens` tokens."""
        for _ in range(n_tokens):
            place = self._places.pop()
            if self._place.is_within:
                self._bodies[-1].back(1)
            elif place.is_within:
                self._ready.append(self._bodies.pop())

    def close(self) -> None:
        """Free the memory of the grammar's states; calling it again does nothing."""
        for states in (self._bodies, self._ready):
            while states:
                states.pop().close()

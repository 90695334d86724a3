"""Free text in which what stands behind a mark keeps to a grammar, such as the calls of tools that a model may make.

A mark ends with a token of its own, as far as the vocabulary allows that (edgedec.mark_vocabulary). The grammar takes
the tokens behind it; where its text is whole and nothing may follow, the free text goes on.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edgedec.errors import RequestError
from edgedec.grammar import Grammar, GrammarState, Kind, Predicate
from edgedec.mark_vocabulary import MarkVocabulary, Mask, without


@dataclass(frozen=True, slots=True)
class Tags:
    """What Grammar.tagged() says.

    Attributes:
        bodies: The grammar of the text behind each mark, by mark.
        start: The grammar of what a text may be in place of free text; None for none.
        binds: What the beginning of a text matches where it must go on by `start`.
    """

    bodies: Mapping[str, Grammar]
    start: Grammar | None
    binds: re.Pattern[str]

    @classmethod
    def of(cls, grammar: Grammar) -> "Tags":
        """Return what a grammar of the kind "tagged" says (RequestError where its source is not Grammar.tagged()'s)."""
        try:
            bodies: dict[str, tuple[Kind, str]]
            bodies, start, binds = json.loads(grammar.source)
            each = {mark: Grammar(*body) for mark, body in bodies.items()}
            return cls(each, None if start is None else Grammar(*start), re.compile(binds))
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise RequestError(f"the grammar's marks can't be read ({error!r:.80}); use Grammar.tagged()") from None


_Phase = Literal["free", "start", "within", "over"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands.

    Attributes:
        phase: "start" where the text so far keeps to the grammar of a text's beginning but is not bound yet, "within"
            where the next token belongs to a grammar's text, "over" behind an end token.
        said: In the phase "start" all of the text; in free text its last bytes, with which a mark may begin.
        by_grammar: Whether a grammar took the token that led here.
    """

    phase: _Phase
    said: bytes = b""
    by_grammar: bool = False


class TaggedState:
    """Implements edgedec.grammar.GrammarState for free text with marks.

    Args:
        tags: The marks.
        vocabulary: What the tokens say as far as the marks are concerned.
        open_body: Returns the state of a grammar before its first token.

    Raises:
        RequestError: As `open_body`.
    """

    predicate: Predicate | None = None

    def __init__(self, tags: Tags, vocabulary: MarkVocabulary, open_body: Callable[[Grammar], GrammarState]) -> None:
        self._tags, self._vocabulary, self._open_body = tags, vocabulary, open_body
        self._bodies_of = {mark.encode(): body for mark, body in tags.bodies.items()}
        self._ready = {body: open_body(body) for body in tags.bodies.values()}  # states before their first token
        self._bodies: list[tuple[Grammar, GrammarState]] = []  # that took tokens
        self._places = [_Place("free")]  # one more than tokens
        if tags.start is not None:
            self._places = [_Place("start")]
            self._bodies.append((tags.start, open_body(tags.start)))

    @property
    def _place(self) -> _Place:
        return self._places[-1]

    @property
    def _body(self) -> GrammarState:
        return self._bodies[-1][1]

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""
        return self._place.phase == "over"

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        return self._place.phase != "within" or self._body.may_end

    def allowed(self) -> Mask:
        """Return bool[n_vocab]: which tokens may follow (RequestError as the grammar behind a mark)."""
        place, vocabulary = self._place, self._vocabulary
        if place.phase == "within":
            return self._body.allowed()
        if place.phase == "over":
            return ~vocabulary.anything
        return without(vocabulary.anything, vocabulary.ruled_out(vocabulary.tail(place.said)))

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow, perhaps not all of them."""
        return self._body.forced() if self._place.phase == "within" else ()

    def advance(self, token_id: int) -> bool:
        """Take a token and return True; where it is not allowed, change nothing and return False."""
        place, is_end = self._place, self._vocabulary.is_end(token_id)
        if place.phase == "over":
            return False
        if place.phase == "within" or (place.phase == "start" and not is_end):
            if self._body.advance(token_id):
                self._places.append(self._behind(place, token_id))
                return True
            if place.phase == "within":
                return False
        if is_end:
            self._places.append(_Place("over"))
            return True
        said = self._vocabulary.tail(place.said) + self._vocabulary.text(token_id)
        mark, rest = self._vocabulary.partition(said)
        if rest.strip():
            return False
        if mark is None:
            self._places.append(_Place("free", self._vocabulary.tail(said)))
            return True
        grammar = self._bodies_of[mark]
        self._bodies.append((grammar, self._ready.pop(grammar) if grammar in self._ready else self._open_body(grammar)))
        self._places.append(_Place("within"))
        return True

    def _behind(self, place: _Place, token_id: int) -> _Place:
        """Return where a text stands behind a token that its grammar took."""
        if self._vocabulary.is_end(token_id):
            return _Place("over", by_grammar=True)
        if place.phase == "within":
            ended: _Phase = "over" if self._bodies[-1][0] == self._tags.start else "free"
            return _Place(ended if self._body.is_complete else "within", by_grammar=True)
        said = place.said + self._vocabulary.text(token_id)
        binds = self._tags.binds.match(said.decode(errors="replace")) is not None
        return _Place("within" if binds else "start", said, by_grammar=True)

    def back(self, n_tokens: int) -> None:
        """Take back the last `n_tokens` tokens."""
        for _ in range(n_tokens):
            taken = self._places.pop()
            if taken.by_grammar:
                self._body.back(1)
            elif taken.phase == "within":
                grammar, state = self._bodies.pop()
                if self._ready.setdefault(grammar, state) is not state:
                    state.close()

    def close(self) -> None:
        """Free the memory of the grammars' states; calling it again does nothing."""
        for state in (*self._ready.values(), *(state for _, state in self._bodies)):
            state.close()
        self._ready, self._bodies = {}, []

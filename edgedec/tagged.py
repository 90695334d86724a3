"""Free text in which what stands behind a mark keeps to a grammar, such as the calls of tools that a model may make.

A mark begins with a token of its own, as far as the vocabulary allows that (edgedec.mark_vocabulary). The grammar takes
the tokens behind it; where its text is whole and nothing may follow, the free text goes on.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgedec.errors import RequestError
from edgedec.grammar import Grammar, GrammarState, Kind, Predicate
from edgedec.mark_vocabulary import MarkVocabulary, Mask, without


@dataclass(frozen=True, slots=True)
class Tags:
    """What Grammar.tagged() says.

    Attributes:
        bodies: By mark, the grammar of what stands behind it.
        at_start: The same for marks that count only where a text begins with them.
    """

    bodies: Mapping[str, Grammar]
    at_start: Mapping[str, Grammar]

    @classmethod
    def of(cls, grammar: Grammar) -> "Tags":
        """Return what a grammar of the kind "tagged" says (RequestError where its source is not Grammar.tagged()'s)."""
        try:
            said: list[dict[str, tuple[Kind, str]]] = json.loads(grammar.source)
            bodies, at_start = ({mark: Grammar(*body) for mark, body in each.items()} for each in said)
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(f"the grammar's marks can't be read ({error!r:.80}); use Grammar.tagged()") from None
        return cls(bodies, at_start)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands.

    Attributes:
        tail: The end of the free text, as long as it may be the beginning of a mark.
        start: All of the text, as long as it may begin with a mark of the start; else None.
        is_within: Whether the next token belongs to a text of a grammar.
        is_over: Whether an end token came.
    """

    tail: bytes = b""
    start: bytes | None = None
    is_within: bool = False
    is_over: bool = False


class TaggedState:
    """Implements edgedec.grammar.GrammarState for free text with marks.

    Args:
        tags: The marks.
        vocabulary: What the tokens say as far as the marks of `tags.bodies` are concerned.
        open_body: Returns the state of a grammar behind a mark, before its first token.

    Raises:
        RequestError: As `open_body`; the grammar behind a mark of the start is opened when the mark comes.
    """

    predicate: Predicate | None = None

    def __init__(self, tags: Tags, vocabulary: MarkVocabulary, open_body: Callable[[Grammar], GrammarState]) -> None:
        self._bodies_of = {mark.encode(): body for mark, body in tags.bodies.items()}
        self._at_start = {mark.encode(): body for mark, body in tags.at_start.items()}
        self._vocabulary, self._open_body = vocabulary, open_body
        self._places = [_Place(start=b"" if tags.at_start else None)]  # one more than tokens
        self._bodies: list[tuple[Grammar, GrammarState]] = []  # of the marks so far
        self._ready = {body: open_body(body) for body in tags.bodies.values()}  # states before their first token

    @property
    def _place(self) -> _Place:
        return self._places[-1]

    @property
    def _body(self) -> GrammarState:
        return self._bodies[-1][1]

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""
        return self._place.is_over

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        return not self._place.is_within or self._body.may_end

    def allowed(self) -> Mask:
        """Return bool[n_vocab]: which tokens may follow (RequestError as the grammar behind a mark)."""
        place, vocabulary = self._place, self._vocabulary
        if place.is_within:
            return self._body.allowed()
        if place.is_over:
            return ~vocabulary.anything
        return without(vocabulary.anything, vocabulary.ruled_out(place.tail))

    def forced(self) -> Sequence[int]:
        """Return tokens that are certain to follow, perhaps not all of them."""
        return self._body.forced() if self._place.is_within else ()

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
        said = self._vocabulary.text(token_id)
        mark, rest = self._vocabulary.partition(place.tail + said)
        if rest.strip():
            return False
        start = None if place.start is None else (place.start + said).lstrip()
        grammar = self._at_start.get(start or b"") if mark is None else self._bodies_of[mark]
        if grammar is not None:
            self._bodies.append((grammar, self._ready.pop(grammar, None) or self._open_body(grammar)))
            self._places.append(_Place(is_within=True))
            return True
        if start is not None and not any(each.startswith(start) for each in self._at_start):
            start = None
        self._places.append(_Place(self._vocabulary.tail(place.tail + said), start))
        return True

    def _advance_within(self, place: _Place, token_id: int) -> bool:
        """Take a token of the grammar behind a mark."""
        body = self._body
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
                self._body.back(1)
            elif place.is_within:
                self._keep(*self._bodies.pop())

    def _keep(self, grammar: Grammar, state: GrammarState) -> None:
        """Keep the state of a grammar of which all tokens were taken back, unless there is one already."""
        if self._ready.setdefault(grammar, state) is not state:
            state.close()

    def close(self) -> None:
        """Free the memory of the grammars' states; calling it again does nothing."""
        for state in (*self._ready.values(), *(state for _, state in self._bodies)):
            state.close()
        self._ready, self._bodies = {}, []

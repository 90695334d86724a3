"""json_close: texts of a grammar are whole within the tokens that they may have.

After each token of the text an end is known: tokens that make the text whole, as few as a short search finds. A token
is taken only if an end behind it still fits into the tokens that are left. Where none fits, the end that was known
before is written instead. So the text is, up to a point, the one that would have come without the limit, and from there
the shortest end that was found. The end depends on the text, the grammar and the number of tokens left, never on
drafts.

Paper: none; a search for short ends
Option: `--method json-close`, with a JSON schema or a grammar
For: JSON that a program reads, where max_tokens is small
Measured: nothing yet
Status: opt-in
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint
from edgedec.errors import OptionError, RequestError, argument
from edgedec.grammar import GrammarState
from edgedec.text_method import AskedText, TextMethod
from edgedec.tokenizer import Tokenizer

_NARROW, _WIDE = 1, 6  # texts that a search follows at once
_N_WAYS = 8  # tokens of each kind that a search tries after a text
_N_REUSED = 8  # tokens at the start of the known end that may be left out
_N_STEPS = 800  # most steps of a search
_N_BEYOND = 1000  # tokens beyond the limit in which an end is searched for, to name how many a text takes
_MOST_TRIED = {_NARROW: 4000, _WIDE: 2000}  # beginnings of texts that one search tries: some 0.4 s
_TRIED_PER_TOKEN = 1000  # beyond as many for each token of the text, no more searches are made
_CLOSERS, _LITERALS = frozenset(b'"]}'), (b"null", b"true", b"false", b"[]", b"{}")
_STRUCTURE, _DIGITS = frozenset(b'"]}[{,: '), frozenset(b"0123456789-")
_MARKS = frozenset(b"!#$%&'()*+,-./:;<=>?@[]^_`{|}~")  # of which a pattern may want one, as an address wants an @


@dataclass(frozen=True, slots=True)
class _Nesting:
    """How deep in JSON a text ends, which only guides the search.

    Attributes:
        depth: Open brackets.
        in_string: Whether the text ends inside a string.
        escaped: Whether it ends behind a backslash in a string.
    """

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    @property
    def n_open(self) -> int:
        """How many brackets and strings are still to be closed."""
        return self.depth + self.in_string

    def cost(self, data: bytes) -> tuple[int, int]:
        """Return how much is open behind some bytes, and how many of them are content of strings that they close."""
        behind = self.after(data)
        if behind.in_string:
            return behind.n_open, 0
        n_content, before = 0, self
        for i in range(len(data)):
            following = before.after(data[i : i + 1])
            n_content += before.in_string and following.in_string
            before = following
        return behind.n_open, n_content

    def after(self, data: bytes) -> "_Nesting":
        """Return the nesting behind some bytes."""
        depth, in_string, escaped = self.depth, self.in_string, self.escaped
        for byte in data:
            if escaped:
                escaped = False
            elif in_string and byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = not in_string
            elif not in_string:
                depth += (byte in b"[{") - (byte in b"]}")
        return _Nesting(max(0, depth), in_string, escaped)


_Followed = tuple[tuple[int, ...], _Nesting, int, int]
"""Tokens behind the text, the nesting there, how many were chosen, and a number for what may follow."""


class JsonClose(TextMethod):
    """The request option json_close; its tables of the vocabulary are made once for each model."""

    takes = bool

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: ClosingTokens | None = None
        self._lock = Lock()

    def constraint(self, value: object, text: AskedText) -> Constraint | None:
        """Return a constraint whose text is whole when its tokens are used up; None for the value False.

        Raises:
            RequestError: There is no grammar, or a function judges the texts, too.
        """
        if not isinstance(value, bool):
            raise OptionError("json_close", value, "it must be True or False")
        if not value:
            return None
        name = argument("json_close")
        if text.state is None:
            raise RequestError(f"{name} needs a JSON schema or a grammar, found neither; give one, or leave {name} out")
        if "predicate" in text.request.methods:
            raise RequestError(f"{name} can't close a text that a predicate judges; leave one out")
        if text.state.predicate is not None:
            raise RequestError(
                f"{name} can't close the texts of this schema in time, as its uniqueItems is checked item by item; "
                f"leave {name} or uniqueItems out"
            )
        with self._lock:
            self._tokens = self._tokens or ClosingTokens(self._tokenizer)
        return ClosingConstraint(text.state, self._tokens, text.request.sampling.logit_bias)


class ClosingTokens:
    """The tokens of a vocabulary in the order in which a search for an end tries them; made once for each model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.piece = tokenizer.piece
        self.end_ids = frozenset(i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i))
        lengths = np.zeros(tokenizer.n_vocab, np.int32)
        useful: list[tuple[int, int, int]] = []
        for i in range(tokenizer.n_vocab):  # one by one: a list of all the pieces takes megabytes
            piece = tokenizer.piece(i)
            lengths[i] = len(piece)
            rank = _rank(piece) if piece else None
            if rank is not None:
                useful.append((rank, -len(piece), i))
        useful.sort()
        closers = [i for rank, _, i in useful if rank == 0]
        self._useful = np.array([i for _, _, i in useful], np.int32)
        self._closers = np.array(closers, np.int32)
        self._string_ends = np.array([i for i in closers if tokenizer.piece(i)[:1] == b'"'], np.int32)
        single = np.flatnonzero(lengths == 1).tolist()
        self._marks = np.array([i for i in single if tokenizer.piece(i)[0] in _MARKS], np.int32)
        self._longest = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)].astype(np.int32)

    def ways(self, allowed: NDArray[np.bool_], nesting: _Nesting, width: int) -> list[int]:
        """Return some of the allowed tokens: closing ones, others of JSON, and the longest and shortest of any kind.

        Where a string may end, a narrow search gets the tokens that end it only.
        """
        kinds = [self._string_ends] if nesting.in_string else [self._closers, self._useful]
        options = [kind[allowed[kind]][:_N_WAYS] for kind in kinds]
        if width > _NARROW or not nesting.in_string or not len(options[0]):
            others = self._longest[allowed[self._longest]]
            options += [others[:_N_WAYS], others[-_N_WAYS:]]
        if width > _NARROW:
            options.append(self._marks[allowed[self._marks]])
        ids = dict.fromkeys(np.concatenate(options).tolist())
        return [i for i in ids if i not in self.end_ids]


def _rank(piece: bytes) -> int | None:
    """Return how early a token is tried outside of strings; None for a token that is not part of JSON's syntax."""
    kinds = (_CLOSERS.issuperset(piece), piece in _LITERALS, _STRUCTURE.issuperset(piece), _DIGITS.issuperset(piece))
    return next((rank for rank, holds in enumerate(kinds) if holds), None)


class ClosingConstraint(Constraint):
    """A constraint whose text is whole when its tokens are used up.

    Args:
        state: The grammar's state before the first token.
        tokens: The vocabulary's tokens.
        bias: The request's logit bias; no end holds a token that it rules out.
    """

    def __init__(self, state: GrammarState, tokens: ClosingTokens, bias: Mapping[int, float] | None = None) -> None:
        super().__init__(state)
        self._tokens = tokens
        self._banned = [i for i, added in (bias or {}).items() if added == -np.inf]
        self._nesting = _Nesting()
        self._end: tuple[int, ...] = ()  # tokens that make the text whole
        self._closing = False
        self._n_tried = 0  # beginnings of texts that searches tried, less those that the text's tokens allowed

    def begin(self, n_tokens: int) -> None:
        """Set how many tokens the text may have (raises RequestError where the search finds no text as short)."""
        super().begin(n_tokens)
        end = self._shortest((), n_tokens)
        if end is None:
            name, n_most = argument("json_close"), n_tokens + _N_BEYOND
            longer = self._shortest((), n_most)
            if longer is None:
                raise RequestError(
                    f"{name} must have room for a whole text: the search tried {self._n_tried} beginnings of texts of "
                    f"at most {n_most} tokens, and none led to a whole text; say a simpler pattern or leave {name} out"
                )
            raise RequestError(
                f"{name} must have room for a whole text: the shortest text found takes {len(longer)} tokens, found "
                f"room for {n_tokens}; allow more with {argument('max_tokens')}, or a longer context"
            )
        self._n_tried = 0
        self._end, self.n_least = end, len(end)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and no token may follow or none has room."""
        if (self._closing or self._n_left == 0) and not self._end:
            return True
        return super().is_complete

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return which tokens may follow the text and `path`; of a begun end, only the next."""
        n = len(path)
        if not self._closing or n >= len(self._end) or tuple(path) != self._end[:n]:
            return super().allowed(path)
        only = np.zeros(self._end[n] + 1, np.bool_)
        only[-1] = True
        return only

    def forced(self) -> tuple[int, ...]:
        """Return tokens that are certain to follow the text."""
        return self._end if self._closing else super().forced()

    def commit(self, token_id: int) -> int:
        """Add the chosen token or, where no end would fit behind it, the next token of the known end; return it."""
        n_left = (self._n_left or 0) - 1
        self._n_tried = max(0, self._n_tried - _TRIED_PER_TOKEN)
        end = self._end_behind(token_id, n_left)
        if end is None:
            self._closing = True
            self.note = f"the last {len(self._end)} tokens were chosen to make the text whole in time (json_close)"
            if not self._end:  # the text is whole and can't get longer
                return min(self._tokens.end_ids)
            token_id, end = self._end[0], self._end[1:]
        self._end = end
        self._nesting = self._nesting.after(self._tokens.piece(token_id))
        taken = super().commit(token_id)
        if self._n_left == 0 and not self._closing and not super().is_complete:
            self.note = "the text ends where it is whole, as there was no room for more (json_close)"
        return taken

    def _end_behind(self, token_id: int, n_most: int) -> tuple[int, ...] | None:
        """Return tokens that make the text whole behind a token, None where no more than `n_most` are found to."""
        end = self._end
        if token_id in self._tokens.end_ids:
            return ()
        if end and end[0] == token_id:
            return end[1:]
        if self._closing:
            return None
        for n in range(min(len(end), _N_REUSED), -1, -1):
            if len(end) - n <= n_most and self._move_to((token_id, *end[n:])) and self._state.may_end:
                return end[n:]
        return self._shortest((token_id,), n_most) if self._n_tried <= _MOST_TRIED[_NARROW] else None

    def _shortest(self, start: tuple[int, ...], n_most: int) -> tuple[int, ...] | None:
        """Return tokens that make the text whole behind `start`, found by a narrow search or else by a wide one."""
        end = self._found(_NARROW, start, n_most)
        return self._found(_WIDE, start, n_most) if end is None else end

    def _found(self, width: int, start: tuple[int, ...], n_most: int) -> tuple[int, ...] | None:
        """Search for at most `n_most` tokens that make the text whole behind `start`.

        Of the texts met, `width` at a time are followed: those with the fewest open brackets and chosen tokens. Tokens
        that are the only choice do not count, as every text of the grammar has them. A wide search first follows texts
        behind which other tokens may follow than behind the ones before, and so comes out of a loop.
        """
        if not self._move_to(start):
            return None
        if self._state.may_end:
            return ()
        most_tried = self._n_tried + _MOST_TRIED[width]
        followed: list[_Followed] = [((), self._nesting.after(self._bytes(start)), 0, 0)]
        best: tuple[int, ...] | None = None
        n_met: Counter[int] = Counter()
        for _ in range(_N_STEPS):
            reached: list[_Followed] = []
            for path, nesting, n_chosen, _ in followed:
                ways = self._ways((*start, *path), nesting, width)
                n_now = n_chosen + (len(ways) > 1)
                for way in ways:
                    longer, behind = (*path, *way), nesting.after(self._bytes(way))
                    if width == _NARROW and reached and behind.n_open:
                        continue  # the first one will be followed, and this one is not whole
                    self._n_tried += 1
                    if self._n_tried > most_tried:
                        return best
                    if len(longer) > n_most or not self._move_to((*start, *longer)):
                        continue
                    if not self._state.may_end:
                        following = 0 if width == _NARROW else self._following()
                        reached.append((longer, behind, n_now, following))
                        continue
                    if width == _NARROW:
                        return longer
                    best, n_most = longer, len(longer) - 1
            if not reached:
                break
            reached.sort(key=lambda each: (each[1].n_open + each[2], len(each[0])))
            if width > _NARROW:
                ranks = [n_met.update((each[3],)) or n_met[each[3]] for each in reached]
                reached = [reached[i] for i in sorted(range(len(reached)), key=ranks.__getitem__)]
            followed = reached[:width]
        return best

    def _following(self) -> int:
        """Return a number for the tokens that may follow where the state is; others may have the same."""
        try:
            return hash(np.packbits(self._state.allowed()).tobytes())
        except RequestError:  # a dead end, or a limit
            return 0

    def _ways(self, path: tuple[int, ...], nesting: _Nesting, width: int) -> list[tuple[int, ...]]:
        """Return the tokens by which a search goes on, those that leave the fewest open brackets first."""
        self._move_to(path)
        forced = tuple(self._state.forced())
        if forced:
            return [] if set(forced) & set(self._banned) else [forced]
        try:
            allowed = self._state.allowed()
        except RequestError:  # a dead end, or a limit
            return []
        allowed[self._banned] = False
        ways = self._tokens.ways(allowed, nesting, width)
        ways.sort(key=lambda i: nesting.cost(self._tokens.piece(i)))
        return [(i,) for i in ways]

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(map(self._tokens.piece, token_ids))

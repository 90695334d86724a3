"""Reads GBNF, the notation of llama.cpp's grammars: rules of characters, of which `root` is the whole text.

A rule is `name ::= alternatives`. There are "literals", [classes], [^negated], . (any character), names of rules,
(groups), and after each of these *, +, ?, {n}, {n,} or {n,m}; # begins a comment.
Escapes are \\n \\r \\t \\\\ \\" \\[ \\]
\\- \\xHH \\uHHHH \\UHHHHHHHH.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from edgedec.errors import RequestError

ROOT = "root"
MOST_NESTED = 100
"""Most groups inside of one another."""
LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character: of one of these ranges of code points, both ends included, or of none where `negated`."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule of a name stands for."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Its parts, one after the other; without parts the empty text."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of its parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """Its part, `least` to `most` times; None for any number of times."""

    part: "Node"
    least: int
    most: int | None


Node = Chars | Rule | Sequence | Choice | Repeat

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_REPETITION = re.compile(r"\{[ \t\r\n]*([0-9]{1,9})[ \t\r\n]*(?:(,)[ \t\r\n]*([0-9]{1,9})?[ \t\r\n]*)?\}")
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPED = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45}
_HEX = {"x": 2, "u": 4, "U": 8}


def read_gbnf(source: str) -> dict[str, Node]:
    """Return what each rule of a grammar stands for, by its name; of two rules with one name the later one counts.

    >>> read_gbnf('root ::= "a"? [b-d]')["root"]
    Sequence(parts=(Repeat(part=Chars(ranges=((97, 97),), negated=False), least=0, most=1), \
Chars(ranges=((98, 100),), negated=False)))

    Raises:
        RequestError: The grammar is malformed, names a rule that it has not, or has no rule `root`; the message has
            the line, what was expected there, and what was found.
    """
    return _Reader(source).rules()


class _Reader:
    """Reads one grammar from its beginning to its end."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0
        self._used: dict[str, int] = {}  # where each name was first used

    def rules(self) -> dict[str, Node]:
        """Return all rules."""
        by_name: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._source):
            name = self._name("the name of a rule")
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            by_name[name] = self._choice(nested=False)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                self._fail("a part of a rule or the end of the line")
            self._skip(_SPACE_AND_LINES)
        for name, at in self._used.items():
            if name not in by_name:
                self._at = at
                self._fail(f"the name of a rule that the grammar has (there is no rule {name!r:.60})")
        if ROOT not in by_name:
            self._fail(f"a rule {ROOT!r}, which is the whole text")
        return by_name

    def _choice(self, *, nested: bool) -> Node:
        parts = [self._sequence(nested=nested)]
        while self._source.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            parts.append(self._sequence(nested=nested))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, *, nested: bool) -> Node:
        parts: list[Node] = []
        while (part := self._part()) is not None:
            self._skip(_SPACE_AND_LINES if nested else _SPACE)
            while (times := self._times()) is not None:
                part = Repeat(part, *times)
                self._skip(_SPACE_AND_LINES if nested else _SPACE)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node | None:
        """Return the part that begins here, or None where none does."""
        sign = self._source[self._at : self._at + 1]
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if sign == "(":
            return self._group()
        if sign == ".":
            self._at += 1
            return Chars((), negated=True)
        if _NAME.match(sign):
            self._used.setdefault(name := self._name("a name"), self._at - len(name))
            return Rule(name)
        if sign in ("<", "!"):
            self._fail("characters (tokens such as <think> can't be named here)")
        return None

    def _group(self) -> Node:
        self._at += 1
        self._depth += 1
        if self._depth > MOST_NESTED:
            self._fail(f"at most {MOST_NESTED} groups inside of one another")
        self._skip(_SPACE_AND_LINES)
        inner = self._choice(nested=True)
        self._expect(")")
        self._depth -= 1
        return inner

    def _literal(self) -> Node:
        self._at += 1
        characters: list[Node] = []
        while not self._source.startswith('"', self._at):
            code = self._character('"')
            characters.append(Chars(((code, code),)))
        self._at += 1
        return characters[0] if len(characters) == 1 else Sequence(tuple(characters))

    def _class(self) -> Node:
        self._at += 1
        negated = self._source.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while not self._source.startswith("]", self._at):
            first = last = self._character("]")
            if self._source.startswith("-", self._at) and not self._source.startswith("-]", self._at):
                self._at += 1
                last = self._character("]")
                if last < first:
                    self._fail("a range whose end is not before its beginning")
            ranges.append((first, last))
        if not ranges and not negated:
            self._fail("a character of the class")
        self._at += 1
        return Chars(tuple(ranges), negated)

    def _character(self, end: str) -> int:
        """Return the code point of the character here, which may be escaped; `end` would close what it is in."""
        sign = self._source[self._at : self._at + 1]
        if sign in ("", "\n", "\r"):
            self._fail(f"a character or {end}")
        self._at += 1
        if sign != "\\":
            return ord(sign)
        kind = self._source[self._at : self._at + 1]
        n_digits = _HEX.get(kind, 0)
        self._at += 1
        if kind in _ESCAPED:
            return _ESCAPED[kind]
        if kind in _HEX:
            digits = self._source[self._at : self._at + n_digits]
            code = int(digits, 16) if re.fullmatch(f"[0-9A-Fa-f]{{{n_digits}}}", digits) else -1
            if 0 <= code <= LAST_CHARACTER and not 0xD800 <= code < 0xE000:
                self._at += n_digits
                return code
            self._fail(f"{n_digits} hexadecimal digits of a character after \\{kind}")
        self._at -= 1
        return self._fail('one of n r t \\ " [ ] - xHH uHHHH UHHHHHHHH after \\')

    def _times(self) -> tuple[int, int | None] | None:
        """Return how often the part before is repeated; None where nothing says that it is."""
        sign = self._source[self._at : self._at + 1]
        if sign in _SIGNS:
            self._at += 1
            return _SIGNS[sign]
        if sign != "{":
            return None
        match = _REPETITION.match(self._source, self._at)
        if match is None:
            self._fail("{n}, {n,} or {n,m}")
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if most is not None and most < least:
            self._fail(f"at least {least} repetitions after the comma")
        self._at = match.end()
        return least, most

    def _name(self, expected: str) -> str:
        match = _NAME.match(self._source, self._at)
        if match is None:
            self._fail(expected)
        self._at = match.end()
        return match[0]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._source, self._at)
        self._at = self._at if match is None else match.end()

    def _expect(self, text: str) -> None:
        if not self._source.startswith(text, self._at):
            self._fail(text)
        self._at += len(text)

    def _fail(self, expected: str) -> NoReturn:
        line = self._source.count("\n", 0, self._at) + 1
        rest = self._source[self._at : self._at + 40].split("\n", 1)[0]
        actual = repr(rest) if rest else "the end of the line" if self._at < len(self._source) else "the end"
        raise RequestError(f"the grammar (GBNF), line {line}: expected {expected}, found {actual}")

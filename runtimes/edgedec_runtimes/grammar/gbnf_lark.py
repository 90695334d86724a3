"""GBNF in Lark's notation, as llguidance reads it, with exactly the same texts.

llguidance cuts a text into terminals first, each as long as it can be, and never goes back. A rule of GBNF knows no
terminals: `[a-z]* "ab"` takes "xab", which a terminal [a-z]* would swallow whole. So a grammar without recursion
becomes a single terminal. In one with recursion, parts without recursion become terminals where one character always
decides how to go on: the choices begin with different characters, and none that may continue a terminal may follow it.
(JSON is such a grammar.) Where that does not hold, each character is a terminal of its own, which is exact, too, and
takes milliseconds a token.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from edgedec_runtimes.grammar.gbnf import ROOT, Chars, Choice, Node, Repeat, Rule, Sequence, read_gbnf

_N_ASCII = 128
_ASCII = (1 << _N_ASCII) - 1
_OTHERS = 1 << _N_ASCII  # the bit of a mask that stands for all characters that are not ASCII
_MOST_PASSES = 100  # over all rules, until what is known of them stays the same; a few are the rule
_N_TRANSLATED = 8  # grammars that are kept


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a part. Sets of characters are masks: a bit for each of ASCII, and one for all others.

    Attributes:
        empty: Whether it may be the empty text.
        first: The characters that it may begin with.
        longer: The characters with which a whole text of it might go on to a longer one; maybe more than these.
        all: All characters in it.
    """

    empty: bool = False
    first: int = 0
    longer: int = 0
    all: int = 0


@lru_cache(_N_TRANSLATED)
def lark_of_gbnf(source: str) -> str:
    """Return the grammar in Lark's notation that has the texts of a grammar in GBNF.

    >>> lark_of_gbnf('root ::= "a" [^b-]*').splitlines()
    ['start: ROOT_0', 'ROOT_0: ("a" /[^b\\\\x{2d}]/*)']

    Raises:
        RequestError: As read_gbnf.
    """
    rules = read_gbnf(source)
    order, regular = _ordered(rules)
    facts = {} if ROOT in regular else _facts_of(rules, order)
    splits = ROOT in regular or _is_decided_by_one_character(rules, order, regular, facts)
    writer = _Writer({name: i for i, name in enumerate(order)}, regular if splits else frozenset(), splits)
    lines = [f"start: {writer.name(ROOT)}", *(f"{writer.name(name)}: {writer.body(name, rules)}" for name in order)]
    return "\n".join([*lines, *writer.further]) + "\n"


def _references(node: Node) -> Iterable[str]:
    """Yield the names of the rules in a part, one for each reference."""
    open_parts = [node]
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, Rule):
            yield part.name
        elif isinstance(part, Repeat):
            open_parts.append(part.part)
        elif not isinstance(part, Chars):
            open_parts += part.parts


def _ordered(rules: Mapping[str, Node]) -> tuple[list[str], frozenset[str]]:
    """Return the rules that `root` needs, each after those that it refers to, and those of them without recursion."""
    order: dict[str, bool] = {}  # whether each is without recursion
    begun: set[str] = set()
    path = [ROOT]
    while path:
        name = path[-1]
        if name not in begun:
            begun.add(name)
            path += [each for each in _references(rules[name]) if each not in begun]
            continue
        path.pop()
        if name not in order:
            order[name] = all(order.get(each, False) for each in _references(rules[name]))
    return list(order), frozenset(name for name, is_regular in order.items() if is_regular)


def _mask(chars: Chars) -> int:
    mask = 0
    for first, last in chars.ranges:
        if first < _N_ASCII:
            mask |= (1 << (min(last, _N_ASCII - 1) + 1)) - (1 << first)
        if last >= _N_ASCII:
            mask |= _OTHERS
    return (_ASCII & ~mask) | _OTHERS if chars.negated else mask


def _facts_of(rules: Mapping[str, Node], order: list[str]) -> dict[str, _Facts]:
    """Return the facts of every rule: the least ones that agree with each other; none where that takes too long."""
    facts = dict.fromkeys(order, _Facts())
    for _ in range(_MOST_PASSES):
        before = dict(facts)
        for name in order:
            facts[name] = _facts(rules[name], facts)
        if facts == before:
            return facts
    return {}


def _facts(node: Node, facts: Mapping[str, _Facts]) -> _Facts:
    if isinstance(node, Chars):
        mask = _mask(node)
        return _Facts(False, mask, 0, mask)
    if isinstance(node, Rule):
        return facts[node.name]
    if isinstance(node, Repeat):
        return _repeated(_facts(node.part, facts), node)
    parts = [_facts(part, facts) for part in node.parts]
    return _one_of(parts) if isinstance(node, Choice) else _in_turn(parts)


def _repeated(part: _Facts, node: Repeat) -> _Facts:
    longer = part.longer if node.most in (1, node.least) else part.longer | part.first
    if part.longer & part.first or (part.empty and node.most != 1):  # where one ends and the next begins is open
        longer = part.all
    return _Facts(part.empty or node.least == 0, part.first, longer, part.all)


def _one_of(parts: list[_Facts]) -> _Facts:
    first = longer = every = 0
    clash = False
    for part in parts:
        clash |= bool(first & part.first)
        first, longer, every = first | part.first, longer | part.longer, every | part.all
    return _Facts(any(part.empty for part in parts), first, every if clash else longer, every)


def _in_turn(parts: list[_Facts]) -> _Facts:
    whole = _Facts(empty=True)
    clash = False
    for part in reversed(parts):
        clash |= bool((part.longer | (part.first if part.empty else 0)) & whole.first)
        longer = whole.longer | (part.longer | whole.first if whole.empty else 0)
        first = part.first | (whole.first if part.empty else 0)
        whole = _Facts(part.empty and whole.empty, first, longer, part.all | whole.all)
    return _Facts(whole.empty, whole.first, whole.all, whole.all) if clash else whole


def _is_decided_by_one_character(
    rules: Mapping[str, Node], order: list[str], regular: frozenset[str], facts: Mapping[str, _Facts]
) -> bool:
    """Return whether one character always says how a text goes on, and where each terminal ends."""
    follow = dict.fromkeys(order, 0)
    for _ in range(_MOST_PASSES if facts else 0):
        before = dict(follow)
        for name in reversed(order):
            if name not in regular and not _is_decided(rules[name], follow[name], follow, regular, facts):
                return False
        if follow == before:
            return True
    return False


def _is_decided(
    node: Node, after: int, follow: dict[str, int], regular: frozenset[str], facts: Mapping[str, _Facts]
) -> bool:
    """Return the same for a part that the characters `after` may follow; add to what may follow its rules."""
    first_facts = _facts(node, facts)
    if _is_regular(node, regular):
        return not (first_facts.longer | (first_facts.first if first_facts.empty else 0)) & after
    if isinstance(node, Rule):
        follow[node.name] |= after
        return True
    if isinstance(node, Repeat):
        again = after if node.most == 1 else after | first_facts.first
        clash = node.least != node.most and first_facts.first & after
        return not clash and _is_decided(node.part, again, follow, regular, facts)
    if isinstance(node, Sequence):
        for part in reversed(node.parts):
            if not _is_decided(part, after, follow, regular, facts):
                return False
            part_facts = _facts(part, facts)
            after = part_facts.first | (after if part_facts.empty else 0)
        return True
    assert isinstance(node, Choice)
    taken, n_empty = 0, 0
    for part in node.parts:
        part_facts = _facts(part, facts)
        begins = part_facts.first | (after if part_facts.empty else 0)
        n_empty += part_facts.empty
        if begins & taken or n_empty > 1 or not _is_decided(part, after, follow, regular, facts):
            return False
        taken |= begins
    return True


def _is_regular(node: Node, regular: frozenset[str]) -> bool:
    return all(name in regular for name in _references(node))


@dataclass(slots=True)
class _Writer:
    """Writes rules in Lark's notation.

    Attributes:
        places: The place of each rule among the rules, which makes its name a unique one.
        terminals: The rules that are terminals.
        splits: Whether parts of the other rules are terminals; else each character is one.
        further: Definitions of terminals that have no rule of their own.
    """

    places: Mapping[str, int]
    terminals: frozenset[str]
    splits: bool
    further: list[str] = field(default_factory=list)

    def name(self, name: str) -> str:
        """Return a rule's name: in capitals where it is a terminal."""
        plain = "".join(c if c.isalnum() else "_" for c in name[:40]) + f"_{self.places[name]}"
        plain = plain if plain[0].isalpha() else f"r_{plain}"
        return plain.upper() if name in self.terminals else plain.lower()

    def body(self, name: str, rules: Mapping[str, Node]) -> str:
        """Return what the rule of a name stands for."""
        node = rules[name]
        if name in self.terminals or not self.splits:
            return _written(node, self.name, joined=self.splits)
        return self._skeleton(node)

    def _skeleton(self, node: Node) -> str:
        """Return a part with recursion; the parts in it that have none become terminals."""
        if isinstance(node, Rule):
            return self.name(node.name)
        if _is_regular(node, self.terminals):
            return self._terminal(node)
        if isinstance(node, Repeat):
            inner = self._skeleton(node.part)
            return f"({inner}){_times(node)}" if isinstance(node.part, Repeat) else f"{inner}{_times(node)}"
        assert isinstance(node, Sequence | Choice)
        sign = " " if isinstance(node, Sequence) else " | "
        return f"({sign.join(self._skeleton(part) for part in node.parts)})"

    def _terminal(self, node: Node) -> str:
        """Return what stands for a part without recursion: itself where it is one character, else a terminal's name."""
        if isinstance(node, Chars) or node == Sequence(()):
            return _written(node, self.name, joined=True)
        name = f"PART_{len(self.further)}"
        self.further.append(f"{name}: {_written(node, self.name, joined=True)}")
        return name


def _written(node: Node, name: Callable[[str], str], *, joined: bool) -> str:
    """Return a part in Lark's notation.

    Args:
        node: The part.
        name: Returns the name of a rule.
        joined: Whether characters that follow one another are written as one string, and so become one terminal.
    """
    if isinstance(node, Chars):
        return _string([node]) if _is_plain(node) else _class(node)
    if isinstance(node, Rule):
        return name(node.name)
    if isinstance(node, Repeat):
        inner = _written(node.part, name, joined=joined)
        return f"({inner}){_times(node)}" if isinstance(node.part, Repeat) else f"{inner}{_times(node)}"
    if isinstance(node, Choice):
        return f"({' | '.join(_written(part, name, joined=joined) for part in node.parts)})"
    written: list[str] = []
    for plain, run in groupby(node.parts, lambda part: joined and _is_plain(part)):
        parts = list(run)
        written += [_string(parts)] if plain else [_written(part, name, joined=joined) for part in parts]
    return f"({' '.join(written)})" if written else '""'


def _is_plain(node: Node) -> bool:
    """Return whether a part is one certain character."""
    return isinstance(node, Chars) and not node.negated and len(node.ranges) == 1 and len(set(node.ranges[0])) == 1


def _string(characters: Iterable[Node]) -> str:
    return json.dumps("".join(chr(each.ranges[0][0]) for each in characters if isinstance(each, Chars)))


def _class(chars: Chars) -> str:
    """Return a regular expression of one character.

    >>> _class(Chars(((97, 122), (45, 45)))), _class(Chars((), negated=True))
    ('/[a-z\\\\x{2d}]/', '/(?s:.)/')
    """
    if not chars.ranges:
        return "/(?s:.)/"
    ranges = "".join(_code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in chars.ranges)
    return f"/[{'^' if chars.negated else ''}{ranges}]/"


def _code(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _times(node: Repeat) -> str:
    if (node.least, node.most) == (0, 1):
        return "?"
    if node.most is None and node.least < 2:
        return "*+"[node.least]
    return f"{{{node.least},{'' if node.most is None else node.most}}}"

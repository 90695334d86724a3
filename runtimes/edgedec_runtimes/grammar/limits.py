"""What is refused before llguidance sees it, as its own limits come too late: recursion there ends the process.

It follows references by recursion. A chain of 3,000 rules, or of 1,200 definitions of a JSON schema, is over the 8 MB
that a thread's stack often has (the compiler takes a larger one), and a few terminals that each hold the next one twice
take minutes. So the longest chain that there may be is found first; where definitions go round in circles, all of these
are taken to be one chain.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgedec.errors import RequestError
from edgedec.grammar import GRAMMAR_BYTES, Grammar, Kind
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.grammar.certain import count_nodes, lark_bytes, patterns, regex_bytes, schema_bytes, target

MOST_LEVELS = 4000
"""Of what refers to one another, levels of nesting within each included."""
MOST_EXPANDED = 50_000
"""Parts of a terminal, with those of the terminals in it."""
MOST_BYTES: Mapping[Kind, int] = {"regex": 20_000, "lark": 100_000}
"""Of a source, or of an expression in one; the time to compile one long expression grows with its square."""
MOST_WALKED = 1_000_000
"""Objects and lists of a JSON schema, with those of the definitions that it refers to by so many names."""
MOST_REPEATED = 100_000
"""Of one repetition in a regular expression; a million takes a minute to compile."""
MOST_CERTAIN = 100_000
"""Bytes of text that may be certain to follow (certain.py), which takes about half a second and 40 MB to find out."""

_SOURCE_UNIT, _LEVEL_UNIT, _NODE_UNIT, _CERTAIN_UNIT = 40, 13_000, 400, 600  # bytes of memory, measured or above it


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a grammar may ask for, where so much memory is there to compile it.

    Attributes:
        n_bytes: The memory.
        source: Bytes of the source.
        levels: Of what refers to one another.
        nodes: Objects and lists of a JSON schema.
        certain: Bytes of text that may be certain to follow.
    """

    n_bytes: int = GRAMMAR_BYTES

    @property
    def source(self) -> int:
        return self.n_bytes // _SOURCE_UNIT

    @property
    def levels(self) -> int:
        return min(MOST_LEVELS, self.n_bytes // _LEVEL_UNIT)

    @property
    def nodes(self) -> int:
        return self.n_bytes // _NODE_UNIT

    @property
    def certain(self) -> int:
        return min(MOST_CERTAIN, self.n_bytes // _CERTAIN_UNIT)

    @property
    def advice(self) -> str:
        """What to do where a limit is that of the memory."""
        return f"or allow more memory: of it, {format_bytes(self.n_bytes)} are for a grammar"


_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_HEAD = re.compile(r"[^\S\n]*[?!]*(?P<name>[A-Za-z_][\w-]*)[^\S\n]*[:.{\[]")  # definitions begin lines, each on its own
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")  # an odd number of them
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_LITERAL = re.compile(  # what is not closed goes to the line's end at once
    r'"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\\?\Z)|/(?P<regex>(?:\\.|[^/\\\n])++)(?:/|(?=\n)|\\?\Z)|//[^\n]*|#[^\n]*'
)
_JSON = re.compile(r"%json\s*(?=\{)")
_NAMES: Mapping[Kind, str] = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar"}


@dataclass(slots=True)
class _Part:
    """A definition.

    Attributes:
        weight: How deep it is.
        uses: What it refers to, as often as it does.
        renamed: Whether names change their meaning in it.
        n_nodes: Objects and lists in it.
    """

    weight: int
    uses: list[str] = field(default_factory=list)
    renamed: bool = False
    n_nodes: int = 0


def require_modest(grammar: Grammar, limits: Limits | None = None) -> None:
    """Raise RequestError where compiling a grammar would take too much stack, time or memory."""
    limits = limits or Limits()
    n_bytes = len(grammar.source.encode(errors="surrogatepass"))
    if n_bytes > limits.source:
        raise RequestError(
            f"the {_NAMES[grammar.kind]} takes {n_bytes} bytes; at most {limits.source} are compiled: cut it down, "
            f"{limits.advice}"
        )
    if grammar.kind == "regex":
        _require_regex(grammar.source, "regex", limits)
    elif grammar.kind == "json_schema":
        _require_schema(json.loads(grammar.source), limits)
    elif grammar.kind == "lark":
        _require_size(grammar.source, "lark", "grammar")
        _require_shallow(_lark_parts(grammar.source), "grammar", limits)
        sizes, _ = _summed(_lark_parts(_LITERAL.sub(" 0 ", grammar.source)), sum)
        if any(n > MOST_EXPANDED for name, n in sizes.items() if name.isupper()):
            raise RequestError(
                f"the grammar has a terminal of over {MOST_EXPANDED} parts; let a rule, whose name is in lower case, "
                "hold what repeats"
            )
        for literal in _LITERAL.finditer(grammar.source):
            if literal["regex"]:
                _require_regex(literal["regex"], "regex in the grammar", limits)
        for schema in _embedded(grammar.source):
            _require_schema(schema, limits)
        _require_short(lark_bytes(grammar.source), "grammar", limits)


def _require_size(source: str, kind: Kind, name: str) -> None:
    n_bytes, most = len(source.encode(errors="surrogatepass")), MOST_BYTES[kind]
    if n_bytes > most:
        raise RequestError(f"the {name} takes {n_bytes} bytes; at most {most} are compiled: cut it down")


def _require_regex(source: str, name: str, limits: Limits) -> None:
    _require_size(source, "regex", name)
    if _LONE_BACKSLASH.search(source):
        raise RequestError(
            f"the {name} ends in a lone backslash, which stands for nothing: write two for a backslash, or leave it out"
        )
    counts = (int(n[:20]) for pair in _REPETITION.findall(source) for n in pair if n)
    if max(counts, default=0) > MOST_REPEATED:
        raise RequestError(f"the {name} repeats something over {MOST_REPEATED} times; ask for fewer")
    _require_short(regex_bytes(source), name, limits)


def _require_schema(schema: Any, limits: Limits) -> None:
    n_nodes = count_nodes(schema, limits.nodes)
    if n_nodes > limits.nodes:
        raise RequestError(f"the JSON schema holds over {limits.nodes} objects and lists: cut it down, {limits.advice}")
    _require_shallow(_schema_parts(schema), "JSON schema", limits)
    for pattern in patterns(schema):
        _require_regex(pattern, "pattern in the JSON schema", limits)
    _require_short(schema_bytes(schema), "JSON schema", limits)


def _require_short(n_bytes: int, name: str, limits: Limits) -> None:
    if n_bytes > limits.certain:
        less = f", {limits.advice}" if limits.certain < MOST_CERTAIN else ""
        raise RequestError(
            f"the {name} may ask for a text of over {limits.certain} bytes at once, by what it repeats and requires: "
            f"lower the counts ({{n}}, minItems, minLength) that stand in one another{less}"
        )


def _require_shallow(parts: Mapping[str, _Part], name: str, limits: Limits) -> None:
    depths, circular = _summed(parts, max)
    n_levels = max(depths.values(), default=0) + sum(parts[each].weight for each in circular)
    if n_levels > limits.levels:
        less = f", {limits.advice}" if limits.levels < MOST_LEVELS else ""
        raise RequestError(
            f"the {name} refers from one definition to the next through {n_levels} levels; at most {limits.levels} are "
            f"compiled: make it flatter{less}"
        )


def _summed(parts: Mapping[str, _Part], join: Callable[[Iterable[int]], int]) -> tuple[dict[str, int], set[str]]:
    """Return each part's weight with its uses' joined by max or sum, and those that lead into a circle instead.

    >>> _summed({"a": _Part(1, ["b", "b"]), "b": _Part(2)}, sum)
    ({'b': 2, 'a': 5}, set())
    """
    found: dict[str, int] = {}
    users: dict[str, list[str]] = {}
    n_open = {name: len(set(part.uses)) for name, part in parts.items()}
    for name, part in parts.items():
        for use in set(part.uses):
            users.setdefault(use, []).append(name)
    ready = [name for name, n in n_open.items() if n == 0]
    while ready:
        name = ready.pop()
        found[name] = parts[name].weight + join([0, *(found[use] for use in parts[name].uses)])
        for user in users.get(name, ()):
            n_open[user] -= 1
            if n_open[user] == 0:
                ready.append(user)
    return found, set(parts) - set(found)


def _schema_parts(schema: Any) -> dict[str, _Part]:
    """Return a JSON schema and what it refers to as "#/...", by these names; the whole is named "".

    Where a reference may mean something else than that, all of them are taken to be one chain.
    """
    whole = _measured(schema, everything=True)
    parts: dict[str, _Part] = {}
    missing, n_walked = [""], 0
    while missing:
        name = missing.pop()
        if name in parts:
            continue
        found = None if whole.renamed and name else target(schema, name)
        if found is None:
            return {"": _Part(whole.weight * (1 + len(set(whole.uses))))}
        parts[name] = _measured(found)
        n_walked += parts[name].n_nodes
        if n_walked > MOST_WALKED:
            raise RequestError(
                f"the JSON schema refers to over {MOST_WALKED} objects and lists, counted for each name; make what is "
                "referred to smaller"
            )
        missing.extend(parts[name].uses)
    return parts


def _measured(schema: Any, *, everything: bool = False) -> _Part:
    """Return how deep a part of a JSON schema is, and what it refers to; definitions within it by reference only."""
    part = _Part(1)
    left_out = () if everything else ("$defs", "definitions")
    level = [schema] if isinstance(schema, dict | list) else []  # true and false are schemas, too
    while level:
        following: list[Any] = []
        part.n_nodes += len(level)
        for each in level:
            if isinstance(each, dict):
                part.uses += [str(each[key]) for key in ("$ref", "$dynamicRef", "$recursiveRef") if key in each]
                part.renamed |= each is not schema and isinstance(each.get("$id"), str)
                part.renamed |= "draft-04" in str(each.get("$schema"))  # where it is "id"
                following += [value for key, value in each.items() if key not in left_out]
            else:
                following += each
        level = [each for each in following if isinstance(each, dict | list)]
        part.weight += bool(level)
    return part


def _lark_parts(source: str) -> dict[str, _Part]:
    """Return the definitions of a grammar in Lark's notation; a name within a string counts as a use of it.

    >>> {name: part.uses for name, part in _lark_parts('start: A b | A\\nA: "x"\\nb: start "A"').items()}
    {'start': ['A', 'b', 'A'], 'A': [], 'b': ['start', 'A']}
    """
    parts: dict[str, _Part] = {}
    part = _Part(1)
    for line in source.split("\n"):
        head = _HEAD.match(line)
        if head is not None:
            part = parts.setdefault(head["name"], _Part(1))
        part.uses += _NAME.findall(line, head.end() if head is not None else 0)
    for part in parts.values():
        part.uses = [name for name in part.uses if name in parts]
    return parts


def _embedded(source: str) -> Iterator[Any]:
    """Yield the JSON schemas within a grammar; what is no JSON is llguidance's to refuse."""
    for match in _JSON.finditer(source):
        try:
            yield json.JSONDecoder().raw_decode(source, match.end())[0]
        except (ValueError, RecursionError):
            continue

"""Refusing grammars that would exhaust the stack, the time or the memory, before llguidance sees them.

llguidance follows references by recursion, and its own limits come too late: an overflow of the stack ends the process.
A chain of 3,000 rules, or of 1,200 definitions of a JSON schema, overflows the 8 MB of a usual stack (the compiler
takes a larger one). A few terminals that each hold the next one twice take minutes. So the longest possible chain is
found here first; definitions that refer to one another in circles count as one chain.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgedec.errors import RequestError
from edgedec.grammar import GRAMMAR_BYTES, Grammar, Kind
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.grammar.certain import count_nodes, lark_bytes, patterns, regex_bytes, schema_bytes
from edgedec_runtimes.grammar.references import REFERENCES, target

MOST_LEVELS = 4000
"""The most levels in a chain of definitions that refer to one another, the nesting inside of each included."""
MOST_EXPANDED = 50_000
"""The most parts of a terminal, those of the terminals in it included."""
MOST_BYTES: Mapping[Kind, int] = {"regex": 20_000, "lark": 100_000, "gbnf": 100_000}
"""The most bytes of a regular expression or a grammar; the time to compile an expression grows with its square."""
MOST_WALKED = 1_000_000
"""The most objects and lists of a JSON schema, where a definition counts once for each name it is referred to by."""
MOST_REPEATED = 100_000
"""The most repetitions at one place of a regular expression; a million takes a minute to compile."""
MOST_CERTAIN = 100_000
"""The most bytes of text that may be certain to follow (certain.py), which take half a second and 40 MB to find."""

_SOURCE_UNIT, _LEVEL_UNIT, _NODE_UNIT, _CERTAIN_UNIT = (
    40,
    13_000,
    400,
    600,
)  # bytes of memory for one of each, measured and rounded up


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest grammar that is compiled with `n_bytes` of memory.

    Attributes:
        n_bytes: The memory for a grammar.
        source: The most bytes of its source.
        levels: The most levels in a chain of its definitions.
        nodes: The most objects and lists of a JSON schema.
        certain: The most bytes of text that may be certain to follow.
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
        """What a message says to do where the memory sets a limit."""
        return f"or allow more memory: of it, {format_bytes(self.n_bytes)} are for a grammar"


_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_HEAD = re.compile(r"[^\S\n]*[?!]*(?P<name>[A-Za-z_][\w-]*)[^\S\n]*[:.{\[]")  # a definition begins a line
_LONE_BACKSLASH = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")  # an odd number of them
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_LITERAL = re.compile(  # what is not closed goes to the line's end at once
    r'"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\\?\Z)|/(?P<regex>(?:\\.|[^/\\\n])++)(?:/|(?=\n)|\\?\Z)|//[^\n]*|#[^\n]*'
)
_JSON = re.compile(r"%json\s*(?=\{)")
_NAMES: Mapping[Kind, str] = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar", "gbnf": "grammar"}


@dataclass(slots=True)
class _Part:
    """A definition of a grammar or a JSON schema.

    Attributes:
        weight: Its levels of nesting.
        uses: The names of the definitions that it refers to, each as often as it does.
        renamed: Whether names change their meaning inside of it.
        n_nodes: How many objects and lists it has.
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
    elif grammar.kind == "gbnf":
        _require_size(grammar.source, "gbnf", "grammar")
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
    """Return the weight of each part, and the names of the parts that refer to one another in a circle, or to such.

    The weight of a part includes the weights of the parts that it uses, joined by `join` (max or sum).

    >>> _summed({"a": _Part(1, ["b", "b"]), "b": _Part(2)}, sum)
    ({'b': 2, 'a': 5}, set())
    """
    sums: dict[str, int] = {}
    users: dict[str, list[str]] = {}
    n_open = {name: len(set(part.uses)) for name, part in parts.items()}
    for name, part in parts.items():
        for use in set(part.uses):
            users.setdefault(use, []).append(name)
    ready = [name for name, n in n_open.items() if n == 0]
    while ready:
        name = ready.pop()
        sums[name] = parts[name].weight + join([0, *(sums[use] for use in parts[name].uses)])
        for user in users.get(name, ()):
            n_open[user] -= 1
            if n_open[user] == 0:
                ready.append(user)
    return sums, set(parts) - set(sums)


def _schema_parts(schema: Any) -> dict[str, _Part]:
    """Return a JSON schema, named "", and the parts that it refers to, by the names "#/..." of its references.

    Where a name may mean something else than a place in the schema, all references count as one chain.
    """
    whole = _measured(schema, everything=True)
    parts: dict[str, _Part] = {}
    missing, n_walked = [""], 0
    while missing:
        name = missing.pop()
        if name in parts:
            continue
        target_name = None if whole.renamed and name else target(schema, name)
        if target_name is None:
            return {"": _Part(whole.weight * (1 + len(set(whole.uses))))}
        parts[name] = _measured(target_name)
        n_walked += parts[name].n_nodes
        if n_walked > MOST_WALKED:
            raise RequestError(
                f"the JSON schema refers to over {MOST_WALKED} objects and lists, counted for each name; make what is "
                "referred to smaller"
            )
        missing.extend(parts[name].uses)
    return parts


def _measured(schema: Any, *, everything: bool = False) -> _Part:
    """Return the levels and the references of a part of a JSON schema.

    Definitions inside of it ($defs) count only where they are referred to, or with `everything`.
    """
    part = _Part(1)
    left_out = () if everything else ("$defs", "definitions")
    level = [schema] if isinstance(schema, dict | list) else []  # true and false are schemas, too
    while level:
        following: list[Any] = []
        part.n_nodes += len(level)
        for each in level:
            if isinstance(each, dict):
                part.uses += [str(each[key]) for key in REFERENCES if key in each]
                part.renamed |= each is not schema and isinstance(each.get("$id"), str)
                part.renamed |= "draft-04" in str(each.get("$schema"))  # where it is "id"
                following += [value for key, value in each.items() if key not in left_out]
            else:
                following += each
        level = [each for each in following if isinstance(each, dict | list)]
        part.weight += bool(level)
    return part


def _lark_parts(source: str) -> dict[str, _Part]:
    """Return the definitions of a grammar in Lark's notation; a name inside of a string counts as a reference, too.

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
    """Yield the JSON schemas inside of a grammar; llguidance refuses what is no JSON."""
    for match in _JSON.finditer(source):
        try:
            yield json.JSONDecoder().raw_decode(source, match.end())[0]
        except (ValueError, RecursionError):
            continue

"""The negation of a JSON schema, as a schema without `not`."""

import re
from collections.abc import Mapping
from typing import Any

from edgedec_runtimes.grammar.references import target

TYPES = ("null", "boolean", "object", "array", "number", "string")
ANNOTATIONS = frozenset(
    tuple(
        """
        title description default examples example deprecated readOnly writeOnly format $schema $id id $comment
        $anchor definitions $defs contentEncoding contentMediaType
        """.split()
    )
)
_MOST_LEVELS = 16
_MOST_WORDS = 200
MOST_PARTS = 50_000  # of a schema, looked at again for each place that they are said in: some tenths of a second


class TooManyPartsError(Exception):
    """A schema in other words would be too large."""


class Lookup:
    """Finds the parts of a schema that references name, and counts the parts that are looked at.

    Args:
        schema: The whole schema.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._n_left = MOST_PARTS

    def __call__(self, name: str) -> Any:
        """Return the schema that a reference names; None where it is not known."""
        return target(self._schema, name)

    def spend(self) -> None:
        """Count one part (TooManyPartsError beyond MOST_PARTS)."""
        self._n_left -= 1
        if self._n_left < 0:
            raise TooManyPartsError


def negated(schema: Any, lookup: Lookup, level: int = 0) -> Any:
    """Return a schema whose texts are not texts of `schema`; None where no such schema is found.

    It need not have all of them: of a conjunction, those parts are negated that can be, which leaves some texts out but
    takes none in.

    >>> negated({"required": ["a"]}, Lookup({}))
    {'type': 'object', 'properties': {'a': False}}
    """
    lookup.spend()
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or level > _MOST_LEVELS:
        return None
    parts = [part for key in schema if (part := _part(schema, key, lookup, level + 1)) is not None]
    if not any(key not in ANNOTATIONS for key in schema):
        return False
    return any_of(parts) if parts else None


def any_of(cases: list[Any]) -> Any:
    """Return a schema of the texts of any of the cases.

    >>> any_of([False, {"type": "null"}]), any_of([]), any_of([{}, True])
    ({'type': 'null'}, False, True)
    """
    left = [case for case in cases if case is not False]
    if any(case is True for case in left):
        return True
    return left[0] if len(left) == 1 else {"anyOf": left} if left else False


def all_of(parts: list[Any]) -> Any:
    """Return a schema of the texts that all of the parts have.

    >>> all_of([True, {"type": "null"}]), all_of([]), all_of([{}, False])
    ({'type': 'null'}, True, False)
    """
    left = [part for part in parts if part is not True]
    if any(part is False for part in left):
        return False
    return left[0] if len(left) == 1 else {"allOf": left} if left else True


def _part(schema: Mapping[str, Any], key: str, lookup: Lookup, level: int) -> Any:
    """Return the negation of one key of a schema; None where there is none."""
    value = schema[key]
    if key == "$ref":
        return negated(lookup(value), lookup, level) if isinstance(value, str) else None
    if key == "type":
        return _other_types([value] if isinstance(value, str) else list(value))
    if key in ("enum", "const"):
        return _other_values(value if key == "enum" else [value])
    if key == "required" and isinstance(value, list):
        return any_of([{"type": "object", "properties": {name: False}} for name in value])
    if key == "properties" and isinstance(value, dict):
        cases = {name: negated(part, lookup, level) for name, part in value.items()}
        return any_of([_having(name, part) for name, part in cases.items() if part not in (None, False)]) or None
    if key in ("anyOf", "allOf") and isinstance(value, list):
        parts = [negated(part, lookup, level) for part in value]
        if key == "allOf":
            return any_of([part for part in parts if part is not None]) or None
        return None if any(part is None for part in parts) else all_of(parts)
    if key == "not":
        return value
    return _bound(key, value)


def _having(name: str, part: Any) -> dict[str, Any]:
    return {"type": "object", "required": [name], "properties": {name: part}}


def _other_types(types: list[Any]) -> Any:
    if "integer" in types and "number" not in types:
        return None  # a number that is no integer has no schema
    left = [each for each in TYPES if each not in types]
    return {"type": left} if left else False


_BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
}


def _bound(key: str, value: Any) -> Any:
    if key not in _BOUNDS or not isinstance(value, int | float) or isinstance(value, bool):
        return None
    kind, opposite, more = _BOUNDS[key]
    return False if value + more < 0 and kind != "number" else {"type": kind, opposite: value + more}


def _other_values(values: Any) -> Any:
    """Return a schema of all values but some strings, booleans and nulls; None where there are others among them."""
    if not isinstance(values, list) or len(values) > _MOST_WORDS:
        return None
    words = [value for value in values if isinstance(value, str)]
    booleans = [value for value in values if isinstance(value, bool)]
    if any(not (value is None or isinstance(value, str | bool)) for value in values):
        return None
    cases: list[Any] = [{"type": ["object", "array", "number"]}]
    cases += [] if None in values else [{"type": "null"}]
    cases += [{"enum": [each]} for each in (True, False) if each not in booleans] if booleans else [{"type": "boolean"}]
    return any_of([*cases, {"type": "string", "pattern": other_words(words)} if words else {"type": "string"}])


def other_words(words: list[str]) -> str:
    r"""Return a regular expression of all strings but these.

    >>> [w for w in ["", "a", "ab", "abc", "b", "ac"] if re.search(other_words(["ab", "a"]), w)]
    ['', 'abc', 'b', 'ac']
    """
    return f"^(?:{_others(sorted(set(words)))})$"


def _others(words: list[str]) -> str:
    """Return an expression of all strings but `words`, without its ends."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    cases = [f"{_literal(first)}(?:{_others(rest)})" for first, rest in by_first.items()]
    firsts = "".join(map(_literal, by_first))
    rest = f"[^{firsts}](?:.|\\n)*" if firsts else "(?:.|\\n)+"
    return "|".join([*cases, rest, *([] if "" in words else [""])])


def _literal(character: str) -> str:
    return f"\\x{ord(character):02X}" if character.isascii() else re.escape(character)

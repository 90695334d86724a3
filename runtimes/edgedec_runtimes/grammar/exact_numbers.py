"""JSON schemas with numbers that no double holds, as grammars in Lark's notation: every digit counts.

llguidance reads numbers as doubles. So the parts of a schema on the way to such numbers become rules, the numbers
become expressions, and every other part stays a JSON schema within the grammar.
"""

import json
import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from edgedec.errors import RequestError
from edgedec.exact_json import decimal_of, dumps, exact_float
from edgedec_runtimes.grammar.keywords import is_well_formed
from edgedec_runtimes.grammar.negation import ANNOTATIONS, TYPES, Lookup, TooManyPartsError
from edgedec_runtimes.grammar.references import MAPS, moved

_VALUES = ("const", "enum")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LONG = re.compile(r"\d(?:\.?\d){15}|\d[eE]")  # no number without such a part needs care
_MOST_CHARACTERS = 1_000_000  # of the grammar
_MOST_DIGITS = 200  # of a bound; its expression has as many levels
_STRING = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'
_KEYS: Mapping[str, tuple[str, ...]] = {  # those that concern values of one type only
    "number": (*_BOUNDS, "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
}
_KEYWORDS = {key for keys in _KEYS.values() for key in keys} | {"not", "if", "anyOf", "oneOf", "$ref", "x-guidance"}
_KEYWORDS |= {
    *_VALUES,
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
}
_Bound = tuple[Decimal, bool]  # and whether it may be reached


class _NoRuleError(Exception):
    """A number that must be exact stands where no rule can be made for it; the message says where."""


def lark_of_inexact(source: str, style: Mapping[str, Any]) -> str | None:
    """Return a grammar of a JSON schema's texts where llguidance would change the schema's numbers; else None.

    Args:
        source: The schema.
        style: llguidance's options of JSON, with the separators ", " and ": ".

    Raises:
        RequestError: Such a number stands beside a keyword for which there are no rules, or nothing is left by bounds.
    """
    if _LONG.search(source) is None:
        return None
    schema = json.loads(source, parse_float=exact_float)
    try:
        if not is_well_formed(schema) or not _is_inexact(schema, Lookup(schema)):
            return None  # llguidance takes it, or refuses a keyword's form
        _require(schema, *_KEYWORDS - {"x-guidance"})
        rules = _Rules(schema, style)
        start = rules.of(schema)
    except (_NoRuleError, TooManyPartsError, ArithmeticError, RecursionError) as error:
        reason = str(error) if isinstance(error, _NoRuleError) else "the schema is too large"
        raise RequestError(
            f"the JSON schema has numbers that no double holds, and they can't be kept: {reason}; say it otherwise, or "
            "let the number be a string"
        ) from error
    if not start:
        raise RequestError("the JSON schema has no text: its bounds and values leave no number; change them")
    return "\n".join([f"start: {start}", *rules.lines])


def _is_inexact(schema: Any, lookup: Lookup) -> bool:
    """Return whether a part of a schema, or what it refers to, has numbers that llguidance would change."""
    left, seen = [schema], set[int]()
    while left:
        node = left.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        lookup.spend()
        for key, part in node.items():
            if key in (*_VALUES, *_BOUNDS):
                if _changes(part, 22 if key in _VALUES else 14):
                    return True
            elif key == "$ref" and isinstance(part, str):
                left.append(lookup(part))
            elif key not in ANNOTATIONS:
                is_map = key in MAPS and isinstance(part, dict)
                left += part.values() if is_map else part if isinstance(part, list) else [part]
    return False


def _changes(value: Any, most: int) -> bool:
    """Return whether llguidance changes a number, or one within a value; it keeps floats below 10 ** `most`."""
    if isinstance(value, dict | list):
        return any(_changes(each, most) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, int) or not isinstance(value, float):
        return isinstance(value, int) and abs(value) >= 2**53
    number = decimal_of(value)
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0")
    return len(digits) > 15 or (number != 0 and not -22 <= number.adjusted() <= most)


class _Rules:
    """The rules of a grammar, as they are made.

    Args:
        root: The whole schema, from which references lead.
        style: llguidance's options of JSON.
    """

    def __init__(self, root: Mapping[str, Any], style: Mapping[str, Any]) -> None:
        self._root, self._style = root, style
        self._lookup = Lookup(root)
        self._by_reference: dict[str, str] = {}
        self._n_left = _MOST_CHARACTERS
        self.lines: list[str] = []

    def _add(self, body: str, *, name: str = "") -> str:
        name = name or f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        self._n_left -= len(body)
        if self._n_left < 0:
            raise TooManyPartsError
        return name

    def of(self, schema: Any) -> str:
        """Return an expression for the texts of a part of the schema; "" where it has none."""
        if schema is False:
            return ""
        has_references = '"$ref"' in dumps(schema)
        inexact = _is_inexact(schema, self._lookup)
        if not isinstance(schema, dict) or not (inexact or has_references):
            return self._json(schema)
        try:
            return self._in_rules(_joined(schema))
        except _NoRuleError:
            if inexact:
                raise
            return self._json(moved(schema, "/root") | {"root": moved(self._root, "/root")})

    def _in_rules(self, node: Mapping[str, Any]) -> str:
        if node.keys() & {*_KEYWORDS, "type"} == {"$ref"}:
            return self._of_reference(node["$ref"])
        if "const" in node or "enum" in node:
            return self._any(json.dumps(dumps(value, ensure_ascii=False)) for value in _values(node))
        if "anyOf" in node:
            rest = {key: part for key, part in node.items() if key != "anyOf"}
            return self._any(self.of({"allOf": [case, rest]} if rest else case) for case in node["anyOf"])
        kind = node.get("type", list(TYPES))
        if isinstance(kind, list):
            return self._any(self.of(_of_type(node, each)) for each in kind)
        makers = {"integer": self._number, "number": self._number, "object": self._object, "array": self._array}
        if kind not in makers:
            raise _NoRuleError(f"{kind!r} stands beside references")
        return makers[kind](_of_type(node, kind))

    def _any(self, cases: Iterable[str]) -> str:
        texts = [each for each in cases if each]
        return self._add(" | ".join(texts)) if texts else ""

    def _json(self, schema: Any) -> str:
        """Return an expression for a part of the schema that llguidance reads right."""
        whole = schema if isinstance(schema, dict) else {}
        return self._add(f"%json {dumps(whole | {'x-guidance': dict(self._style)})}")

    def _of_reference(self, reference: str) -> str:
        if reference not in self._by_reference:
            self._by_reference[reference] = f"d{len(self._by_reference)}"
            body = self.of(self._lookup(reference))
            self._add(body or self._json({"enum": []}), name=self._by_reference[reference])
        return self._by_reference[reference]

    def _number(self, node: Mapping[str, Any]) -> str:
        _require(node, *_BOUNDS)
        is_whole = node["type"] == "integer"
        low, high = _bound(node, "Minimum", is_whole=is_whole), _bound(node, "Maximum", is_whole=is_whole)
        if low and high and (low[0] > high[0] or (low[0] == high[0] and not (low[1] and high[1]))):
            return ""
        signs = []
        if high is None or high >= (Decimal(0), True):
            signs.append(self._magnitude(low if low and low[0] >= 0 else (Decimal(0), True), high, is_whole))
        if low is None or low[0] < 0:
            least = (high[0].copy_abs(), high[1]) if high and high[0] < 0 else (Decimal(0), False)
            signs.append(f'"-" {self._magnitude(least, (low[0].copy_abs(), low[1]) if low else None, is_whole)}')
        return self._add(" | ".join(signs), name=f"N{len(self.lines)}")

    def _magnitude(self, low: _Bound, high: _Bound | None, is_whole: bool) -> str:
        most = "" if high is None else f" & ~/{above(high[0], not high[1], is_whole)}/"
        return self._add(f"/{above(*low, is_whole)}/{most}", name=f"N{len(self.lines)}")

    def _object(self, node: Mapping[str, Any]) -> str:
        _require(node, "properties", "required", "additionalProperties")
        required, rest = node.get("required", []), node.get("additionalProperties", True)
        properties = dict.fromkeys(required, rest) | node.get("properties", {})
        properties = {name: properties[name] for name in dict.fromkeys((*node.get("properties", {}), *required))}
        more = self.of(rest)
        first = after = ""  # the properties that are left: without a comma before them, and with one
        if more:
            taken = " | ".join(json.dumps(dumps(name, ensure_ascii=False)) for name in properties)
            key = self._add(_STRING + (f" & ~({taken})" if taken else ""), name=f"K{len(self.lines)}")
            after = self._add(f'(", " {key} ": " {more})*')
            first = self._add(f'({key} ": " {more} {after})?')
        for name, part in reversed(properties.items()):
            value = self.of(part)
            if not value and name in required:
                return ""
            if value:
                item = f"{json.dumps(dumps(name, ensure_ascii=False) + ': ')} {value}"
                cases = (f"{item} {after}",) if name in required else (f"{item} {after}", first or '""')
                first = self._add(" | ".join(cases))
                after = self._add(f'", " {item} {after}' if name in required else f'(", " {item})? {after}')
        return self._add(f'"{{" {first} "}}"')

    def _array(self, node: Mapping[str, Any]) -> str:
        _require(node, "items", "prefixItems", "additionalItems", "minItems", "maxItems")
        items, prefix = node.get("items", True), node.get("prefixItems", [])
        if isinstance(items, list):
            prefix, items = items, node.get("additionalItems", True)
        least, most = node.get("minItems", 0), node.get("maxItems", None)
        rest, parts = self.of(items), [self.of(part) for part in prefix][:most]
        if "" in parts:
            rest, parts = "", parts[: parts.index("")]
        if rest and not parts and most != 0:
            parts = [rest]
        n = len(parts)
        if most is not None and most <= n:
            rest = ""
        if least > n and not rest:
            return ""
        tail = f'(", " {rest}){{{max(least - n, 0)},{"" if most is None else most - n}}}' if rest else ""
        for i, part in reversed([*enumerate(parts)]):
            tail = self._add(f'", " {part} {tail}' if i else f"{part} {tail}")
            tail = tail if i < least else f"({tail})?"
        return self._add(f'"[" {tail} "]"')


def above(bound: Decimal, is_reached: bool, is_whole: bool) -> str:
    """Return a regular expression of the numbers from a bound on, without a sign or an exponent.

    >>> above(Decimal(74), True, True)
    '(7(4|[5-9][0-9]{0})|[8-9][0-9]{1})|[1-9][0-9]{2,}'
    """
    digits, _, decimals = format(bound.copy_abs(), "f").partition(".")
    decimals = decimals.rstrip("0")
    fraction = "" if is_whole else r"(\.[0-9]+)?"
    equal: str | None = fraction if is_reached else None if is_whole else r"\.[0-9]*[1-9][0-9]*"
    if decimals:
        equal = "[0-9]*" if is_reached else "[0-9]*[1-9][0-9]*"
        for digit in reversed(decimals):
            equal = f"({digit}{equal}" + (f"|[{int(digit) + 1}-9][0-9]*)" if digit < "9" else ")")
        equal = rf"\.{equal}"
    for n_behind, digit in enumerate(reversed(digits)):
        cases = [] if equal is None else [f"{digit}{equal}"]
        cases += [f"[{int(digit) + 1}-9][0-9]{{{n_behind}}}{fraction}"] if digit < "9" else []
        equal = f"({'|'.join(cases)})" if cases else None
    longer = f"[1-9][0-9]{{{len(digits)},}}{fraction}"
    return longer if equal is None else f"{equal}|{longer}"


def _bound(node: Mapping[str, Any], name: str, *, is_whole: bool) -> _Bound | None:
    """Return the lower or the upper bound of a number, whole for whole numbers; None where there is none."""
    plain, exclusive, is_low = node.get(name.lower()), node.get(f"exclusive{name}"), name == "Minimum"
    limits = [] if plain is None else [(plain, exclusive is not True)]
    limits += [] if exclusive is None or isinstance(exclusive, bool) else [(exclusive, False)]
    bounds: list[_Bound] = []
    for number, is_reached in limits:
        try:
            value = decimal_of(number)
        except ArithmeticError:
            value = Decimal("inf")
        if not value.is_finite() or abs(value.adjusted()) > _MOST_DIGITS or len(format(value, "f")) > _MOST_DIGITS:
            raise _NoRuleError(f"a bound has over {_MOST_DIGITS} digits")
        if is_whole:
            whole = int(value.to_integral_value(ROUND_CEILING if is_low == is_reached else ROUND_FLOOR))
            value, is_reached = Decimal(whole if is_reached else whole + (1 if is_low else -1)), True
        bounds.append((value, is_reached))
    if is_low:
        return max(bounds, key=lambda each: (each[0], not each[1]), default=None)
    return min(bounds, default=None)


def _joined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema without annotations, and with what its allOf says beside the rest."""
    node = {key: part for key, part in schema.items() if key not in ANNOTATIONS - {"format"} and key != "allOf"}
    for part in schema.get("allOf", ()):
        if part is False:
            return {"enum": []}
        for key, value in ({} if part is True else _joined(part)).items():
            if node.setdefault(key, value) != value:
                raise _NoRuleError(f"two parts that hold together say different things by {key!r}")
    return node


def _require(node: Mapping[str, Any], *keys: str) -> None:
    """Raise _NoRuleError where a part of a schema has other keywords than its type and these."""
    if others := [key for key in node if key in _KEYWORDS and key not in keys]:
        raise _NoRuleError(f"the number stands beside {others[0]!r}")


def _of_type(node: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a part of a schema for values of one type."""
    keywords = _KEYS.get("number" if kind == "integer" else kind, ())
    others = {key for keys in _KEYS.values() for key in keys} - {*keywords}
    return {key: part for key, part in node.items() if key not in others} | {"type": kind}


def _values(node: Mapping[str, Any]) -> list[Any]:
    """Return the values that a part of a schema names, of its type."""
    _require(node, "const" if "const" in node else "enum")
    values = [node["const"]] if "const" in node else node["enum"]
    kind = node.get("type", list(TYPES))
    return [value for value in values if _type_names(value) & {*([kind] if isinstance(kind, str) else kind)}]


def _type_names(value: Any) -> set[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = decimal_of(value)
        return {"number", "integer"} if number == number.to_integral_value() else {"number"}
    return {{type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}[type(value)]}

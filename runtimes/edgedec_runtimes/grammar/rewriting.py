"""JSON schemas in other words: what llguidance refuses, said with what it takes.

A rewritten schema takes no text that the original refuses. Mostly it takes all that the original takes; where a `not`
or a `oneOf` can't be negated whole, it takes fewer. Unknown formats say nothing, as the standard has it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from edgedec.exact_json import exact_float
from edgedec.grammar import Grammar, Predicate
from edgedec_runtimes.grammar.keywords import LISTS, SINGLE, is_well_formed
from edgedec_runtimes.grammar.negation import Lookup, TooManyPartsError, all_of, any_of, negated
from edgedec_runtimes.grammar.references import MAPS
from edgedec_runtimes.grammar.unique import UniqueItems, asks_for_unique, without_unique

Words = tuple[Grammar, Predicate | None]
"""A grammar, and what its texts must keep to beside it."""


def other_words(grammar: Grammar, n_most: int) -> Words | None:
    """Return the same JSON schema in words that llguidance may take; None where there are no others.

    There are none for a schema of over `n_most` characters, or with a keyword of a wrong form: llguidance refuses it.
    """
    if grammar.kind != "json_schema" or len(grammar.source) > n_most:
        return None
    schema = json.loads(grammar.source, parse_float=exact_float)
    if not is_well_formed(schema):
        return None
    try:
        unique = UniqueItems(schema) if asks_for_unique(schema) else None
        said = rewritten(without_unique(schema) if unique else schema)
    except (RecursionError, TooManyPartsError):
        return None
    if said == schema or not isinstance(said, dict):
        return None
    return Grammar.json_schema(said), unique


_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid unknown".split())
_MOST_CASES = 64  # that a oneOf may become
_MOST_NAMES = 40  # properties of an object of which one must be there


def rewritten(schema: Any) -> Any:
    """Return a schema, or the part of one that is true or false, in words that llguidance takes, as far as possible.

    Raises:
        TooManyPartsError: The words are too many.

    >>> rewritten({"type": "string", "format": "color", "not": {"const": "x"}})["type"]
    'string'
    """
    return _rewritten(schema, Lookup(schema))


def _rewritten(schema: Any, lookup: Lookup) -> Any:
    """Return a schema with its parts rewritten, and then its own keys."""
    lookup.spend()
    if not isinstance(schema, dict):
        return schema
    node: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            node[key] = {name: _rewritten(part, lookup) for name, part in value.items()}
        elif (key in LISTS or key == "items") and isinstance(value, list):
            node[key] = [_rewritten(part, lookup) for part in value]
        elif key in SINGLE:
            node[key] = _rewritten(value, lookup)
        else:
            node[key] = value
    for change in (_without_format, _with_names, _with_counts, _with_unique):
        change(node)
    parts = [part for say in (_dependencies, _negation, _condition, _one) for part in say(node, schema, lookup)]
    if any(part is False for part in parts):
        return False
    node |= {key: schema[key] for key in ("not", "if", "oneOf") if key in node}  # rewritten, these might take more
    parts = [part for part in parts if part is not True]
    if parts:
        node["allOf"] = [*node.get("allOf", []), *parts]
    return node


def _without_format(node: dict[str, Any]) -> None:
    if "format" in node and node["format"] not in _FORMATS:
        del node["format"]


def _opposite(schema: Any, lookup: Lookup) -> Any:
    """Return the negation of a schema as it was given, in words that llguidance takes; None where there is none.

    One that is rewritten may take fewer texts already, so that its negation would take too many.
    """
    opposite = negated(schema, lookup)
    return None if opposite is None else _rewritten(opposite, lookup)


def _dependencies(node: dict[str, Any], schema: Mapping[str, Any], lookup: Lookup) -> Iterator[Any]:
    """Yield what dependencies between properties say: a property is not there, or what it needs is."""
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        dependencies = node.pop(key, None)
        for name, needed in dependencies.items() if isinstance(dependencies, dict) else ():
            then = {"required": needed} if isinstance(needed, list) else needed
            if then != {"required": []}:
                yield any_of([{"properties": {name: False}}, then])


def _negation(node: dict[str, Any], schema: Mapping[str, Any], lookup: Lookup) -> Iterator[Any]:
    if "not" in node and (opposite := _opposite(schema["not"], lookup)) is not None:
        del node["not"]
        yield opposite


def _condition(node: dict[str, Any], schema: Mapping[str, Any], lookup: Lookup) -> Iterator[Any]:
    """Yield what if, then and else say: not the condition, or the first; the condition, or the second."""
    condition, then, other = node.get("if"), node.get("then", True), node.get("else", True)
    opposite = _opposite(schema["if"], lookup) if condition is not None else None
    if condition is None or opposite is not None or then is True:
        for key in ("if", "then", "else"):
            node.pop(key, None)
        if condition is not None:
            yield any_of([opposite, then]) if then is not True else True
            yield any_of([condition, other]) if other is not True else True


def _one(node: dict[str, Any], schema: Mapping[str, Any], lookup: Lookup) -> Iterator[Any]:
    """Yield what oneOf says: a case, and none of the others that it may overlap with."""
    cases = node.get("oneOf")
    if not isinstance(cases, list):
        return
    whole = []
    n_cases = 0
    for i, case in enumerate(cases):
        others = [other for j, other in enumerate(schema["oneOf"]) if j != i and not _apart(case, other, lookup)]
        opposites = [_opposite(other, lookup) for other in others]
        if any(opposite is None for opposite in opposites):
            return
        n = 1
        for opposite in opposites:
            n *= len(opposite["anyOf"]) if isinstance(opposite, dict) and set(opposite) == {"anyOf"} else 1
        n_cases += n
        whole.append(all_of([case, *opposites]))
    if n_cases <= _MOST_CASES + len(cases):
        del node["oneOf"]
        yield any_of(whole)


def _apart(one: Any, other: Any, lookup: Lookup) -> bool:
    """Return whether two schemas certainly have no text in common: by their types, values, or a property's values."""
    one, other = _followed(one, lookup), _followed(other, lookup)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types = [_types(each) for each in (one, other)]
    if types[0] is not None and types[1] is not None and not types[0] & types[1]:
        return True
    values = [_values(each) for each in (one, other)]
    if values[0] is not None and values[1] is not None and not any(value in values[1] for value in values[0]):
        return True
    if types != [{"object"}, {"object"}]:
        return False
    properties = [_dict(each, "properties") for each in (one, other)]
    required = [set(_names(each)) for each in (one, other)]
    if any(properties[1 - i].get(name) is False for i in (0, 1) for name in required[i]):
        return True
    if any(one_side_closed(each) and required[1 - i] - set(properties[i]) for i, each in enumerate((one, other))):
        return True
    both = required[0] & required[1] & properties[0].keys() & properties[1].keys()
    return any(_apart(properties[0][name], properties[1][name], lookup) for name in both)


def one_side_closed(node: Mapping[str, Any]) -> bool:
    """Return whether an object's schema allows only the properties that it names."""
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _followed(schema: Any, lookup: Lookup) -> Any:
    for _ in range(16):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
            break
        schema = lookup(schema["$ref"])
    return schema


def _types(node: Mapping[str, Any]) -> set[str] | None:
    types = node.get("type")
    if types is None:
        values = _values(node)
        return None if values is None else {_type(value) for value in values}
    return {"number" if each == "integer" else each for each in ([types] if isinstance(types, str) else types)}


def _type(value: Any) -> str:
    kinds: list[tuple[Any, str]] = [(bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "null" if value is None else "number")


def _values(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    return node["enum"] if isinstance(node.get("enum"), list) else None


def _dict(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    return node[key] if isinstance(node.get(key), dict) else {}


def _names(node: Mapping[str, Any]) -> list[str]:
    return node["required"] if isinstance(node.get("required"), list) else []


def _with_names(node: dict[str, Any]) -> None:
    """Say what propertyNames says with patternProperties."""
    names = node.get("propertyNames")
    if names is True or names == {}:
        del node["propertyNames"]
    if not isinstance(names, dict) or not names or "patternProperties" in node:
        return
    keys = {key for key in names if key not in ("type", "title", "description", "$comment", "minLength")}
    if names.get("type", "string") != "string" or (names.get("minLength", 0) > 0 and keys):
        return
    if keys == {"pattern"}:
        pattern = names["pattern"]
    elif keys in ({"enum"}, {"const"}):
        pattern = f"^(?:{'|'.join(re.escape(str(each)) for each in _values(names) or [])})$"
    elif keys <= {"maxLength"}:
        pattern = f"^(?:.|\\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    else:
        return
    try:
        wrong = [name for name in _dict(node, "properties") if not re.search(pattern, name)]
    except re.error:
        return
    del node["propertyNames"]
    rest = node.get("additionalProperties", True)
    if rest is not False:
        node["patternProperties"], node["additionalProperties"] = {pattern: rest}, False
    if wrong:
        node["properties"] = node["properties"] | dict.fromkeys(wrong, False)


def _with_counts(node: dict[str, Any]) -> None:
    """Say that an object has at least or at most one property, of those that it names."""
    names, required = [*_dict(node, "properties")], _names(node)
    least, most = node.get("minProperties"), node.get("maxProperties")
    if least is not None and least <= len(required):
        least = node.pop("minProperties") and None
    if not names or len(names) > _MOST_NAMES or least not in (None, 1) or most not in (None, 1) or required:
        return
    if (least, most) == (None, None) or (most == 1 and not one_side_closed(node)):
        return
    node.pop("minProperties", None)
    node.pop("maxProperties", None)
    cases: list[Any] = [
        {"required": [name]} | ({"properties": {each: False for each in names if each != name}} if most == 1 else {})
        for name in names
    ]
    if least is None:
        cases.append({"properties": dict.fromkeys(names, False)})
    if "type" not in node:
        cases.append({"type": ["null", "boolean", "array", "number", "string"]})
    node["allOf"] = [*node.get("allOf", []), any_of(cases)]


def _with_unique(node: dict[str, Any]) -> None:
    """Leave uniqueItems out where it says nothing."""
    if node.get("uniqueItems") is False or ("uniqueItems" in node and node.get("maxItems", 2) <= 1):
        del node["uniqueItems"]

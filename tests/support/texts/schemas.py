"""JSON schemas of many kinds, each with a check of its own that a value is valid, and values by which it is checked."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

Json = Any


@dataclass(frozen=True)
class Case:
    """A schema.

    Attributes:
        schema: The schema; every text of it is short.
        is_valid: Whether a value is valid under it.
        good, bad: A value that is, and one that is not.
    """

    schema: Mapping[str, Any]
    is_valid: Callable[[Json], bool]
    good: Json
    bad: Json


def closed(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def is_digit(value: Json) -> bool:
    """Tell whether it is a whole number of one digit."""
    return type(value) is int and 0 <= value <= 9


def is_text(value: Json, low: int, high: int) -> bool:
    """Tell whether it is a string of so many characters."""
    return isinstance(value, str) and low <= len(value) <= high


def _is_tree(value: Json) -> bool:
    return (
        set(value) == {"v", "c"}
        and is_digit(value["v"])
        and isinstance(value["c"], list)
        and len(value["c"]) <= 1
        and all(map(_is_tree, value["c"]))
    )


def _is_date(value: Json) -> bool:
    return isinstance(value, str) and bool(date.fromisoformat(value))


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_ENUM = ["red", "gr\u00fcn", 'a "quoted" word', "back\\slash", 3, None, True]

CASES: dict[str, Case] = {
    "enum": Case({"enum": _ENUM}, lambda v: v in _ENUM, "gr\u00fcn", "blue"),
    "const": Case({"const": {"a": [1, "b"]}}, lambda v: v == {"a": [1, "b"]}, {"a": [1, "b"]}, {"a": [1]}),
    "nested": Case(
        closed({"user": closed({"name": {"enum": ["Ann", "Bo"]}, "age": DIGIT}, "name", "age")}, "user"),
        lambda v: set(v) == {"user"} and v["user"]["name"] in ("Ann", "Bo") and is_digit(v["user"]["age"]),
        {"user": {"name": "Bo", "age": 7}},
        {"user": {"name": "Bo", "age": 17}},
    ),
    "array": Case(
        {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
        lambda v: isinstance(v, list) and 2 <= len(v) <= 4 and all(map(is_digit, v)),
        [1, 2],
        [1],
    ),
    "integer": Case(
        {"type": "integer", "minimum": -5, "maximum": 50}, lambda v: type(v) is int and -5 <= v <= 50, -5, 51
    ),
    "number": Case(
        {"type": "number", "minimum": 0, "maximum": 1.5, "multipleOf": 0.25},
        lambda v: 0 <= v <= 1.5 and (4 * v) % 1 == 0,
        1.25,
        1.3,
    ),
    "optional": Case(
        closed({"a": DIGIT, "b": {"const": "x"}, "c": {"type": "boolean"}}, "b"),
        lambda v: "b" in v and set(v) <= {"a", "b", "c"} and v["b"] == "x" and is_digit(v.get("a", 0)),
        {"b": "x", "c": False},
        {"a": 1},
    ),
    "pattern": Case(
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        lambda v: re.fullmatch("[A-Z]{2}-[0-9]{3}", v) is not None,
        "AB-123",
        "AB-12",
    ),
    "string": Case({"type": "string", "minLength": 2, "maxLength": 6}, lambda v: is_text(v, 2, 6), "\u00e9\n", "x"),
    "union": Case(
        {"anyOf": [DIGIT, {"type": "null"}, closed({"text": {"type": "string", "maxLength": 4}}, "text")]},
        lambda v: v is None or is_digit(v) or (set(v) == {"text"} and is_text(v["text"], 0, 4)),
        {"text": ""},
        {"text": "five."},
    ),
    "recursive": Case(
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": closed(
                    {"v": DIGIT, "c": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, "v", "c"
                )
            },
        },
        _is_tree,
        {"v": 1, "c": [{"v": 2, "c": []}]},
        {"v": 1, "c": [{"v": 2}]},
    ),
    "format": Case({"type": "string", "format": "date"}, _is_date, "2024-02-29", 20240229),
    "tuple": Case(
        {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
        lambda v: len(v) == 2 and type(v[0]) is bool and v[1] is None,
        [True, None],
        [None, True],
    ),
}

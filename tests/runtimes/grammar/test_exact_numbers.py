"""Numbers that no double holds are kept to the last digit, and a schema within another one takes what it took."""

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest
from support.models.tiny_models import byte_ids

from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_runtimes.grammar.exact_numbers import above
from edgedec_runtimes.grammar.references import moved

BIG, LEAST, MOST = 1234567890123456789, -(2**63), 2**63 - 1
I64 = {"type": "integer", "minimum": LEAST, "maximum": MOST}
OBJECT = {"type": "object", "additionalProperties": False}
Case = tuple[Any, list[str], list[str]]
CASES: dict[str, Case] = {
    "const": ({"const": BIG}, [f"{BIG}"], [f"{BIG - 1}", "1234567890123456768"]),
    "negative": ({"const": -BIG}, [f"-{BIG}"], [f"{BIG}", "-1234567890123456768"]),
    "enum": ({"enum": [BIG, "a", None, 123456789.12345679]}, [f"{BIG}", '"a"', "null", "123456789.12345679"], ["1"]),
    "digits of a text": ('{"const": 0.12345678901234567890}', ["0.12345678901234567890"], ["0.12345678901234568"]),
    "34 decimals": ('{"const": 1.0000000000000000000000000000000001}', ["1.0000000000000000000000000000000001"], ["1"]),
    "beyond doubles": ('{"enum": [1e400, -1e-400]}', ["1e400", "-1e-400"], ["1", "0"]),
    "enum of a type": (
        {"type": ["integer", "null"], "enum": [BIG, None, "a", 0.5]},
        [f"{BIG}", "null"],
        ['"a"', "0.5"],
    ),
    "within a value": ({"const": {"a": [BIG, {"é": "\n"}]}}, [f'{{"a": [{BIG}, {{"é": "\\n"}}]}}'], ['{"a": [5]}']),
    "int64": (I64, ["0", f"{LEAST}", f"{MOST}", "-1"], [f"{LEAST - 1}", f"{MOST + 1}", "-0", "01", "1.0", "-"]),
    "from 2^64": ({"type": "integer", "minimum": 2**64}, [f"{2**64}", f"{2**80}"], [f"{2**64 - 1}", "9" * 19]),
    "exclusive": (
        {"type": "integer", "exclusiveMinimum": 2**53, "exclusiveMaximum": 2**53 + 3},
        *([f"{2**53 + 1}", f"{2**53 + 2}"], [f"{2**53}", f"{2**53 + 3}"]),
    ),
    "draft 4": ({"type": "integer", "minimum": 2**53, "exclusiveMinimum": True}, *([f"{2**53 + 1}"], [f"{2**53}"])),
    "decimals": (
        {"type": "number", "exclusiveMinimum": 0.12345678901234568, "maximum": 1},
        *(["0.12345678901234569", "1", "1.000", "0.5"], ["0.12345678901234568", "0.123", "1.0001", "0"]),
    ),
    "negative decimals": (
        {"type": "number", "minimum": -123456789.12345679, "maximum": -0.1},
        *(["-123456789.12345679", "-0.10"], ["-0.09", "-123456789.1234568", "0", "0.1"]),
    ),
    "no type": ({"minimum": 2**64}, [f"{2**64}.5", '"a"', "null", "{}", "[1]"], [f"{2**64 - 1}"]),
    "types": ({"type": ["integer", "null"], "minimum": 0, "maximum": MOST}, ["5", "null"], ["-1", '"a"']),
    "closed object": (
        OBJECT | {"properties": {"a": I64, "b": {"type": "string"}}, "required": ["a"]},
        *(['{"a": 5, "b": "x"}', '{"a": 5}'], ['{"b": "x"}', "{}", f'{{"a": {MOST + 1}}}', '{"a": 5, "c": 1}']),
    ),
    "open object": (
        {"type": "object", "properties": {"a": I64, "b": {"type": "string"}}},
        *(['{"b": "x", "z": [1, {}], "y": 1}', "{}", '{"z": 1}'], ['{"b": 1}', '{"z": 1, "a": "x"}', '{"z": 1, }']),
    ),
    "other properties": (
        {"type": "object", "additionalProperties": I64},
        ['{"a": 1, "b": 2}'],
        [f'{{"a": {MOST + 1}}}'],
    ),
    "names": (
        OBJECT | {"properties": {"title": {"const": BIG}, "const": {"type": "null"}}, "required": ["title"]},
        *([f'{{"title": {BIG}, "const": null}}'], ['{"title": 5}']),
    ),
    "items": (
        {"type": "array", "items": I64, "minItems": 1, "maxItems": 3},
        *(["[1]", "[1, 2, 3]"], ["[]", "[1, 2, 3, 4]", '["a"]', f"[{MOST + 1}]"]),
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "string"}, I64], "items": False},
        *(["[]", '["a"]', '["a", 5]'], ['["a", 5, 1]', "[5]"]),
    ),
    "recursion": (
        {
            "$ref": "#/$defs/T",
            "$defs": {"T": OBJECT | {"properties": {"v": I64, "c": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}},
        },
        *(['{"v": 1, "c": [{"v": 2}]}'], ['{"c": [5]}']),
    ),
    "beside references": (
        OBJECT
        | {"properties": {"v": I64, "s": {"type": "array", "items": {"$ref": "#/$defs/s"}, "contentEncoding": "x"}}}
        | {"$defs": {"s": {"type": "string", "pattern": "^a$"}}},
        *(['{"v": 1, "s": ["a"]}'], ['{"s": ["b"]}']),
    ),
    "other keywords": (
        I64 | {"format": "int64", "x-order": 3, "minLength": 9, "readOnly": True},
        ["5"],
        [f"{MOST + 1}"],
    ),
    "format": (
        {"type": ["string", "integer"], "format": "date", "minimum": 2**63},
        *([f"{2**63}", '"2024-02-29"'], ["1", '"x"']),
    ),
    "all of": ({"allOf": [{"type": "integer"}, {"maximum": 2**63}]}, [f"{2**63}", "-5"], [f"{2**63 + 1}"]),
    "one of": ({"oneOf": [{"const": BIG}, {"type": "string", "maxLength": 2}]}, [f"{BIG}", '"ab"'], ['"abc"', "1"]),
    "any of": (
        {"anyOf": [{"properties": {"a": {"const": BIG}}}, {"required": ["b"]}], "type": "object"},
        *([f'{{"a": {BIG}}}', '{"b": 1}'], ['{"a": 1}']),
    ),
    "unique": (
        {"type": "array", "uniqueItems": True, "items": {"enum": [BIG, BIG + 1]}},
        *([f"[{BIG}, {BIG + 1}]"], [f"[{BIG + 2}]"]),
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "pattern": ({"type": "object", "patternProperties": {"^a": I64}}, "patternProperties"),
    "multiple": (I64 | {"multipleOf": 5}, "multipleOf"),
    "digits": ('{"type": "number", "maximum": 1e999999999}', "over 200 digits"),
    "style": (I64 | {"x-guidance": {"whitespace_flexible": True}}, "x-guidance"),
}


def takes(grammars: Grammars, schema: Any, text: str) -> bool:
    """Return whether the grammar of a schema takes a text as a whole."""
    constraint = grammars.open(Grammar.json_schema(schema))
    ids = byte_ids(text)
    if not constraint.allows(ids[:-1], ids[-1]):
        return False
    for token in ids:
        constraint.commit(token)
    return constraint.may_end


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_kept(grammars: Grammars, name: str) -> None:
    """At the root, and as the arguments of a call; no text of another value is taken."""
    schema, good, bad = CASES[name]
    for text in (*good, *bad):
        assert takes(grammars, schema, text) == (text in good), text
    if isinstance(schema, dict):
        call = {"properties": {"x": moved(schema, "/anyOf/1/properties/x")}, "required": ["x"]} | OBJECT
        both = {"anyOf": [{"type": "null"}, call]}
        for text in (*good, *bad):
            assert takes(grammars, both, f'{{"x": {text}}}') == (text in good), text


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_kept_is_refused(grammars: Grammars, name: str) -> None:
    """The error says beside what the number stands; nothing of another value is written."""
    schema, words = REFUSED[name]
    with pytest.raises(RequestError, match=f"numbers that no double holds, and they can't be kept: .*{words}"):
        grammars.open(Grammar.json_schema(schema))


@pytest.mark.parametrize("is_whole", [True, False])
def test_expressions_of_bounds(is_whole: bool) -> None:
    """Random bounds and numbers near them."""
    rng = random.Random(5)
    for _ in range(300):
        bound = Decimal(rng.randrange(2000)) if is_whole else Decimal(rng.randrange(2000)) / 10 ** rng.randrange(4)
        for is_reached in (True, False):
            expression = re.compile(above(bound, is_reached, is_whole))
            near = {bound + Decimal(step) / (1 if is_whole else 1000) for step in range(-20, 21)} | {
                bound * 10,
                bound * 7,
            }
            for number in (each for each in near if each >= 0):
                text = format(number, "f")
                if not is_whole or text.isdecimal():
                    matches = expression.fullmatch(text) is not None
                    assert matches == (number > bound or (is_reached and number == bound)), (bound, text)


def test_numbers_that_doubles_hold_stay_as_they_were(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their schemas are compiled by llguidance as they are."""
    monkeypatch.setattr(
        "edgedec_runtimes.grammar.exact_numbers._Rules", lambda *_: pytest.fail("a schema became rules")
    )
    for value in (2**53 - 1, -(2**53) + 1, 0.1, 12345.6789012345, 1e22, 1e-22, -0.0, 0.25):
        text = next(iter(re.findall(r"-?[\d.]+", format(Decimal(repr(value)), "f"))))
        assert takes(grammars, {"enum": [value]}, text.removesuffix(".0")), value
    assert takes(grammars, {"title": "123456789012345678", "default": BIG, "type": "null"}, "null")
    assert json.loads(Grammar.json_schema({"maximum": 1e15 - 1}).source)["maximum"] == 1e15 - 1


N, NULL = {"type": "integer"}, {"type": "null"}
MOVED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": N}}, 5, None),
    "$defs": ({"items": {"$ref": "#/$defs/a"}, "type": "array", "$defs": {"a": N}}, [5], [None]),
    "chain": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": N}}, 5, None),
    "itself": ({"anyOf": [NULL, {"type": "array", "items": {"$ref": "#"}}]}, [[None]], [[5]]),
    "property": ({"type": "object", "properties": {"x": N, "y": {"$ref": "#/properties/x"}}}, {"y": 5}, {"y": None}),
    "index": ({"type": "array", "prefixItems": [N, {"$ref": "#/prefixItems/0"}], "minItems": 2}, [5, 5], [5, None]),
    "slash": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": N, "a": {"b": NULL}}}, 5, None),
    "tilde": ({"$ref": "#/$defs/a~0b", "$defs": {"a~b": N}}, 5, None),
    "percent": ({"$ref": "#/$defs/a%25b", "$defs": {"a%b": N}}, 5, None),
    "anchor": ({"$ref": "#a", "$defs": {"x": {"$anchor": "a"} | N}}, 5, None),
    "address": ({"$id": "http://x.y/s", "$ref": "http://x.y/s#/$defs/a", "$defs": {"a": N}}, 5, None),
    "own address": ({"$id": "http://x.y/s#", "$ref": "#/$defs/a", "$defs": {"a": N}}, 5, None),
    "a part's address": (
        {
            "$ref": "#/$defs/b",
            "$defs": {"a": NULL, "b": {"$id": "http://x.y/b", "$ref": "#/$defs/a", "$defs": {"a": N}}},
        },
        *(5, None),
    ),
    "names": (
        {
            "type": "object",
            "properties": {"$ref": {"$ref": "#/$defs/$id"}, "const": {"$ref": "#/$defs/$id"}, "$id": N},
            "$defs": {"$id": N},
        },
        *({"$ref": 5, "const": 5}, {"const": None}),
    ),
    "const": ({"const": {"$ref": "#/a", "$anchor": "a"}}, {"$ref": "#/a", "$anchor": "a"}, {"$ref": "#/t/a"}),
    "enum": ({"enum": [{"$ref": "#"}, "#/a"]}, {"$ref": "#"}, "#/t/a"),
    "elsewhere": ({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": N}}}, 5, None),
    "in other words": (
        {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": [True, None]}}, "type": ["boolean", "null"]},
        *(False, None),
    ),
}


def taken(grammars: Grammars, schema: dict[str, Any], value: Any) -> bool:
    """Return whether the grammar of a schema takes the text of a value as a whole."""
    return takes(grammars, schema, json.dumps(value))


@pytest.mark.parametrize("name", MOVED)
def test_a_schema_that_is_moved_takes_what_it_took(grammars: Grammars, name: str) -> None:
    """Where it stands at the root, and beside another one with the same names and anchors."""
    schema, good, bad = MOVED[name]
    before = json.dumps(schema)
    other = {"$ref": "#a", "$defs": {"a": {"$anchor": "a"} | NULL, "a/b": NULL}, "definitions": {"a": NULL}}
    ends = {"required": ["t"], "additionalProperties": False, "type": "object"}
    both = {
        "anyOf": [
            {"properties": {"t": moved(each, f"/anyOf/{i}/properties/t")}} | ends
            for i, each in enumerate((other, schema))
        ]
    }
    assert json.dumps(schema) == before
    assert (taken(grammars, schema, good), taken(grammars, schema, bad)) == (True, False)
    assert taken(grammars, both, {"t": good})
    assert taken(grammars, both, {"t": bad}) == (bad is None), "only the other one takes it"


def test_a_deep_schema_is_moved_or_refused_by_name() -> None:
    """Moving has no recursion; writing such a schema has."""
    deep: dict[str, Any] = {"$ref": "#"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="can't be written as JSON"):
        Grammar.json_schema(moved(deep, "/a"))

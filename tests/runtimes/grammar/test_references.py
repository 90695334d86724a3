"""A JSON schema that becomes a part of another one takes what it took: its references lead where they led."""

import json
from typing import Any

import pytest
from support.models.tiny_models import byte_ids

from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_runtimes.grammar.references import moved

N, NULL = {"type": "integer"}, {"type": "null"}
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
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


def takes(grammars: Grammars, schema: dict[str, Any], value: Any) -> bool:
    """Return whether the grammar of a schema takes the text of a value as a whole."""
    constraint = grammars.open(Grammar.json_schema(schema))
    ids = byte_ids(json.dumps(value))
    if not constraint.allows(ids[:-1], ids[-1]):
        return False
    for token in ids:
        constraint.commit(token)
    return constraint.may_end


@pytest.mark.parametrize("name", CASES)
def test_a_schema_that_is_moved_takes_what_it_took(grammars: Grammars, name: str) -> None:
    """Where it stands at the root, and beside another one with the same names and anchors."""
    schema, good, bad = CASES[name]
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
    assert (takes(grammars, schema, good), takes(grammars, schema, bad)) == (True, False)
    assert takes(grammars, both, {"t": good})
    assert takes(grammars, both, {"t": bad}) == (bad is None), "only the other one takes it"


def test_a_deep_schema_is_moved_or_refused_by_name() -> None:
    """Moving has no recursion; writing such a schema has."""
    deep: dict[str, Any] = {"$ref": "#"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="can't be written as JSON"):
        Grammar.json_schema(moved(deep, "/a"))

"""Schemas in other words take no text that the original refuses, and uniqueItems holds while a text is written."""

import json
import random
import re
from typing import Any

import pytest

import edgedec
from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_runtimes.grammar import compiler
from edgedec_runtimes.grammar.negation import Lookup, TooManyPartsError, negated, other_words
from edgedec_runtimes.grammar.rewriting import other_words as in_other_words
from edgedec_runtimes.grammar.rewriting import rewritten
from edgedec_runtimes.grammar.unique import UniqueItems

jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
SCALARS = (None, True, False, 0, 1, 2.5, "", "a", "ab", "x")


def a_value(rng: random.Random, depth: int = 2) -> Any:
    """Return a random JSON value."""
    kind = rng.random()
    if depth and kind < 0.45:
        return {name: a_value(rng, depth - 1) for name in NAMES if rng.random() < 0.5}
    if depth and kind < 0.6:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return rng.choice(SCALARS)


def a_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a random schema of the keywords that are said in other words, and of those they are said with."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(
            (True, False, {}, {"type": "string"}, {"enum": ["a", "x"]}, {"const": True}, {"minLength": 2})
        )

    def inner() -> Any:
        return a_schema(rng, depth - 1)

    makers: dict[str, Any] = {
        "type": lambda: rng.choice(("object", "string", "number", ["null", "boolean"], "array", "integer")),
        "required": lambda: rng.sample(NAMES, rng.randrange(1, 3)),
        "properties": lambda: {name: inner() for name in rng.sample(NAMES, 2)},
        "additionalProperties": lambda: rng.choice((False, True)),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "oneOf": lambda: [inner() for _ in range(rng.randrange(1, 4))],
        "anyOf": lambda: [inner(), inner()],
        "dependentRequired": lambda: {rng.choice(NAMES): rng.sample(NAMES, 1)},
        "dependentSchemas": lambda: {rng.choice(NAMES): inner()},
        "propertyNames": lambda: rng.choice(({"pattern": "^[ab]$"}, {"enum": ["a", "c"]}, {"maxLength": 1}, True)),
        "minProperties": lambda: 1,
        "maxProperties": lambda: 1,
        "enum": lambda: rng.sample(["a", "ab", None, True, 1], 2),
        "minimum": lambda: 1,
        "maxLength": lambda: 1,
        "minItems": lambda: 1,
        "format": lambda: "no format",
    }
    return {key: makers[key]() for key in rng.sample(list(makers), rng.randrange(1, 4))}


def valid(schema: Any, value: Any) -> bool:
    """Return whether a value is valid under a schema of the draft 2020-12."""
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_other_words_take_nothing_that_the_original_refuses() -> None:
    """Random schemas and values; and mostly they take all that the original takes."""
    rng = random.Random(7)
    n_taken = n_left = n_changed = 0
    for _ in range(1500):
        schema = a_schema(rng)
        said = rewritten(json.loads(json.dumps(schema)))
        n_changed += said != schema
        for _ in range(12):
            value = a_value(rng)
            now, before = valid(said, value), valid(schema, value)
            assert before or not now, (schema, said, value)
            n_taken += now
            n_left += before and not now
    assert n_changed > 800
    assert n_left < 0.1 * n_taken


def test_negations_share_nothing_with_what_they_negate() -> None:
    """No random value is valid under a schema and its negation."""
    rng = random.Random(8)
    n_found = 0
    for _ in range(1500):
        schema = a_schema(rng)
        opposite = negated(schema, Lookup(schema))
        if opposite is not None:
            n_found += 1
            for _ in range(12):
                value = a_value(rng)
                assert not (valid(schema, value) and valid(opposite, value)), (schema, opposite, value)
    assert n_found > 700


@pytest.mark.parametrize("words", [[""], ["a"], ["ab", "a"], ["ab", "ac", "b"], ["é", "a-]", "^"], ["aa", "aaa"]])
def test_the_strings_other_than_some_words(words: list[str]) -> None:
    """The expression matches exactly the other strings, among them longer and shorter ones."""
    pattern = re.compile(other_words(words))
    around = {
        word[:n] + more for word in words for n in range(len(word) + 1) for more in ("", "a", "b", "\n", "é", "]x")
    }
    for word in around | {"", "zzz"}:
        assert (pattern.search(word) is not None) == (word not in words)


def test_unique_items_are_judged_at_every_beginning() -> None:
    """Random texts: a repetition is found where the item is whole; a text without one is never refused."""
    rng = random.Random(9)
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "array"}}}
    for _ in range(200):
        items = [a_value(rng, 1) for _ in range(rng.randrange(4))]
        text = json.dumps({"a": items, "b": [1, 1], "c": [1, 1]})
        predicate, unique = UniqueItems(schema), valid(schema, {"a": items})
        answers = [predicate(text[:n], False) for n in range(len(text) + 1)]
        assert answers[-1] == unique
        assert answers == sorted(answers, reverse=True)  # once refused, always refused
    listed = UniqueItems({"type": "array", "uniqueItems": True, "items": {"enum": ["ab", "ac"]}})
    assert [listed(text, False) for text in ('["a', '["ab", "a', '["ab", "ab', '["ab", "ac"', '["ab", "ac", ')] == [
        *(True, True, False, True, False)
    ]


SCHEMAS: dict[str, dict[str, Any]] = {
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 3},
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 4}, "uniqueItems": True}
    | {"minItems": 4, "maxItems": 4},
    "dependencies": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "dependencies": {"a": ["b"]},
        "minProperties": 1,
    },
    "not": {"enum": ["a", "b", True], "not": {"enum": ["a", True]}},
    "one": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "if": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "if": {"properties": {"a": {"const": True}}},
        "then": {"properties": {"b": {"const": 1}}},
        "else": {"properties": {"b": {"const": 2}}},
    },
    "format": {"type": "string", "format": "colour", "maxLength": 3},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_are_valid_with_drafts_and_without(byte_path: Any, name: str) -> None:
    """Hot texts of a model with random weights, under schemas that llguidance refuses as they are."""
    schema = SCHEMAS[name]
    with edgedec.load(byte_path, runtime="cpu", draft="suffix", n_ctx=128) as engine:
        texts = set()
        for seed in range(8):
            options: dict[str, Any] = {"max_tokens": 60, "temperature": 2.0, "seed": seed, "json_schema": schema}
            found = engine.generate("x", **options)
            assert found.finish_reason == "stop"
            jsonschema.Draft202012Validator(schema).validate(json.loads(found.text))
            assert engine.generate("x", draft=False, **options).token_ids == found.token_ids
            texts.add(found.text)
        assert len(texts) > 1 or name in ("not", "if")
        with pytest.raises(RequestError, match="contains"):
            engine.generate("x", json_schema={"contains": {}, "not": {"type": "null"}})
        if name == "unique":
            with pytest.raises(RequestError, match=r"json_close.*uniqueItems"):
                engine.generate("x", json_schema=schema, json_close=True)


def test_a_schema_in_other_words_is_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request compiles nothing, not even the schema as it is; its masks are those of the first."""
    grammar = Grammar.json_schema(SCHEMAS["one"])
    first = grammars.open(grammar)
    monkeypatch.setattr(compiler, "other_words", lambda *_: pytest.fail("the words were looked for again"))
    monkeypatch.setattr("llguidance.LLMatcher", lambda *_, **__: pytest.fail("a grammar was compiled again"))
    again = grammars.open(grammar)
    assert (first.allowed() == again.allowed()).all()


ODD: tuple[Any, ...] = (None, True, -1, 2.5, "a", [], ["a"], [1], [{}], {}, {"a": 1}, {"a": [{}]})
KEYWORDS = (
    *("type", "enum", "required", "properties", "anyOf", "allOf", "oneOf", "not", "if", "items", "prefixItems", "$ref"),
    *("minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "propertyNames", "minProperties", "maxProperties"),
    *("patternProperties", "additionalProperties", "dependencies", "dependentRequired", "dependentSchemas"),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_with_a_value_of_a_wrong_form_is_refused(grammars: Grammars, keyword: str) -> None:
    """Each value is alone, and where a schema is said in other words: a grammar comes out, or a RequestError."""
    n_refused = 0
    for value in ODD:
        part = {keyword: value}
        for schema in (
            part,
            {"not": part},
            {"if": part, "then": {"maxItems": 1}},
            {"oneOf": [part, {"type": "string"}]},
            {"propertyNames": part, "minimum": 1234567890123456789},
            {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": part}},
        ):
            try:
                grammars.open(Grammar.json_schema(schema))
            except RequestError:
                n_refused += 1
    assert n_refused >= 12


def test_words_that_would_be_too_many_are_cut_short() -> None:
    """Each case of a oneOf must say that the others are not there: with many cases that is refused, and at once."""
    cases = [{"required": [f"a{i}"], "properties": {f"b{i}": {"const": "x"}}} for i in range(400)]
    schema = {"type": "object", "oneOf": cases}
    with pytest.raises(TooManyPartsError):
        rewritten(schema)
    assert in_other_words(Grammar.json_schema(schema), 10**6) is None
    few = Grammar.json_schema({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert in_other_words(few, 10**6) is not None
    assert in_other_words(few, 10) is None

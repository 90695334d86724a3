"""Grammars that would end the process, or keep it busy for minutes, are refused; large and flat ones are not."""

from collections.abc import Callable
from typing import Any

import pytest
from support.models.tiny_models import FIRST_BYTE

from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec_runtimes.grammar.certain import regex_bytes, schema_bytes
from edgedec_runtimes.grammar.limits import MOST_BYTES, require_modest

pytestmark = pytest.mark.slow

LONG = 5000  # definitions in a chain: llguidance's recursion through them is long


def chained(make: Callable[[Any], Any], name: Callable[[int], str] = "#/$defs/{}".format, n: int = LONG) -> Grammar:
    """Return a schema of definitions of which each refers to the next."""
    definitions = {str(i): make({"$ref": name(i + 1)}) for i in range(n)}
    return Grammar.json_schema({"$ref": name(0), "$defs": definitions | {str(n): {"type": "null"}}})


def anchored(n: int) -> Grammar:
    """Return the same by anchors, in arrays."""
    definitions = {str(i): {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(n)}
    return Grammar.json_schema({"$ref": "#a0", "$defs": definitions | {str(n): {"$anchor": f"a{n}"}}})


def renamed(n: int) -> Grammar:
    """Return the same within a part that has an address of its own, in which references mean something else."""
    inner = {"$id": "http://localhost/x", "$ref": "#/$defs/0", "$defs": {str(i): {} for i in range(n)}}
    for i in range(n - 1):
        inner["$defs"][str(i)] = {"items": {"$ref": f"#/$defs/{i + 1}"}}  # type: ignore[index]
    return Grammar.json_schema({"items": inner, "$defs": {"0": {}}})


def rules(n: int, body: str, last: str = '"x"', first: str = "R") -> Grammar:
    """Return a grammar of rules, or terminals, of which each has the next one in it."""
    lines = [f"{first}{i}: {body.replace('NEXT', f'{first}{i + 1}')}" for i in range(n)]
    return Grammar.lark("\n".join([f"start: {first}0", *lines, f"{first}{n}: {last}"]))


HOSTILE = {
    "references": chained(lambda following: following),
    "arrays": chained(lambda following: {"type": "array", "items": following}),
    "alternatives": chained(lambda following: {"anyOf": [following, {"type": "integer"}]}),
    "properties": chained(lambda following: {"properties": {"a": following, "b": following}}),
    "escapes": chained(lambda following: {"items": following}, lambda i: f"#/%24defs/{i}"),
    "anchors": anchored(LONG),
    "addresses": renamed(LONG),
    "rules": rules(LONG, 'NEXT | "y"', first="r"),
    "terminals": rules(LONG, 'NEXT "y"'),
    "circular rules": rules(LONG, 'NEXT | "y" start', first="r"),
    "schema in a grammar": Grammar.lark("start: %json " + chained(lambda following: {"items": following}).source),
    "doubled": rules(20, "NEXT NEXT"),
    "a long expression": Grammar.regex("a" * (MOST_BYTES["regex"] + 1)),
    "a long grammar": Grammar.lark('start: "' + "a" * MOST_BYTES["lark"] + '"'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_end_the_process_is_refused(grammars: Grammars, name: str) -> None:
    """By a RequestError with the size that was found or is allowed; the next grammar is compiled."""
    with pytest.raises(RequestError, match=r"at most \d+ are compiled|over \d+ parts"):
        grammars.open(HOSTILE[name])
    assert grammars.open(Grammar.regex("a")).allows((), 4 + ord("a"))


def test_large_ones_that_are_flat_are_compiled(grammars: Grammars) -> None:
    """A thousand definitions side by side, chains of 100 of them, circles, and names within strings."""
    flat = {str(i): {"type": "integer", "minimum": i} for i in range(1200)}
    for grammar in (
        Grammar.json_schema({"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(1200)], "$defs": flat}),
        chained(lambda following: {"items": following}, n=100),
        Grammar.json_schema({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}),
        Grammar.lark(
            "start: " + " | ".join(f"r{i}" for i in range(1200)) + "".join(f"\nr{i}: /x/" for i in range(1200))
        ),
        rules(100, 'NEXT "y"'),
        Grammar.lark('start: SELECT | start "," start\nSELECT: "SELECT" | "x" /SELECT: SELECT/'),
    ):
        assert not grammars.open(grammar).is_complete


@pytest.mark.parametrize("make", [lambda following: {"items": following}, lambda following: {"anyOf": [following, {}]}])
def test_a_chain_that_needs_a_deep_stack_is_compiled(grammars: Grammars, make: Callable[[Any], Any]) -> None:
    """Some 3,800 levels take more stack than a thread usually has, and end neither the process nor in a refusal."""
    n = 3800 // (2 if "items" in make({}) else 3)
    assert grammars.open(chained(make, n=n)).allows((), FIRST_BYTE + ord("["))


def test_true_and_what_is_no_schema_may_be_referred_to(grammars: Grammars) -> None:
    """A definition may be `true`, which is any JSON; a reference to what is no schema is refused."""
    anything = Grammar.json_schema({"properties": {"a": {"$ref": "#/$defs/any"}}, "$defs": {"any": True}})
    assert grammars.open(anything).allows((), FIRST_BYTE + ord("{"))
    for target in (5, "text"):
        with pytest.raises(RequestError, match="the JSON schema can't be used"):
            grammars.open(Grammar.json_schema({"$ref": "#/title", "title": target}))


@pytest.mark.parametrize("source", ["a{1000000}", "(ab){2,1000000}", "x{100001,}", "x{0,1000000}"])
def test_a_repetition_that_takes_a_minute_to_compile_is_refused(source: str) -> None:
    """It is found before llguidance sees it, in a schema and in a grammar, too; what is written as text is none."""
    in_schema = {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"patternProperties": {source: {"type": "null"}}}}}
    for grammar in (
        Grammar.regex(source),
        Grammar.json_schema({"anyOf": [{"pattern": source}, {"type": "null"}]}),
        Grammar.json_schema(in_schema),
        Grammar.lark(f"start: /{source}/"),
    ):
        with pytest.raises(RequestError, match="repeats something over 100000 times"):
            require_modest(grammar)
    require_modest(Grammar.regex(r"a{50000}\{1000000\}"))
    require_modest(Grammar.regex("a{0,100000}"))


LONG_TEXTS = {
    "counts in counts": Grammar.regex("((ab{100}){100}){10,}"),
    "a long text often": Grammar.regex("(abcdefghij){10001}"),
    "many parts": Grammar.regex("|".join(["x", "a{50000}b{50001}", "y"])),
    "a pattern": Grammar.json_schema({"type": "string", "pattern": "^((a{100}){100}){11}$"}),
    "a length": Grammar.json_schema({"type": "string", "minLength": 100_001}),
    "items": Grammar.json_schema({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    "items in items": Grammar.json_schema(
        {"type": "array", "minItems": 300, "items": {"type": "array", "minItems": 300, "items": {"enum": [1, "one"]}}}
    ),
    "references": Grammar.json_schema(
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 10, "minItems": 10} for i in range(5)}
            | {"5": {"const": "x"}},
        }
    ),
    "an anchor": Grammar.json_schema(
        {"minItems": 400, "items": {"$ref": "#x"}, "$defs": {"x": {"$anchor": "x", "minLength": 300}}}
    ),
    "required properties": Grammar.json_schema(
        {
            "properties": {f"p{i}": {"pattern": "^a{1001}$"} for i in range(100)},
            "required": [f"p{i}" for i in range(100)],
        }
    ),
    "required names that are not listed": Grammar.json_schema(
        {"required": [f"p{i}" for i in range(100)], "additionalProperties": {"pattern": "^a{1001}$"}}
    ),
    "required names of a pattern": Grammar.json_schema(
        {"required": [f"p{i}" for i in range(100)], "patternProperties": {"^p": {"pattern": "^a{1001}$"}}}
    ),
    "as many names as are asked for": Grammar.json_schema(
        {"minProperties": 100, "additionalProperties": {"pattern": "^a{1001}$"}}
    ),
    "terminals": Grammar.lark('start: A{101}\nA: B~1000\nB: "x"'),
    "an expression in a grammar": Grammar.lark("start: /(a{400}){400}/"),
    "a schema in a grammar": Grammar.lark('start: "a" | %json {"minLength": 100001} | "b"'),
    "rules": Grammar.lark('start: a a\na: b~100..200 | "y"\nb: (c "," | [c]){100}\nc: "12345"'),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_text_without_end_is_refused(name: str) -> None:
    """What repeats itself within itself takes seconds and gigabytes to follow to its end."""
    with pytest.raises(RequestError, match="may ask for a text of over 100000 bytes at once"):
        require_modest(LONG_TEXTS[name])


SHORTER_TEXTS = {
    "counts in counts": Grammar.regex("((ab{98}){100}){10,}"),
    "what need not be there": Grammar.regex("(a{0,300}){0,300}[{(]{3000}\\p{L}{300}(?:b{9})*(?P<n>c{9})?"),
    "alternatives": Grammar.regex("a{60000}|b{60000}"),
    "upper bounds": Grammar.json_schema({"maxItems": 10**9, "items": {"maxLength": 10**9}, "maxProperties": 10**9}),
    "properties that need not be there": Grammar.json_schema(
        {"properties": {f"p{i}": {"pattern": "^a{1001}$"} for i in range(100)}}
    ),
    "names that are words of schemas": Grammar.json_schema(
        {"properties": {"minItems": {"const": 10**9}, "minLength": {"type": "integer"}, "items": {}, "required": {}}}
    ),
    "circles": Grammar.json_schema({"minItems": 50, "items": {"$ref": "#"}, "allOf": [{"$ref": "#"}]}),
    "rules": Grammar.lark('start: a | start a~9\na: b~90 -> twice\nb: "12345" // x{1000000}'),
}


@pytest.mark.parametrize("name", SHORTER_TEXTS)
def test_texts_up_to_the_bound_are_compiled(name: str) -> None:
    """Just below the bound, and where counts are upper ones, or of what need not be there."""
    require_modest(SHORTER_TEXTS[name])


@pytest.mark.parametrize("part", ["[", "[:", "[:\\", "[[:a", "(?<", "(?P<a", "\\p{", "{1", "a{1,", "\\"])
def test_what_is_not_closed_is_looked_at_once(part: str) -> None:
    """Sources as long as they may be, of parts that are begun again and again: looking twice would take hours."""
    n = MOST_BYTES["regex"] // len(part)
    assert regex_bytes(part * n) <= MOST_BYTES["regex"]
    assert regex_bytes(part * n + "\\") <= MOST_BYTES["regex"] + 1


@pytest.mark.parametrize("part", ['"', '\\"', "/", "\\/", "-> ", "%json ", '%json {"', "~ ", "a ", "//", "#"])
def test_a_grammar_that_is_not_closed_is_looked_at_once(part: str) -> None:
    require_modest(Grammar.lark('start: "x" "' + part * (90_000 // len(part))))


def test_names_of_one_definition_cost_nothing_twice() -> None:
    """A definition may be referred to by as many names as it has spellings; it is walked through a few times only."""
    spellings = [
        "#/" + "".join(f"%{ord(c):02x}" if i >> k & 1 else c for k, c in enumerate("abcdefghij")) for i in range(1000)
    ]
    schema = {"anyOf": [{"$ref": name} for name in spellings], "abcdefghij": {"const": [[]] * 40_000}}
    assert 40_000 < schema_bytes(schema) < 10**9
    with pytest.raises(RequestError, match="over 1000000 objects and lists"):
        require_modest(Grammar.json_schema(schema))

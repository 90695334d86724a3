"""json_close: whatever max_tokens is, the text is whole and valid, and the same with drafts."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import FIRST_BYTE
from support.texts.schemas import CASES, closed

import edgedec
from edgedec.constraint import Constraint
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.sequence import Generation

pytestmark = pytest.mark.slow

PERSON = closed(
    {
        "name": {"type": "string"},
        "city": {"enum": ["Paris", "London", "Rome"]},
        "languages": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "age": {"type": "integer", "minimum": 18},
    },
    *("name", "city", "languages", "age"),
)
NESTED = {
    "type": "array",
    "minItems": 2,
    "items": {"type": "array", "minItems": 2, "items": {"type": "integer", "minimum": 100}},
}
NOTE = "chosen to make the text whole in time (json_close)"
PROMPT = "An example of a JSON value:\n"


def is_person(value: Any) -> bool:
    """Tell whether it is valid under PERSON."""
    return (
        list(value) == ["name", "city", "languages", "age"]
        and value["city"] in ("Paris", "London", "Rome")
        and len(value["languages"]) >= 2
        and value["age"] >= 18
    )


def is_nested(value: Any) -> bool:
    """Tell whether it is valid under NESTED."""
    return len(value) >= 2 and all(len(inner) >= 2 and min(inner) >= 100 for inner in value)


def shown(generation: Generation) -> tuple[Any, ...]:
    """Return what must be equal with and without drafts."""
    reasons = [reason for reason in generation.stats.notes if NOTE in reason]
    return generation.text, generation.token_ids, generation.finish_reason, generation.is_whole, reasons


Engines = tuple[edgedec.Engine, edgedec.Engine]


@pytest.fixture(scope="module")
def tiny(byte_path: Path) -> Iterator[Engines]:
    """A tiny model whose tokens are bytes, without drafts and with."""
    options: dict[str, Any] = {"runtime": "cpu", "n_ctx": 256, "n_threads": 1}
    with (
        edgedec.load(byte_path, draft="off", **options) as plain,
        edgedec.load(byte_path, draft="suffix", **options) as drafted,
    ):
        yield plain, drafted


@pytest.fixture(scope="module")
def real(smollm_path: Path) -> Iterator[Engines]:
    """A real model, without drafts and with."""
    options: dict[str, Any] = {"runtime": "cpu", "n_ctx": 256, "offline": True}
    with (
        edgedec.load(smollm_path, draft="off", **options) as plain,
        edgedec.load(smollm_path, draft="suffix+common", **options) as drafted,
    ):
        yield plain, drafted


def closed_texts(engines: Engines, grammar: Grammar, lengths: range, **way: Any) -> list[Generation]:
    """Return the closed text of each length that is long enough, the same by both engines, and whole."""
    plain, drafted = engines
    found: list[Generation] = []
    refused: list[tuple[int, str]] = []
    for n in lengths:
        asked: dict[str, Any] = way | {"grammar": grammar, "max_tokens": n, "json_close": True}
        try:
            text = plain.generate(PROMPT, **asked)
        except RequestError as error:
            refused.append((n, str(error)))
            continue
        assert shown(text) == shown(drafted.generate(PROMPT, **asked))
        assert (text.finish_reason, text.is_whole) == ("stop", True)
        assert len(text.token_ids) <= n
        found.append(text)
    assert len(refused) + len(found) == len(lengths)
    assert [n for n, _ in refused] == list(lengths)[: len(refused)], "fewer were enough"
    for _, said in refused:
        assert re.search(r"json_close must have room .*the shortest text found takes \d+ tokens", said)
    return found


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", CASES)
def test_every_length_gives_a_valid_text(tiny: Engines, name: str, way: dict[str, Any]) -> None:
    """From the shortest text's length on, for each schema; a text that was not closed is the one without json_close."""
    grammar = Grammar.json_schema(CASES[name].schema)
    found = closed_texts(tiny, grammar, range(1, 60, 5), **way)
    assert found
    for text in found:
        assert CASES[name].is_valid(json.loads(text.text)), text.text
        if not any("json_close" in reason for reason in text.stats.notes):
            assert text.text == tiny[0].generate(PROMPT, grammar=grammar, max_tokens=60, **way).text


@pytest.mark.model
@pytest.mark.parametrize(
    ("schema", "is_valid", "least"), [(PERSON, is_person, 28), (NESTED, is_nested, 20), ({}, lambda value: True, 1)]
)
def test_a_real_models_texts_are_valid_at_every_length(real: Engines, schema: Any, is_valid: Any, least: int) -> None:
    """Required properties, enums, bounds and least lengths are kept, from the shortest text there is."""
    found = closed_texts(real, Grammar.json_schema(schema), range(least, least + 13, 4), temperature=0)
    assert len(found) == 4
    assert all(is_valid(json.loads(text.text)) for text in found)
    long = real[0].generate(PROMPT, json_schema=schema, temperature=0, max_tokens=48).token_ids
    for text in found:  # the text's own tokens, then the end
        note = next((reason for reason in text.stats.notes if NOTE in reason), "0")
        n_own = len(text.token_ids) - int(re.findall(r"\d+", note)[0])
        assert text.token_ids[:n_own] == long[:n_own]


def test_expressions_and_grammars_are_closed_too(tiny: Engines) -> None:
    """Their texts match as a whole, where a choice among brackets, or words, leads to an end."""
    for text in closed_texts(tiny, Grammar.regex("(yes|no|perhaps)( indeed)*[.!]"), range(3, 40, 4), temperature=0):
        assert re.fullmatch("(yes|no|perhaps)( indeed)*[.!]", text.text)
    lark = Grammar.lark('start: "(" start ")" | /[a-z]+/')
    for text in closed_texts(tiny, lark, range(1, 40, 4), temperature=0):
        opened, _, closed_again = re.split("([a-z]+)", text.text)
        assert (set(opened) | {"("}, set(closed_again) | {")"}, len(opened)) == ({"("}, {")"}, len(closed_again))


def test_a_whole_text_that_could_go_on_ends(tiny: Engines) -> None:
    """Where the text is whole, and what was drawn leads nowhere in time, it ends there."""
    found = closed_texts(tiny, Grammar.regex("ab(c{30}d)*"), range(2, 34, 6), temperature=0)
    assert {text.text for text in found[:-1]} == {"ab"}


@pytest.mark.parametrize("rule", ["tokenwise", "block", "multipath"])
def test_other_rules_close_as_well(tiny: Engines, rule: str) -> None:
    """The opt-in rules choose other tokens; the text is whole even so."""
    for n in range(40, 70, 5):
        way: dict[str, Any] = {"temperature": 1.0, "seed": n, "verify": rule, "max_tokens": n}
        text = tiny[1].generate(PROMPT, json_schema=CASES["nested"].schema, json_close=True, **way)
        assert CASES["nested"].is_valid(json.loads(text.text))


def test_a_full_context_closes_too(tiny: Engines) -> None:
    """What the context has left is as good a limit as max_tokens, drafted or not."""
    schema = {"type": "array", "items": {"type": "integer"}}
    found = []
    for engine in tiny:
        prompt = [FIRST_BYTE + ord("[")] * (engine.n_ctx - 20)
        open_text = engine.generate(prompt, json_schema=schema, temperature=1.0, seed=3)
        assert (open_text.finish_reason, open_text.is_whole) == ("length", False)
        whole = engine.generate(prompt, json_schema=schema, temperature=1.0, seed=3, json_close=True)
        assert isinstance(json.loads(whole.text), list)
        found.append(shown(whole))
    assert found[0] == found[1]


def test_a_token_that_is_ruled_out_closes_nothing(tiny: Engines) -> None:
    """A logit bias of -inf holds for the end as well."""
    bias = {FIRST_BYTE + ord("0"): float("-inf")}
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 4})
    for text in closed_texts(tiny, grammar, range(12, 24), temperature=0, logit_bias=bias):
        assert "0" not in text.text


def test_whether_a_text_is_whole_is_told(tiny: Engines) -> None:
    """is_whole: of an ended text, of one that was cut where it may end, of one cut before, and without a grammar."""
    engine = tiny[0]
    ended = engine.generate("x", grammar=Grammar.regex("yes|no"), temperature=0)
    assert (ended.finish_reason, ended.is_whole) == ("stop", True)
    may_end = engine.generate("x", grammar=Grammar.regex("[ab]{1,9}"), temperature=0, max_tokens=3)
    assert (may_end.finish_reason, may_end.is_whole) == ("length", True)
    cut = engine.generate("x", grammar=Grammar.regex("[ab]{9}"), temperature=0, max_tokens=3)
    assert (cut.finish_reason, cut.is_whole) == ("length", False)
    stopped = engine.generate("x", grammar=Grammar.regex("abcabc"), temperature=0, stop=("ca",))
    assert (stopped.finish_reason, stopped.is_whole) == ("stop", False)
    assert engine.generate("x", temperature=0, max_tokens=3).is_whole is None


def test_what_cant_be_closed_is_refused_first(tiny: Engines) -> None:
    """Without a grammar, and where no text is found at all, the error says so before anything is generated."""
    engine = tiny[0]
    with pytest.raises(RequestError, match="json_close needs a JSON schema or a grammar"):
        engine.stream("x", json_close=True)
    with pytest.raises(RequestError, match="json_close is 'yes'; it must be True or False"):
        engine.stream("x", json_schema={}, json_close="yes")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"tried \d+ beginnings of texts of at most 1040 tokens, and none led"):
        engine.stream("x", grammar=Grammar.lark('start: "a" start'), json_close=True, max_tokens=40)


PATTERNS = {"email": r"[^@\s]+@[^@\s]+", "uri": r"\w[^:]*:.*", "date-time": r"\d{4}-\d\d-\d\dT.*", "duration": "P.*"}
WORD = {"type": "string", "pattern": "^[a-z]*zyx$"}


@pytest.mark.parametrize(
    "schema", [*({"type": "string", "format": name} for name in PATTERNS), WORD], ids=[*PATTERNS, "word"]
)
def test_a_search_tries_few_texts_and_says_what_it_found(
    tiny: Engines, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    """Marks that a format asks for are met; what is not met in thousands of tries is refused by their number."""
    n_moves = 0
    move = Constraint._move_to

    def counted(self: Constraint, path: Sequence[int]) -> bool:
        nonlocal n_moves
        n_moves += 1
        return move(self, path)

    monkeypatch.setattr(Constraint, "_move_to", counted)
    asked: dict[str, Any] = {"json_close": True, "temperature": 0, "draft": False}
    if schema is WORD:
        with pytest.raises(RequestError, match=r"tried (\d+) beginnings .* none led to a whole text") as refused:
            tiny[0].stream(PROMPT, json_schema=schema, max_tokens=200, **asked)
        assert int(re.findall(r"tried (\d+)", str(refused.value))[0]) < n_moves < 12_000
        return
    whole = tiny[0].generate(PROMPT, json_schema=schema, max_tokens=30, **asked)
    assert re.fullmatch(PATTERNS[schema["format"]], json.loads(whole.text))
    with pytest.raises(RequestError, match=r"the shortest text found takes \d+ tokens, found room for 2"):
        tiny[0].stream(PROMPT, json_schema=schema, max_tokens=2, **asked)
    assert n_moves < 20_000

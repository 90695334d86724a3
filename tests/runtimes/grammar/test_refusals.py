"""What can't be kept to is refused before anything is evaluated, by name; and what ends in the middle says why."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support.models.tiny_models import FIRST_BYTE

import edgedec
from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.grammar import MAX_SOURCE_BYTES, Grammar
from edgedec.model import Model
from edgedec_runtimes.grammar.compiler import Llguidance

REFUSED: dict[str, tuple[Grammar, str]] = {
    "unknown type": (Grammar.json_schema({"type": "strin"}), "strin"),
    "keyword": (Grammar.json_schema({"type": "array", "contains": {"type": "null"}}), "contains"),
    "keyword within": (Grammar.json_schema({"properties": {"a": {"not": {"pattern": "a"}}}}), "not"),
    "elsewhere": (Grammar.json_schema({"$ref": "http://example.com/s.json"}), "example.com"),
    "nothing fits": (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "look-ahead": (Grammar.regex("(?=a)b"), "look-ahead"),
    "open group": (Grammar.regex("(a"), "unclosed"),
    "repetition": (Grammar.regex("a{5,2}"), "repetition"),
    "no rule": (Grammar.lark("start: other"), "other"),
    "no grammar": (Grammar.lark("start: ("), "start"),
    "no such token": (Grammar.lark("start: <nothing>"), "<nothing>"),
    "too large": (
        Grammar.json_schema({"anyOf": [{"properties": {f"k{i}{j}": {} for j in range(8)}} for i in range(6000)]}),
        "",
    ),
}


OPEN: tuple[Mapping[str, Any], ...] = (
    {"type": "object"},
    {"type": ["null", "object"]},
    {"properties": {"a": {"type": "string"}}},
    {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}}},
)
CLOSED: tuple[Mapping[str, Any], ...] = (
    {"properties": {"a": {"type": "string"}}, "additionalProperties": False},
    {"enum": [{"properties": 1}], "type": "string"},
    {"type": "object", "unevaluatedProperties": False},
    {},
)


def test_a_cut_text_of_an_open_schema_says_what_to_change() -> None:
    """Objects that may have keys of any name make a text that may never end; closed ones do not."""
    for schema in (*OPEN, *CLOSED):
        told = Grammar.json_schema(schema).note_if_cut
        assert ("additionalProperties" in told) == (schema in OPEN), schema
    assert Grammar.regex("a+").note_if_cut == ""


NOTHING = ("", "|", "()", "(|)", "^$", "(?i)", "a{0}", "\\A", "(?x) ")
NO_TEXT = ('start: ""', "start:", "start: a\na: ", 'start: A\nA: ""')
MEANINGLESS = ("(", "[", ")", "a{2", "(?i", "(?=a)b", "(?<!a)b", "\\b", "*", "\\1", "[z-a]", "[^\\s\\S]")
EMPTY = {f"regex {source!r}": Grammar.regex(source) for source in NOTHING}
EMPTY |= {f"lark {source!r}": Grammar.lark(source) for source in NO_TEXT}
LONE = {
    "alone": Grammar.regex("\\"),
    "at the end": Grammar.regex("a\\"),
    "behind a pair": Grammar.regex("a\\\\\\"),
    "a pattern": Grammar.json_schema({"type": "string", "pattern": "a\\"}),
    "a pattern of names": Grammar.json_schema({"patternProperties": {"\\": {}}}),
}


@pytest.fixture(scope="module")
def engine(byte_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model."""
    with edgedec.load(byte_path, runtime="cpu", n_ctx=64, draft="off", n_threads=1) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_kept_to_is_refused_first(
    engine: edgedec.Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A RequestError that names what is wrong, on one short line, before any forward; the next request is served."""
    grammar, words = REFUSED[name]

    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was evaluated")

    with monkeypatch.context() as patch:
        patch.setattr("edgedec.decoding.generate.prepare", fail)
        with pytest.raises(RequestError) as refused:
            engine.stream("x", grammar=grammar)
    message = str(refused.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 400
    assert engine.generate("x", grammar=Grammar.regex("ok"), max_tokens=9).text == "ok"


@pytest.mark.parametrize("name", EMPTY)
def test_what_has_no_text_is_refused(engine: edgedec.Engine, name: str) -> None:
    """A grammar whose only text is the empty one is a mistake, and is called so."""
    with pytest.raises(RequestError, match="has no text but the empty one"):
        engine.stream("x", grammar=EMPTY[name])


@pytest.mark.parametrize("name", LONE)
def test_a_lone_backslash_is_refused(engine: edgedec.Engine, name: str) -> None:
    """It would be left out silently; a pair of them is a backslash."""
    with pytest.raises(RequestError, match="ends in a lone backslash"):
        engine.stream("x", grammar=LONE[name])
    assert engine.generate("x", grammar=Grammar.regex("a\\\\"), max_tokens=9).text == "a\\"


@pytest.mark.parametrize("source", ["", "%ignore /x/", "// no rule"])
def test_a_grammar_without_rules_is_refused(engine: edgedec.Engine, source: str) -> None:
    """It has no start."""
    with pytest.raises(RequestError, match="the grammar can't be used"):
        engine.stream("x", grammar=Grammar.lark(source))


@pytest.mark.parametrize("source", MEANINGLESS)
def test_an_expression_that_means_nothing_is_named(engine: edgedec.Engine, source: str) -> None:
    """The refusal begins with the expression."""
    with pytest.raises(RequestError) as refused:
        engine.stream("x", grammar=Grammar.regex(source))
    assert str(refused.value).startswith(f"the regular expression {source!r} ")


@pytest.mark.parametrize("schema", ["{", "[]", "7", {"a": object()}, {"enum": [float("nan")]}, "x" * MAX_SOURCE_BYTES])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    """Neither text nor objects that are no JSON object."""
    with pytest.raises(RequestError, match="JSON schema"):
        Grammar.json_schema(schema)


def test_a_source_over_the_limit_is_refused() -> None:
    """Of any kind, with both sizes."""
    for make in (Grammar.regex, Grammar.lark, Grammar.json_schema):
        with pytest.raises(RequestError, match=f"takes {MAX_SOURCE_BYTES + 1} bytes"):
            make("x" * (MAX_SOURCE_BYTES + 1))


def test_two_wishes_are_refused(engine: edgedec.Engine) -> None:
    """A grammar beside a schema, and a grammar beside ignore_end, say what to leave out."""
    with pytest.raises(RequestError, match="leave one of them out"):
        engine.generate("x", grammar=Grammar.regex("a"), json_schema={})
    with pytest.raises(RequestError, match="ignore_end"):
        engine.generate("x", grammar=Grammar.regex("a"), ignore_end=True)


def test_without_the_library_the_error_names_the_extra(byte_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """RuntimeUnavailableError says what to install; it is asked for at the first grammar only."""
    grammars = Grammars(byte_model.tokenizer)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(RuntimeUnavailableError, match=r'pip install "llguidance>='):
            grammars.open(Grammar.regex("a"))
    assert not grammars.open(Grammar.regex("a")).is_complete


def test_a_logit_bias_against_the_grammar_is_a_dead_end(engine: edgedec.Engine) -> None:
    """Where the bias rules out the one token that the grammar allows, the text ends in an error that says so."""
    with pytest.raises(RequestError, match="no token is left"):
        engine.generate("x", grammar=Grammar.regex("ab"), logit_bias={FIRST_BYTE + ord("b"): float("-inf")})


class Letters:
    """A tokenizer of the letters a and b."""

    n_vocab = 3
    bos_token = eos_token = ""
    infill_ids: Mapping[str, int] = MappingProxyType({})
    control_texts: tuple[str, ...] = ()

    def least_tokens(self, text: str) -> int:
        """Say nothing."""
        return 0

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the tokens of those letters."""
        return ["ab".index(letter) for letter in text if letter in "ab"]

    def piece(self, token_id: int) -> bytes:
        """Return the letter."""
        return b"ab\0"[token_id : token_id + 1] if token_id < 2 else b""

    def decode(self, token_ids: Any) -> str:
        """Return the letters."""
        return b"".join(map(self.piece, token_ids)).decode()

    def is_end(self, token_id: int) -> bool:
        """The last one ends a text."""
        return token_id == 2


def test_a_vocabulary_that_lacks_a_letter_is_a_dead_end() -> None:
    """Where no token can go on, and the text may not end, the error says so; at once, or where it comes to it."""
    with pytest.raises(RequestError, match="dead end"):
        Llguidance(Letters()).compile(Grammar.regex("[cd]"))
    state = Llguidance(Letters()).compile(Grammar.regex("a(bc|c)|b"))
    assert state.allowed().tolist() == [True, True, False]
    assert state.advance(0)
    assert state.advance(1)
    with pytest.raises(RequestError, match="dead end"):
        state.allowed()


def test_a_vocabulary_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's text could not end."""
    monkeypatch.setattr(Letters, "is_end", lambda self, token_id: False)
    with pytest.raises(RequestError, match="no end token"):
        Llguidance(Letters())

"""What can't be kept to is refused before anything is evaluated, by name; and what ends in the middle says why.

Tokenizers are seen as grammars see them: every byte of a text, whatever an encoder puts around it.
"""

import gc
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import ref

import pytest
from support.models.tiny_models import FIRST_BYTE

import edgedec
from edgedec.decoding.grammars import Grammars
from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.grammar import MAX_SOURCE_BYTES, Grammar
from edgedec.model import Model
from edgedec_runtimes.grammar.compiler import Llguidance

PIECES = ("", "", *map(chr, range(0x20, 0x7F)), "\n", '{"', '": "', '"}', "name", " na", "me")
END = 1


class Spaced:
    """A tokenizer of a few pieces that puts a space before a text, as SentencePiece's may; longest pieces first.

    Args:
        pieces: What its tokens stand for.
        end: The token that ends a text.
        joined: Whether a line end takes what follows into its token, so that no way of encoding spells a text.
    """

    bos_token = eos_token = ""
    infill_ids: Mapping[str, int] = MappingProxyType({})
    control_texts: tuple[str, ...] = ()

    def __init__(self, pieces: Sequence[str] = PIECES, end: int = END, *, joined: bool = False) -> None:
        self._pieces, self._end, self._joined = pieces, end, joined
        self.n_vocab = len(pieces)

    def least_tokens(self, text: str) -> int:
        return 0

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the tokens of a text, with a space before it unless it begins with a line end; others are left out."""
        rest = text if text.startswith("\n") and not self._joined else " " + text
        ids = []
        while rest:
            best = max((piece for piece in self._pieces if piece and rest.startswith(piece)), key=len, default="")
            if best:
                ids.append(self._pieces.index(best))
            rest = rest[len(best) or 1 :]
        return ids

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id].encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[i] for i in token_ids)

    def is_end(self, token_id: int) -> bool:
        return token_id == self._end


def test_a_compiler_that_is_dropped_takes_its_vocabulary_along() -> None:
    """llguidance and the vocabulary hold each other, a circle that Python can't see; a text that goes on keeps both."""
    tokenizer = Spaced()
    alive = ref(tokenizer)
    state = Llguidance(tokenizer).compile(Grammar.regex("name me"))
    del tokenizer
    gc.collect()
    assert state.forced()
    assert alive() is not None
    del state
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("joined", [False, True])
def test_forced_text_is_spelled_exactly(joined: bool) -> None:
    """The space that an encoder adds is no part of it; tokens are the encoder's own, or the longest that fit."""
    constraint = Grammars(Spaced(joined=joined)).open(Grammar.json_schema({"const": {"name": "me"}}))
    pieces = []
    while not constraint.is_complete:
        forced = constraint.forced()
        pieces.append(PIECES[forced[0]])
        constraint.commit(forced[0])
    assert pieces == ['{"', "name", '": "', "me", '"}']


def test_any_tokenization_of_free_text_is_allowed() -> None:
    """Within a string tokens may be short or long; bytes are what counts."""
    spaced = Spaced()
    for words in ((" na", "me"), (" ", "name"), (" ", "n", "a", "me"), (" ", "n", "a", "m", "e")):
        constraint = Grammars(spaced).open(Grammar.json_schema({"type": "string", "maxLength": 5}))
        for piece in ('"', *words, '"'):
            assert constraint.allows((), PIECES.index(piece))
            constraint.commit(PIECES.index(piece))
        assert constraint.is_complete


def test_a_schema_may_ask_for_its_own_white_space() -> None:
    """Separators are those of Python's json module, unless the schema says otherwise."""
    schema: dict[str, Any] = {"const": {"a": [1, 2]}}
    styles: dict[str, dict[str, Any]] = {
        json.dumps(schema["const"]): schema,
        '{"a":[1,2]}': schema | {"x-guidance": {"item_separator": ",", "key_separator": ":"}},
    }
    for text, styled in styles.items():
        constraint = Grammars(Spaced()).open(Grammar.json_schema(styled))
        while not constraint.is_complete:
            token = constraint.forced()[0]
            assert text.startswith(PIECES[token])
            text = text[len(PIECES[token]) :]
            constraint.commit(token)
        assert text == ""


@pytest.mark.slow
def test_a_long_forced_text_is_spelled_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step encodes a bounded part of what is certain to follow, and the tokens stay those of the whole."""
    lengths: list[int] = []
    encode = Spaced.encode

    def counted(tokenizer: Spaced, text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Spaced, "encode", counted)
    found = []
    for most in (10_000, 20):
        monkeypatch.setattr("edgedec_runtimes.grammar.vocabulary._MOST_CHARACTERS", most)
        constraint = Grammars(Spaced()).open(Grammar.json_schema({"const": {"name": "name me " * 50}}))
        tokens: list[int] = []
        lengths.clear()
        while not constraint.is_complete:
            tokens.append(constraint.forced()[0])
            constraint.commit(tokens[-1])
        found.append((tokens, max(lengths)))
    (whole, n_whole), (parts, n_part) = found
    assert Spaced().decode(whole) == json.dumps({"name": "name me " * 50})
    assert parts == whole
    assert n_whole > 400
    assert n_part <= 21  # with the line end before it


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


WRONG: dict[str, tuple[Grammar, str]] = {
    **{
        f"empty {source!r}": (Grammar.regex(source), "has no text but the empty one")
        for source in ("", "|", "()", "(|)", "^$", "(?i)", "a{0}", "\\A", "(?x) ")
    },
    **{
        f"empty {source!r}": (Grammar.lark(source), "has no text but the empty one")
        for source in ('start: ""', "start:", "start: a\na: ", 'start: A\nA: ""')
    },
    **{
        f"lone {name}": (grammar, "ends in a lone backslash")
        for name, grammar in (
            ("alone", Grammar.regex("\\")),
            ("at the end", Grammar.regex("a\\")),
            ("behind a pair", Grammar.regex("a\\\\\\")),
            ("a pattern", Grammar.json_schema({"type": "string", "pattern": "a\\"})),
            ("a pattern of names", Grammar.json_schema({"patternProperties": {"\\": {}}})),
        )
    },
    **{
        f"no rule {source!r}": (Grammar.lark(source), "the grammar can't be used")
        for source in ("", "%ignore /x/", "// no rule")
    },
    **{
        source: (Grammar.regex(source), f"^{re.escape(f'the regular expression {source!r} ')}")
        for source in ("(", "[", ")", "a{2", "(?i", "(?=a)b", "(?<!a)b", "\\b", "*", "\\1", "[z-a]", "[^\\s\\S]")
    },
}


@pytest.fixture(scope="module")
def engine(byte_path: Path) -> Iterator[edgedec.Engine]:
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


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(engine: edgedec.Engine, name: str) -> None:
    """A grammar whose only text is the empty one, or without a start, and expressions that mean nothing, by name."""
    grammar, message = WRONG[name]
    with pytest.raises(RequestError, match=message):
        engine.stream("x", grammar=grammar)


def test_a_pair_of_backslashes_is_one(engine: edgedec.Engine) -> None:
    """A lone one would be left out silently, and is refused."""
    assert engine.generate("x", grammar=Grammar.regex("a\\\\"), max_tokens=9).text == "a\\"


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


def letters() -> Spaced:
    return Spaced(("a", "b", ""), end=2)


def test_a_vocabulary_that_lacks_a_letter_is_a_dead_end() -> None:
    """Where no token can go on, and the text may not end, the error says so; at once, or where it comes to it."""
    with pytest.raises(RequestError, match="dead end"):
        Llguidance(letters()).compile(Grammar.regex("[cd]"))
    state = Llguidance(letters()).compile(Grammar.regex("a(bc|c)|b"))
    assert state.allowed().tolist() == [True, True, False]
    assert state.advance(0)
    assert state.advance(1)
    with pytest.raises(RequestError, match="dead end"):
        state.allowed()


def test_a_vocabulary_without_an_end_is_refused() -> None:
    """A grammar's text could not end."""
    with pytest.raises(RequestError, match="no end token"):
        Llguidance(Spaced(("a", "b", ""), end=99))

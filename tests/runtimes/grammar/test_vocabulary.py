"""Tokenizers as grammars see them: every byte of a text, whatever an encoder puts around it."""

import gc
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import ref

import pytest

from edgedec.decoding.grammars import Grammars
from edgedec.grammar import Grammar
from edgedec_runtimes.grammar.compiler import Llguidance

PIECES = ("", "", *map(chr, range(0x20, 0x7F)), "\n", '{"', '": "', '"}', "name", " na", "me")
END = 1


class Spaced:
    """A tokenizer of a few pieces that puts a space before a text, as SentencePiece's may; longest pieces first.

    Args:
        joined: Whether a line end takes what follows into its token, so that no way of encoding spells a text.
    """

    n_vocab = len(PIECES)
    bos_token = eos_token = ""
    infill_ids: Mapping[str, int] = MappingProxyType({})
    control_texts: tuple[str, ...] = ()

    def __init__(self, *, joined: bool = False) -> None:
        self._joined = joined

    def least_tokens(self, text: str) -> int:
        """Say nothing."""
        return 0

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the tokens of a text, with a space before it unless it begins with a line end."""
        rest = text if text.startswith("\n") and not self._joined else " " + text
        ids = []
        while rest:
            best = max((piece for piece in PIECES if piece and rest.startswith(piece)), key=len)
            ids.append(PIECES.index(best))
            rest = rest[len(best) :]
        return ids

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return PIECES[token_id].encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return "".join(PIECES[i] for i in token_ids)

    def is_end(self, token_id: int) -> bool:
        """Return whether it is the end token."""
        return token_id == END


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

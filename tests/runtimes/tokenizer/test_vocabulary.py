"""What vocabularies are refused and how, damaged ones, and the parts of the tokenizers by themselves."""

import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.gguf_writer import Typed
from support.models.tiny_t5 import END, PAD, TinyT5, replacements
from support.models.vocabularies import CONTROL, USER_DEFINED, bpe, characters, spm, types, write
from support.texts import word_pieces
from support.texts.token_texts import written

from edgedec.errors import EdgedecError, ModelFormatError, RequestError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGUFArray, ValueType, read_gguf
from edgedec_runtimes.tokenizer import open_tokenizer, refusal
from edgedec_runtimes.tokenizer.string_table import StringTable
from edgedec_runtimes.tokenizer.unicode_classes import LETTER, MARK, NUMBER, OTHER, PUNCTUATION, SYMBOL, collapse

BPE_KEYS = ("tokens", "token_type", "merges", "pre", "bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token")
SPM_KEYS = (*BPE_KEYS, "scores", "add_space_prefix")


def made(tmp_path: Path, metadata: dict[str, Any]) -> GGUF:
    """Write a vocabulary and read it."""
    return read_gguf(write(tmp_path / "m.gguf", metadata))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"tokenizer.ggml.model": "rwkv"},
            "its vocabulary is of the kind 'rwkv'; covered are 'gpt2' (BPE), 'llama' (Se",
        ),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "its pre-tokenizer is 'kimi-k2'; covered are a.x-4.0, "),
        ({"general.name": "My modern-BERT"}, "models named 'modern-bert' take spaces off around special tokens"),
    ],
)
def test_what_is_not_covered_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """A kind that is not covered is refused with the reason, by `refusal` and by opening alike."""
    gguf = made(tmp_path, bpe() | changes)
    found = refusal(gguf)
    assert found is not None
    assert found.startswith(reason)
    with pytest.raises(UnsupportedModelError) as raised:
        open_tokenizer(gguf)
    assert str(raised.value) == f"{gguf.paths[0]}: {found}; use the llamacpp runtime"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"[PAD]": CONTROL, "<PAD>": CONTROL}, "'<PAD>' and '[PAD]' could both be its token for code infilling"),
        ({"<ab": CONTROL, "ab>": USER_DEFINED}, "its special tokens overlap: one ends with 'ab', another begins so"),
    ],
)
def test_what_llamacpp_decides_by_chance_is_refused(extra: dict[str, int], reason: str, tmp_path: Path) -> None:
    """Where llama.cpp's answer hangs on the order of a hash table or an unstable sort, there is none here."""
    assert refusal(made(tmp_path, bpe(n_merges=5, extra=extra))) == reason


def test_a_token_may_overlap_with_itself(tmp_path: Path) -> None:
    """A special token that can follow itself with an overlap is no reason to refuse; matches go from the left."""
    gguf = made(tmp_path, bpe(n_merges=5, extra={"===": USER_DEFINED, "<x>": CONTROL}))
    assert refusal(gguf) is None
    tokenizer = open_tokenizer(gguf)
    assert tokenizer.encode("=====", add_special=False) == [tokenizer.n_vocab - 2, 61, 61]


FEW = bpe(n_merges=5)


def ggml(**values: Any) -> dict[str, Any]:
    """Return metadata of a tokenizer."""
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (FEW | ggml(tokens=["a", "b", "a"]), "tokens 0 and 2 are both 'a'"),
        (FEW | ggml(tokens=["a", b"\xff"]), "token 1 is b'\\xff', which is no UTF-8"),
        (FEW | ggml(token_type=types([1, 1])), "it has 2 token types for 265 tokens"),
        (FEW | ggml(tokens=3), "metadata 'tokenizer.ggml.tokens' is 3, expected an array of STRING"),
        (spm() | ggml(scores=np.zeros(9, np.float32)), "it has 9 scores for "),
        (spm() | ggml(scores=np.full(9999, np.nan, np.float32)), "the score of token 0 is no number"),
        (spm() | ggml(tokens=["<0x0G>"], token_type=types([6])), "byte token 0 is"),
        (spm() | ggml(tokens=[b"\xff"], token_type=types([3])), "special token 0 is"),
        (
            {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"},
            "the metadata has no 'tokenizer.ggml.tokens'",
        ),
        ({"general.architecture": "llama"}, "the metadata has no 'tokenizer.ggml.model'"),
        (FEW | ggml(tokens=Typed(ValueType.ARRAY, [], ValueType.STRING)), "its vocabulary has no tokens"),
        (bpe(n_merges=1, extra={"x": 1}) | ggml(tokens=["a"], add_bos_token=True), "BOS"),
    ],
)
def test_damage_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A vocabulary that contradicts itself is refused with what contradicts what."""
    with pytest.raises(ModelFormatError) as raised:
        open_tokenizer(made(tmp_path, metadata))
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_hostile_vocabularies(seed: int, tmp_path: Path) -> None:
    """A vocabulary with any contents either works or is refused with an EdgedecError."""
    rng = random.Random(seed)
    metadata = (spm(seed=seed), bpe(n_merges=40), characters(n_merges=40))[seed % 3]
    for key in rng.sample(SPM_KEYS if seed % 3 == 0 else BPE_KEYS, rng.randint(1, 3)):
        metadata[f"tokenizer.ggml.{key}"] = _hostile(rng, metadata.get(f"tokenizer.ggml.{key}"))
    try:
        tokenizer = open_tokenizer(made(tmp_path, metadata))
    except EdgedecError:
        return
    for text in written():
        ids = tokenizer.encode(text, parse_special=True)
        assert all(0 <= token_id < tokenizer.n_vocab for token_id in ids)
        tokenizer.decode(ids)
    assert all(isinstance(tokenizer.piece(i), bytes) for i in range(tokenizer.n_vocab))
    assert isinstance(tokenizer.bos_token + tokenizer.eos_token, str)


def _hostile(rng: random.Random, value: Any) -> Any:
    """Return another value for a key, most often one of its type."""
    if rng.random() < 0.15:
        return rng.choice([True, 7, 0.5, "text", ["a", "b"], np.arange(5, dtype=np.int32), 2**63])
    if isinstance(value, list):
        value = list(value)
        for _ in range(rng.randint(1, 20)):
            odd = [b"", b"\xff\xfe", b"\xe2\x96", "\x00" * 9, "x" * 70_000, "a b", " ", "<0x", "\u2581" * 300, value[0]]
            value[rng.randrange(len(value))] = rng.choice(odd)
        return value[: rng.choice([1, 2, 50, None])]
    if isinstance(value, Typed):
        kinds = [rng.choice([kind, rng.randint(-(2**31), 2**31 - 1), rng.randint(0, 7)]) for kind in value.value]
        return types(kinds if rng.random() < 0.7 else kinds[:3])
    if isinstance(value, np.ndarray):
        noise = np.array([np.inf, -np.inf, 0.0, 1e38, np.nan if rng.random() < 0.2 else 1.0], np.float32)
        return value + noise[np.array(rng.choices(range(5), k=len(value)))]
    return rng.choice([-1, 0, 1, 2**31, 2**64 - 1, True, False, True, False, "tekken", "falcon", "qwen2"])


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    """A text that no UTF-8 can hold is refused at the place where it breaks."""
    tokenizer = open_tokenizer(made(tmp_path, bpe(n_merges=5)))
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    """A piece of no token is an error, and no such token ends a text."""
    tokenizer = open_tokenizer(made(tmp_path, spm()))
    for token_id in (-1, tokenizer.n_vocab):
        assert not tokenizer.is_end(token_id)
        with pytest.raises(RequestError, match="outside the vocabulary"):
            tokenizer.piece(token_id)


@pytest.mark.parametrize(
    "strings",
    [
        [b"a"],
        [b"", b"b", b""],
        [b"x" * n for n in (1, 255, 256, 257, 3, 65_536, 70_000, 2)],
        [b"\x00" * 20, b"a", b"\x00", b"b\x00", b"\x00c"],
        [b"y" * 300] * 100,
        [],
    ],
)
def test_strings_are_read_as_the_file_has_them(strings: list[bytes]) -> None:
    """Short, long, empty strings and zeros come back as they are."""
    data = b"".join(len(string).to_bytes(8, "little") + string for string in strings)
    assert GGUFArray(ValueType.STRING, len(strings), data).strings() == strings


def test_a_table_finds_the_first_of_equal_strings() -> None:
    """Every string is found by content, others are not, and equal ones are reported."""
    strings = [str(i % 900).encode() for i in range(1000)]
    table = StringTable(strings)
    assert [table.find(string) for string in strings] == [i % 900 for i in range(1000)]
    assert [table[i] for i in range(len(table))] == strings
    assert table.find(b"1000") == table.find(b"") == -1
    pair = table.repeated()
    assert pair is not None
    assert table[pair[0]] == table[pair[1]]
    assert StringTable(strings[:900]).repeated() is None


@pytest.mark.slow
def test_classes_are_those_of_unicode() -> None:
    """Each character that this Python's Unicode knows has its general category, and white space is white space."""
    classes = {"L": LETTER, "N": NUMBER, "P": PUNCTUATION, "S": SYMBOL, "M": MARK, "Z": OTHER, "C": OTHER}
    spaces = {*"\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}
    newer = tuple(map(int, unicodedata.unidata_version.split("."))) > (15, 1, 0)
    text = "".join(map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)]))
    for character, byte in zip(text, collapse(text), strict=True):
        category = unicodedata.category(character)
        # One of the two versions of Unicode may not have the character yet.
        if category != "Cn" and not (newer and byte == OTHER):
            assert byte == (0x0B if character in spaces else classes[category[0]]), hex(ord(character))
    assert collapse("aZ 0\x00\x7f\r") == b"aZ 0\x00\x7f\r"


@pytest.mark.parametrize(("text", "expected"), word_pieces.TEXTS)
def test_word_pieces_are_berts(text: str, expected: str, tmp_path: Path) -> None:
    """The tokens of a text are those that BERT's own tokenizer makes, between [CLS] and [SEP]."""
    tokenizer = open_tokenizer(made(tmp_path, word_pieces.vocabulary()))
    ids = tokenizer.encode(text)
    assert " ".join(word_pieces.PIECES[i] for i in ids) == f"[CLS] {expected} [SEP]".replace("  ", " ")
    assert tokenizer.encode(text, add_special=False) == ids[1:-1]


@pytest.mark.parametrize(
    ("lowers", "strips", "expected"),
    [
        (False, None, "C ##a ##f ##\u00e9 \u00c9 \u4e2d e ##\u0301 \u0130"),
        (False, True, "C ##a ##f ##e E \u4e2d e I"),
        (True, False, "c ##a ##f ##\u00e9 \u00e9 \u4e2d e ##\u0301 i ##\u0307"),
        (True, None, "c ##a ##f ##e e \u4e2d e i"),
    ],
)
def test_capital_letters_and_accents(lowers: bool, strips: bool | None, expected: str, tmp_path: Path) -> None:
    """They stay where the file's metadata says so; accents go with the capital letters unless it says otherwise."""
    pieces = (*word_pieces.SPECIAL, *["C", "c", "É", "é", "e", "E", "İ", "i", "I", "中"])
    pieces += tuple(f"##{c}" for c in "af\u00e9e\u0301\u0307")
    rules = {"tokenizer.ggml.normalizer.lowercase": lowers}
    rules |= {} if strips is None else {"tokenizer.ggml.normalizer.strip_accents": strips}
    tokenizer = open_tokenizer(made(tmp_path, word_pieces.vocabulary(pieces) | rules))
    ids = tokenizer.encode("Caf\u00e9 \u00c9\u4e2d e\u0301 \u0130", add_special=False)
    assert " ".join(pieces[i] for i in ids) == expected


def test_special_tokens_of_word_pieces(tmp_path: Path) -> None:
    """They are text unless they are asked for; a long text is cut, and a vocabulary without [UNK] is refused."""
    metadata = word_pieces.vocabulary()
    tokenizer = open_tokenizer(made(tmp_path, metadata))
    assert tokenizer.encode("[SEP]", parse_special=True) == [2, 3, 3]
    assert 3 not in tokenizer.encode("[SEP]", add_special=False)
    assert len(tokenizer.encode("a " * 10**6, most=5)) == 6
    assert (tokenizer.decode(tokenizer.encode("to\u0085be a")), tokenizer.least_tokens("a " * 9)) == (" tobe a", 0)
    few = word_pieces.vocabulary(word_pieces.PIECES[:9])
    with pytest.raises(ModelFormatError, match="no token for words"):
        open_tokenizer(made(tmp_path, {key: value for key, value in few.items() if "unknown" not in key}))


RULES = {"\n": " ", "\t": " ", "ﬁ": "fi", "½": "1/2", "e\u0301": "e", "e\u0301\u0301": "E", "\u3000": " ", "\u200b": ""}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("translate  the small house\n", [100, 98, 105, 101]),
        (
            "ﬁne ½ cafe\u0301\u0301 e\u0301\u0301 thing",
            [3, 9, 12, 17, 8, 3, 57, 80, 58, 3, 6, 4, 9, 34, 3, 34, 3, 23, 11, 103],
        ),
        ("  日本 the\u3000stereo\u200b!! ", [3, 2, 98, 3, 107, 104, 8, 18, 66, 66]),
        ("äöü", [3, 2]),
        ("", []),
        ('tester "x" a an', [3, 23, 8, 107, 104, 3, 67, 27, 67, 99, 99, 17]),
    ],
)
def test_unigrams(text: str, ids: list[int], tmp_path: Path) -> None:
    """The ids are those that SentencePiece 0.2.3 gave; behind them stand the end, and what a decoder begins with."""
    path = TinyT5().write(tmp_path / "m.gguf", {"tokenizer.ggml.precompiled_charsmap": replacements(RULES)})
    tokenizer = open_tokenizer(read_gguf(path))
    assert tokenizer.encode(text, add_special=False) == ids
    assert tokenizer.encode(text) == [*ids, END, PAD]

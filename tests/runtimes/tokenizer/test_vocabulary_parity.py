"""The tokenizers of edgedec_runtimes.tokenizer give llama.cpp's ids, bytes and roles, token for token.

The bound on a text's tokens never says more than the tokenizer gives; and a tokenizer that was told stops early.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.real_models import real_model
from support.models.vocabularies import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    bpe,
    characters,
    spm,
    types,
    unigrams,
    write,
)
from support.texts.token_oracle import differing_texts, differing_tokens, oracle
from support.texts.token_texts import CODE, SENTENCES, random_texts, spelled, written

from edgedec.gguf.file import read_gguf
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.tokenizer import VocabularyTokenizer, open_tokenizer, refusal
from edgedec_runtimes.tokenizer.bpe import BytePairs
from edgedec_runtimes.tokenizer.pretokenizers import DIFFERENT_CUTS, NAMES

pytestmark = pytest.mark.slow


MODELS = ("smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-1.5b.gguf", "gemma3-270m.gguf")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<table>", "<s>")
OWN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<tool>", "<unk>", "<s>", "</s>", "<start>")


def assert_equal(path: Path, n_random: int, special: tuple[str, ...] = OWN_SPECIAL, n_long: int = 0) -> None:
    """Compare ids of the corpus, of n_long texts that join all of it and of random texts, and every token."""
    gguf = read_gguf(path)
    assert refusal(gguf) is None
    ours = open_tokenizer(gguf)
    corpus = written()[: len(SENTENCES) + len(CODE) + n_long]
    texts = [*corpus, *spelled(corpus, special), *random_texts(n_random, special)]
    with oracle(path) as theirs:
        assert differing_texts(ours, theirs, texts) == []
        assert differing_tokens(ours, theirs) == []
        assert dict(ours.infill_ids) == dict(theirs.infill_ids)


@pytest.mark.model
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str) -> None:
    """Ids, bytes and roles are llama.cpp's for the models that the project measures."""
    assert_equal(real_model(name), 600, SPECIAL, n_long=4)


@pytest.mark.parametrize("pre", sorted(DIFFERENT_CUTS))
def test_every_way_to_cut(pre: str, tmp_path: Path) -> None:
    """Texts are cut as llama.cpp cuts them."""
    assert_equal(write(tmp_path / "m.gguf", bpe(None if pre == "default" else pre)), 100)


def test_every_name_of_a_pre_tokenizer(tmp_path: Path) -> None:
    """Each name that is covered stands for the cuts, the merging and the BOS token that it has in llama.cpp."""
    for pre in NAMES - {""}:
        path = write(tmp_path / "m.gguf", bpe(pre, n_merges=100) | {"tokenizer.ggml.merges": ["t h", "Ġ t", "1 2"]})
        ours = open_tokenizer(read_gguf(path))
        with oracle(path) as theirs:
            assert differing_texts(ours, theirs, (*SENTENCES[:4], *SENTENCES[19:24])) == [], pre
            assert ours.bos_token == theirs.bos_token, pre


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.bos_token_id": 2**31, "tokenizer.ggml.eos_token_id": 10**6},
        {
            "tokenizer.ggml.eot_token_id": 300,
            "tokenizer.ggml.eom_token_id": 301,
            "tokenizer.ggml.fim_pad_token_id": 302,
        },
        {"tokenizer.ggml.merges": ["a b", "a b", "nospace", " x", "ab c d", "a  b", "x y z", "q u", "zz zz", "a b"]},
        {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["t h", "th e", "q u", "un known"]},
    ],
)
def test_byte_pair_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    """BOS, EOS and odd merges have the effect that they have in llama.cpp."""
    assert_equal(write(tmp_path / "m.gguf", bpe() | changes), 100)


def test_a_vocabulary_without_some_letters(tmp_path: Path) -> None:
    """Bytes that no token covers are left out, as llama.cpp does."""
    metadata = bpe(n_merges=30)
    metadata["tokenizer.ggml.tokens"] = [
        f"gone{i}" if i % 3 == 0 else t for i, t in enumerate(metadata["tokenizer.ggml.tokens"])
    ]
    assert_equal(write(tmp_path / "m.gguf", metadata), 200)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.remove_extra_whitespaces": True},
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_sentence_piece_settings(changes: dict[str, Any], seed: int, tmp_path: Path) -> None:
    """Merging by score, ties, byte fallback and the space in front are llama.cpp's."""
    assert_equal(write(tmp_path / "m.gguf", spm(seed=seed) | changes), 250)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.remove_extra_whitespaces": False},
        {"tokenizer.ggml.remove_extra_whitespaces": False, "tokenizer.ggml.add_eos_token": None},
        {"tokenizer.ggml.precompiled_charsmap": None},
        {
            "tokenizer.ggml.tokens": [
                f"{token[:2]}{SPACE}{token[2:]}" if i % 9 == 8 and len(token) > 3 else token
                for i, token in enumerate(unigrams(0)["tokenizer.ggml.tokens"])
            ]
        },
    ],
)
def test_unigram_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    """The likeliest cut, unknown characters, spaces and replacements are llama.cpp's."""
    metadata = unigrams(0) | changes
    path = write(tmp_path / "m.gguf", {key: value for key, value in metadata.items() if value is not None})
    assert_equal(path, 250, ("</s>", "<pad>", "<tool>"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": True},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.merges": ["a b", f"b {SPACE}", f"{SPACE} a", "\n \n", "a b", "nospace", "t h", "th e"]},
    ],
)
@pytest.mark.parametrize("n_merges", [40, 700])
def test_pairs_of_characters(changes: dict[str, Any], n_merges: int, tmp_path: Path) -> None:
    """Gemma 4's merges over characters, runs of line breaks, byte fallback and its BOS are llama.cpp's."""
    special = ("<|turn>", "<turn|>", "</s>", "<eos>", "\n\n", "\n\n\n\n", SPACE, f"e{SPACE}")
    assert_equal(write(tmp_path / "m.gguf", characters(n_merges=n_merges) | changes), 250, special)


def test_pairs_of_characters_without_some_bytes(tmp_path: Path) -> None:
    """Bytes that no token covers are left out, as llama.cpp does."""
    metadata = characters(n_merges=60)
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [
        f"<gone{i}>" if 3 <= i < 259 and i % 3 == 0 else t for i, t in enumerate(tokens)
    ]
    kinds = [
        4 if 3 <= i < 259 and i % 3 == 0 else kind for i, kind in enumerate(metadata["tokenizer.ggml.token_type"].value)
    ]
    metadata["tokenizer.ggml.token_type"] = types(kinds)
    assert_equal(write(tmp_path / "m.gguf", metadata), 200)


@pytest.mark.parametrize("name", ["Phi-3 mini", "tiny phi3"])
@pytest.mark.parametrize("kind", [bpe, spm])
def test_special_tokens_that_swallow_white_space(
    kind: Callable[..., dict[str, Any]], name: str, tmp_path: Path
) -> None:
    """Models called Phi 3 drop it behind most special tokens, white space that is a token by itself too."""
    extra = {
        "<|user|>": CONTROL,
        "<|end|>": CONTROL,
        "<|endoftext|>": CONTROL,
        "\n": USER_DEFINED,
        "\n\n": USER_DEFINED,
    }
    if kind is bpe:  # others have them
        extra |= {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    path = write(tmp_path / "m.gguf", kind(extra=extra) | {"general.name": name})
    assert_equal(path, 250, (*extra, "<s>", "</s>", "<|user|>\n \t\r\n", "<|end|> ", "<s> ", "<|endoftext|>\n\n", " "))


@pytest.mark.parametrize(
    "extra",
    [
        {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL, "<|channel|>": CONTROL},
        {"<|end|>": NORMAL, "<|calls|>": CONTROL, "<|flush|>": NORMAL, "<|message|>": NORMAL},
        {"</s>": CONTROL, "<|tool_response>": CONTROL, "<turn|>": NORMAL},
        {"<fim-prefix>": CONTROL, "<SUF>": NORMAL, "<|code_middle|>": USER_DEFINED, "<|fim_repo|>": CONTROL},
        {"<|fim_pad|>": NORMAL, "<|repo_name|>": NORMAL, "<|file_sep|>": CONTROL, "<PRE>": NORMAL, "[EOS]": NORMAL},
        {"<|eom_id|>": USER_DEFINED, "<|eot_id|>": CONTROL, "<|unused1|>": CONTROL, "": CONTROL, "[e~[": 9},
        {f"a{SPACE}b": USER_DEFINED, "ab": CONTROL, "abc": USER_DEFINED, "bcde": CONTROL, "cdefg": NORMAL},
    ],
)
def test_roles(extra: dict[str, int], tmp_path: Path) -> None:
    """Roles that llama.cpp gives to tokens by their text are the same here."""
    metadata = bpe(n_merges=40, extra=extra)
    assert_equal(write(tmp_path / "m.gguf", metadata), 60, (*extra, "abcdefg", "xabcdabx"))


BOUND_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<tool>", "<unk>", "<s>", "</s>", "<start>", f"{SPACE}{SPACE}x")
FLAGS = ((True, True), (False, False), (False, True))
# llama.cpp takes white space off after the control tokens of models of this name.
STRIPPING = spm(extra={"<start>": CONTROL, "<|endoftext|>": CONTROL}) | {"general.name": "phi-3"}
LACKING = {"tokenizer.ggml.merges": ["t h", "é x"]}  # merges into what is no token, so that bytes vanish


def texts_of(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of all kinds, and for each kind of token texts of nothing else, which come closest to the bound."""
    yield from written()
    yield from spelled(written()[:40], BOUND_SPECIAL)
    yield from random_texts(200, BOUND_SPECIAL)
    for token_id in range(tokenizer.n_vocab):
        yield tokenizer.decode([token_id]) * 5
    for special in (*BOUND_SPECIAL, SPACE, f"{SPACE}{SPACE}", "<start>" + " " * 99, "éx"):
        yield special * 50


def broken_bounds(tokenizer: Tokenizer) -> list[str]:
    """Return the texts whose bound is above their number of tokens."""
    found = []
    for text in texts_of(tokenizer):
        least = tokenizer.least_tokens(text)
        for add_special, parse_special in FLAGS:
            if least > len(tokenizer.encode(text, add_special=add_special, parse_special=parse_special)):
                found.append(text)
    return found


@pytest.mark.parametrize(
    ("metadata", "says_something"),
    [
        (bpe(), True),
        (bpe("llama3", extra={"<|im_start|>": CONTROL, "=" * 30: USER_DEFINED, "<|user|>": CONTROL}), True),
        (bpe() | LACKING, False),
        (spm(), True),
        (spm(extra={"<start>": CONTROL, f"{SPACE}{SPACE}x": USER_DEFINED, "\n" * 12: USER_DEFINED}), True),
        (spm() | {"tokenizer.ggml.add_space_prefix": False}, True),
        (STRIPPING, True),
        (characters(), True),
    ],
    ids=[
        "bpe",
        "bpe, special",
        "bpe, bytes vanish",
        "spm",
        "spm, special",
        "spm, no prefix",
        "spm, stripping",
        "pairs",
    ],
)
def test_the_bound_holds(metadata: dict[str, Any], says_something: bool, tmp_path: Path) -> None:
    """For every vocabulary and flag, a text has as many tokens as the bound says, or more."""
    tokenizer = open_tokenizer(read_gguf(write(tmp_path / "m.gguf", metadata)))
    assert broken_bounds(tokenizer) == []
    assert (tokenizer.least_tokens("many words " * 1000) > 20) is says_something


@pytest.mark.parametrize("metadata", [bpe(), spm(), STRIPPING, characters()], ids=["bpe", "spm", "stripping", "pairs"])
def test_the_bound_holds_for_llamacpp(metadata: dict[str, Any], tmp_path: Path) -> None:
    """The same for llama.cpp's own tokenizer, which may strip white space."""
    with oracle(write(tmp_path / "m.gguf", metadata)) as tokenizer:
        assert broken_bounds(tokenizer) == []
        assert tokenizer.least_tokens("many words " * 1000) > 20


def test_bytes_without_a_token_do_not_count(tmp_path: Path) -> None:
    """A byte that no token has vanishes from a text, as in llama.cpp: any number of them fits."""
    metadata = bpe(n_merges=1, extra={"<x>": CONTROL})
    keep = [i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token != "a"]
    kinds = metadata["tokenizer.ggml.token_type"]
    for name, values in (("tokens", metadata["tokenizer.ggml.tokens"]), ("token_type", kinds.value)):
        chosen = [values[i] for i in keep]
        metadata[f"tokenizer.ggml.{name}"] = chosen if name == "tokens" else types(chosen)
    path = write(tmp_path / "m.gguf", metadata)
    ours = open_tokenizer(read_gguf(path))
    with oracle(path) as theirs:
        for tokenizer in (ours, theirs):
            assert tokenizer.encode("aaaa" * 1000, add_special=False) == []
            assert tokenizer.least_tokens("aaaa" * 1000) == 0
            assert tokenizer.least_tokens("abab" * 1000) == 2000


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf"])
def test_the_bound_holds_for_real_models(name: str) -> None:
    """On real vocabularies the bound of a text of Chinese characters is above a token for eight of them."""
    tokenizer = open_tokenizer(read_gguf(real_model(name)))
    for text in (*written(), *(tokenizer.decode([i]) * 9 for i in range(0, tokenizer.n_vocab, 7))):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False, parse_special=True))
    assert tokenizer.least_tokens("中" * 80_000) >= 5_000


@pytest.mark.parametrize("metadata", [bpe(), spm(), characters()], ids=["bpe", "spm", "pairs"])
def test_a_tokenizer_that_was_told_stops_early(metadata: dict[str, Any], tmp_path: Path) -> None:
    """With `most` the ids are the first ones of the whole text's, more than `most`, and not many more."""
    tokenizer = open_tokenizer(read_gguf(write(tmp_path / "m.gguf", metadata)))
    text = "\n".join(written())
    whole = tokenizer.encode(text, add_special=False)
    for most in (0, 10, 1000):
        begun = tokenizer.encode(text, add_special=False, most=most)
        assert begun == whole[: len(begun)]
        assert most < len(begun) < most + 200
    assert tokenizer.encode(text, add_special=False, most=len(whole)) == whole


def test_words_are_cut_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long text no more words are looked at than are asked for."""
    tokenizer = open_tokenizer(read_gguf(write(tmp_path / "m.gguf", bpe())))
    seen: list[str] = []
    words = BytePairs.words

    def counted(method: BytePairs, text: str, *, after_special: bool) -> Iterator[str]:
        for word in words(method, text, after_special=after_special):
            seen.append(word)
            yield word

    monkeypatch.setattr(BytePairs, "words", counted)
    assert isinstance(tokenizer, VocabularyTokenizer)
    assert len(tokenizer.encode("one two three " * 10_000, most=20)) > 20
    assert len(seen) <= 21

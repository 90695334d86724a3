"""The bound on a text's tokens never says more than the tokenizer gives; and a tokenizer that was told stops early."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.real_models import real_model
from support.models.vocabularies import CONTROL, SPACE, USER_DEFINED, bpe, characters, spm, types, write
from support.texts.token_oracle import oracle
from support.texts.token_texts import random_texts, spelled, written

from edgedec.gguf.file import read_gguf
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.tokenizer import VocabularyTokenizer, open_tokenizer
from edgedec_runtimes.tokenizer.bpe import BytePairs

pytestmark = pytest.mark.slow

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<tool>", "<unk>", "<s>", "</s>", "<start>", f"{SPACE}{SPACE}x")
FLAGS = ((True, True), (False, False), (False, True))
# llama.cpp takes white space off after the control tokens of models of this name.
STRIPPING = spm(extra={"<start>": CONTROL, "<|endoftext|>": CONTROL}) | {"general.name": "phi-3"}
LACKING = {"tokenizer.ggml.merges": ["t h", "é x"]}  # merges into what is no token, so that bytes vanish


def texts_of(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of all kinds, and for each kind of token texts of nothing else, which come closest to the bound."""
    yield from written()
    yield from spelled(written()[:40], SPECIAL)
    yield from random_texts(200, SPECIAL)
    for token_id in range(tokenizer.n_vocab):
        yield tokenizer.decode([token_id]) * 5
    for special in (*SPECIAL, SPACE, f"{SPACE}{SPACE}", "<start>" + " " * 99, "éx"):
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
def test_real_models(name: str) -> None:
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

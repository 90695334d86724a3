"""A head fits the model that it was trained for and no other one, and drafts the first of its tokens, or all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.heads.tiny_heads import TinyHead, write_head
from support.models.gguf_writer import write_gguf
from support.models.tiny_models import tiny_llama

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec_runtimes.trained_heads import nextn
from edgedec_runtimes.trained_heads.card import Target
from edgedec_runtimes.trained_heads.head import Head
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.nextn import n_listed, script_of
from edgedec_runtimes.trained_heads.target import default_taps, fit, hash_weights, target_of

TINY = TinyHead(n_embd=64, n_embd_target=64, head_dim=16, taps=(0, 2, 4), n_vocab_target=260)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    """Return a head for a tiny model with four layers."""
    write_head(tmp_path / "head", TINY)
    return load_head(tmp_path / "head")


@pytest.fixture
def target(tmp_path: Path) -> GGUF:
    """Return that model."""
    return read_gguf(tiny_llama(tmp_path / "a.gguf", n_layer=4))


def _for(head: Head, trained_for: Target | None) -> Head:
    return replace(head, card=replace(head.card, target=trained_for))


def test_the_model_that_it_was_trained_for_needs_no_note(head: Head, target: GGUF, tmp_path: Path) -> None:
    """A copy of the file under another name is that model."""
    trained = _for(head, target_of(target))
    assert fit(trained, target).notes == ()
    copy = read_gguf(tiny_llama(tmp_path / "copy.gguf", n_layer=4))
    assert target_of(copy) == target_of(target)
    assert fit(trained, copy).head.card == trained.card


def test_the_hashes_are_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start reads no weights, unless the file was changed or what the cache holds is damaged."""
    path, cache = tiny_llama(tmp_path / "m.gguf", n_layer=4), tmp_path / "cache"
    first = target_of(read_gguf(path), cache)
    hashed: list[str] = []

    def counted(gguf: GGUF) -> str:
        hashed.append(hash_weights(gguf))
        return hashed[-1]

    monkeypatch.setattr("edgedec_runtimes.trained_heads.target.hash_weights", counted)
    assert target_of(read_gguf(path), cache) == first
    assert not hashed
    (kept,) = (cache / "probes").iterdir()
    for damaged in ("{", "[]", '["a", 1, "b", "c"]', '"abcd"'):
        kept.write_text(damaged)
        assert target_of(read_gguf(path), cache) == first
    assert hashed == 4 * [first.weights_hash]
    tiny_llama(path, n_layer=4, seed=9)
    gguf = read_gguf(path)
    assert target_of(gguf, cache).weights_hash != first.weights_hash
    assert target_of(gguf) == target_of(gguf, cache)
    assert len(hashed) == 5


def test_another_quantization_is_noted(head: Head, target: GGUF, tmp_path: Path) -> None:
    """Its vectors are the same and its matrices are not."""
    other = read_gguf(tiny_llama(tmp_path / "b.gguf", n_layer=4, dtype="f16"))
    assert target_of(other).norms_hash == target_of(target).norms_hash
    (note,) = fit(_for(head, target_of(target)), other).notes
    assert "another quantization of tiny llama 0" in note


def test_another_model_is_refused(head: Head, target: GGUF, tmp_path: Path) -> None:
    """Same sizes and tokens, but other weights; and the same weights with other tokens."""
    other = read_gguf(tiny_llama(tmp_path / "b.gguf", n_layer=4, seed=1))
    with pytest.raises(UnsupportedModelError, match="'tiny llama 1' is another model"):
        fit(_for(head, target_of(target)), other)
    with pytest.raises(UnsupportedModelError, match="other tokens"):
        fit(_for(head, replace(target_of(target), tokenizer_hash="0" * 32)), target)


def test_a_head_without_hashes_is_noted(head: Head, target: GGUF) -> None:
    """A checkpoint of somebody else names its target by a name at most."""
    (note,) = fit(head, target).notes
    assert "does not say by a hash" in note
    (note,) = fit(_for(head, Target("some/model")), target).notes
    assert "calls it 'some/model'" in note


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_embd_target": 32}, "its taps have 32 numbers, but the model's hidden states 64"),
        ({"n_embd": 32, "own_embedding": False}, "borrows embeddings of 32"),
        ({"n_embd": 32, "own_embedding": True}, "borrows an output matrix of 32 columns"),
        ({"n_vocab_target": 300}, "300 tokens, but the model has 260"),
        ({"taps": (1, 2, 5)}, "taps layer 5, but the model has 4"),
    ],
)
def test_what_does_not_fit_is_named(head: Head, target: GGUF, change: dict[str, object], named: str) -> None:
    """Sizes, vocabulary and layers are compared before anything runs."""
    card = replace(head.card, **change)  # type: ignore[arg-type]  # the values are of their attributes' types
    with pytest.raises(UnsupportedModelError, match=named):
        fit(replace(head, card=card), target)


def test_taps_that_are_not_named_are_those_of_the_paper(head: Head, tmp_path: Path) -> None:
    """They depend on the target's number of layers."""
    open_taps = replace(head, card=replace(head.card, taps=()))
    target = read_gguf(tiny_llama(tmp_path / "c.gguf", n_layer=10))
    assert fit(open_taps, target).head.card.taps == (2, 5, 7)
    assert default_taps(28) == (2, 14, 25)
    short = read_gguf(tiny_llama(tmp_path / "d.gguf", n_layer=4))
    with pytest.raises(UnsupportedModelError, match="too few"):
        fit(open_taps, short)


def test_the_hash_sees_a_change_in_any_matrix(target: GGUF, tmp_path: Path) -> None:
    """A model whose one matrix was trained further has another hash of its weights."""
    path = tmp_path / "changed.gguf"
    raw = bytearray(target.paths[0].read_bytes())
    tensor = target.tensors["blk.2.ffn_up.weight"]
    piece = np.frombuffer(raw, np.float32, tensor.n_elements, tensor.offset) * np.float32(1.001)
    raw[tensor.offset : tensor.offset + tensor.n_bytes] = piece.tobytes()
    path.write_bytes(raw)
    found = target_of(read_gguf(path))
    assert found.weights_hash != target_of(target).weights_hash
    assert found.norms_hash == target_of(target).norms_hash


LATIN, HAN, CYRILLIC = "cafés", "猫舍", "кот"


def test_scripts_are_told_by_their_first_bytes() -> None:
    """In vocabularies of bytes and of characters alike; ASCII, and bytes that begin no character, are of none."""
    in_characters = [script_of(text.encode(), in_bytes=False) for text in (LATIN, HAN, CYRILLIC)]
    as_bytes = ["cafÃ©s", "çĮ«èĪį", "ÐºÐ¾ÑĤ"]
    assert [script_of(text.encode(), in_bytes=True) for text in as_bytes] == in_characters
    assert len({0, *in_characters}) == 4
    assert [script_of(token, in_bytes=True) for token in (b" the", "Ġcat".encode(), b"\xff")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a"] * 100 + [HAN] * 50, 150),  # all of one script are behind the first ones
        (["a", HAN] * 30 + ["a"] * 140, 64),
        (["a"] * 63 + [HAN] + ["a"] * 99 + [HAN], 64),  # a script of few tokens, half of which are among the first
        (["a"] * 199 + [HAN], 64),  # a script of next to no tokens
        (["a"] * 128, 128),  # not more than twice as many
        ([HAN] * 60 + ["a"] * 60 + [CYRILLIC] * 200, 320),
    ],
)
def test_the_first_tokens_are_drafted_where_all_scripts_are_among_them(
    tokens: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all tokens are."""
    monkeypatch.setattr(nextn, "LISTED", 64)
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"a": np.zeros(1, np.float32)})
    assert n_listed(read_gguf(path), len(tokens)) == expected


def test_without_a_list_of_tokens_all_are_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nobody knows what they are."""
    monkeypatch.setattr(nextn, "LISTED", 64)
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"a": np.zeros(1, np.float32)})
    assert n_listed(read_gguf(path), 500) == 500

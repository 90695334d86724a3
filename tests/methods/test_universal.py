"""A draft model with another tokenizer: bytes line up exactly, and the text is plain decoding's."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoding.draft_models import SETTINGS, generate, loaded, tiny
from support.models.real_models import real_model
from support.models.spelled import END, Spelled, spelled_context
from support.models.vocabularies import bpe, spm, write
from support.texts.token_texts import CODE, SENTENCES

import edgedec
from edgedec.drafters.draft_model.model import DraftModel
from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.loading.second_model import open_draft_model, same_tokenizer
from edgedec.testing import check_drafter
from edgedec.tokenizer import Tokenizer, added_around
from edgedec_methods.alignment import Aligned, continuation, encode_aligned, whole_characters
from edgedec_methods.universal import UniversalDraftModel
from edgedec_runtimes.tokenizer import open_tokenizer

REAL = ("smollm2-135m.gguf", "qwen2.5-coder-0.5b.gguf")
KINDS = [*("bpe", "spm", "spaced"), *(pytest.param(name, marks=pytest.mark.model) for name in REAL)]
Open = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Open tokenizers by name: small ones of each kind, SentencePiece with a space before texts, and real ones."""
    folder = tmp_path_factory.mktemp("vocabularies")
    made = {"bpe": bpe(), "spm": spm() | {"tokenizer.ggml.add_space_prefix": False}}
    made["spaced"] = spm() | {"tokenizer.ggml.add_space_prefix": True}
    opened: dict[str, Tokenizer] = {}

    def opened_once(name: str) -> Tokenizer:
        if name not in opened:
            path = write(folder / f"{name}.gguf", made[name]) if name in made else real_model(name)
            opened[name] = open_tokenizer(read_gguf(path))
        return opened[name]

    return opened_once


def aligned(tokenizer: Tokenizer, parts: Sequence[bytes]) -> Aligned:
    """Add the parts of a text one after the other, looking at the alignment after each one."""
    text = Aligned(tokenizer)
    for part in parts:
        text.add(part)
        spelled = b"".join(tokenizer.piece(token) for token in text.ids)
        covered = bytes(text.text[text.start : text.ends[-1] if text.ends else text.start])
        assert spelled in (covered, b" " + covered)
        assert all(before <= after for before, after in pairwise(text.ends))
        assert all(0 <= token < tokenizer.n_vocab for token in text.ids)
        end = text.start + len(covered)
        assert text.complete == (end == len(text.text))
        assert len(text.text) - end <= 3
    return text


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Cut bytes at places."""
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(borders)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), places=st.lists(st.integers(0), max_size=9))
@settings(max_examples=60, deadline=None)
def test_any_text_lines_up(tokenizer_of: Open, kind: str, text: str, places: list[int]) -> None:
    """Cut anywhere, also within characters, every part leaves tokens in range that spell the text so far."""
    if kind == "bpe":  # others lack bytes, or take U+2581 for a space
        assert encode_aligned(tokenizer_of(kind), text.encode()) is not None
    found = aligned(tokenizer_of(kind), cut(text.encode(), places))
    assert found.complete


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=60), places=st.lists(st.integers(0), max_size=9))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_line_up_from_where_they_are(
    tokenizer_of: Open, kind: str, data: bytes, places: list[int]
) -> None:
    """What comes before a byte that is not UTF-8 is left out."""
    aligned(tokenizer_of(kind), cut(data, places))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_text_has_the_tokens_of_the_whole(tokenizer_of: Open, kind: str) -> None:
    """Of code and of text in many languages, token by token of another kind of cut, all but few tokens are the same."""
    n_same = n_all = 0
    for text in (*SENTENCES, *CODE):
        data = text.encode()
        whole = encode_aligned(tokenizer_of(kind), data)
        grown = aligned(tokenizer_of(kind), [data[i : i + 5] for i in range(0, len(data), 5)])
        if whole is not None:
            n_all += len(whole.ids)
            n_same += len(set(zip(whole.ids, whole.ends, strict=True)) & set(zip(grown.ids, grown.ends, strict=True)))
    assert n_same >= 0.99 * n_all > 500


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_goes_on_in_the_targets_tokens(tokenizer_of: Open, kind: str) -> None:
    """After any of its tokens the rest of a text becomes tokens that spell it; mostly those of the whole text.

    Left out are texts that "spaced" can't spell: it puts a space after user-defined tokens, too.
    """
    tokenizer = tokenizer_of(kind)
    n_same = n_all = 0
    for text in (*SENTENCES[:6], *CODE):
        whole = encode_aligned(tokenizer, text.encode())
        for n in range(1, len(whole.ids), 5) if whole is not None else ():
            assert whole is not None
            rest = text.encode()[whole.ends[n - 1] :]
            if not rest or rest[0] & 0xC0 == 0x80:  # no token's text goes on in the middle of a character
                continue
            found = continuation(tokenizer, whole.ids[max(0, n - 8) : n], rest)
            assert found is not None
            assert b"".join(tokenizer.piece(token) for token in found.ids) == rest
            assert found.ends[-1] == len(rest)
            n_all += 1
            n_same += found.ids[:4] == whole.ids[n : n + 4]
    assert n_same >= 0.95 * n_all > 50


def test_characters_that_are_cut_short() -> None:
    """Counted are the bytes before them; what is no character at all is not cut short."""
    for text in ("a", "é", "中", "👍"):
        data = b"x" + text.encode()
        n_each = [whole_characters(data[:n]) for n in range(1, len(data) + 1)]
        assert n_each == [1] * (len(data) - 1) + [len(data)]
    assert whole_characters(b"") == 0
    assert whole_characters(b"\x80\x80\x80\x80\x80") == 5


def test_what_tokenizers_put_before_a_text(tokenizer_of: Open, tmp_path: Path) -> None:
    """BOS where there is one; nothing that comes after a text."""
    assert added_around(tokenizer_of("bpe"))[0] == []
    metadata = bpe() | {f"tokenizer.ggml.add_{role}_token": True for role in ("bos", "eos")}
    metadata |= {f"tokenizer.ggml.{role}_token_id": i for i, role in enumerate(("bos", "eos"), start=2)}
    assert added_around(open_tokenizer(read_gguf(write(tmp_path / "both.gguf", metadata))))[0] == [2]


TARGET = Spelled(["a", "b", "bc", "d", "de", "e", "x", "xa"])
DRAFT = Spelled(["ab", "cd", "e", "x", "é", "a"])
Says = dict[str, tuple[str, float]]


def drafted(
    says: dict[str, tuple[str, float]], n_max: int, n_vocab: int | None = None
) -> tuple[list[str], list[float]]:
    """Return the pieces drafted after "x" and what is said of them."""
    drafter = UniversalDraftModel(DRAFT.model(says))(spelled_context(TARGET, n_vocab))
    drafter.begin(TARGET.encode("x"))
    found = drafter.propose(n_max, 1e18)
    assert found.is_chain
    return [TARGET.pieces[token] for token in found.tokens], list(found.p_accept)


CHAIN: Says = {"x": ("ab", 0.5), "xab": ("cd", 0.8), "xabcd": ("e", 0.9), "xabcde": (END, 0.9)}


def test_tokens_get_the_probabilities_of_the_pieces_that_begin_in_them() -> None:
    """Of "ab", "cd" and "e" come "a" with 0.5, "bc" with 0.8 and, once the text has ended, "de" with 0.9."""
    pieces, p = drafted(CHAIN, 8)
    assert pieces == ["a", "bc", "de"]
    np.testing.assert_allclose(p, [0.5, 0.8, 0.9], rtol=1e-3)
    pieces, p = drafted({"x": ("x", 0.5), "xx": ("a", 0.8), "xxa": (END, 0.9)}, 8)
    assert pieces == ["xa"]  # both begin in it
    np.testing.assert_allclose(p, [0.4], rtol=1e-3)


def test_a_token_that_may_go_on_is_left_out() -> None:
    """While the text has not ended, "d" may become "de"; what is a token for both models has ended where it ends."""
    assert drafted(CHAIN, 2)[0] == ["a", "bc"]
    assert drafted({"x": ("e", 0.9), "xe": ("e", 0.9)} | {"xee": ("x", 0.9)}, 3)[0] == ["e", "e", "x"]


def test_a_text_begins_in_new_tokens_where_the_old_one_stood() -> None:
    """After "x" the text "ab" is no part of "xa": the border between what was generated and what is drafted stays."""
    assert TARGET.encode("xab") == [TARGET.pieces.index("xa"), TARGET.pieces.index("b")]
    assert drafted({"x": ("ab", 0.5), "xab": (END, 0.9)}, 8)[0] == ["a", "b"]


def test_no_token_is_beyond_the_targets_logits() -> None:
    """A draft ends before a token that the target's logits do not have, and at text that its tokenizer can't encode."""
    assert drafted(CHAIN, 8, n_vocab=TARGET.pieces.index("de"))[0] == ["a", "bc"]
    assert drafted({"x": ("é", 0.5), "xé": (END, 0.9)}, 8)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_plain_decodings(tmp_path: Path, name: str) -> None:
    """With bytes that are mostly no text, greedy and sampled, through draft models that are right and wrong."""
    path = tiny(tmp_path, 1)
    plain = generate(path, None, **SETTINGS[name])
    for seed in (1, 2):
        with loaded(tiny(tmp_path, seed)) as model:
            found = generate(path, UniversalDraftModel(model), **SETTINGS[name])
        assert found.token_ids == plain.token_ids


@pytest.mark.slow
def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    """Every check of a drafter."""
    path = tiny(tmp_path, 1)
    with loaded(path) as model:
        results = check_drafter(UniversalDraftModel(model), lambda: loaded(path), n_tokens=16)
    assert [(result.name, result.detail) for result in results if result.status != "passed"] == []


@pytest.mark.slow
def test_a_tokenizer_that_does_not_spell_is_refused(tmp_path: Path) -> None:
    """Drafting through the text takes two tokenizers that make tokens of a text and the text of the tokens."""
    odd = Spelled(["a"])
    options = LoadOptions(n_ctx=64)
    path = tiny(tmp_path, 1)
    with loaded(path) as target:
        assert same_tokenizer(target, target)
        assert not same_tokenizer(target, odd.model({}))
        assert isinstance(open_draft_model(path, target, options), DraftModel)
    target_of_odd = odd.model({})
    target_of_odd.card.name = "odd"  # type: ignore[misc]  # a stand-in's card
    odd.encode = lambda text, **_: []  # type: ignore[method-assign]  # a tokenizer that encodes nothing
    with pytest.raises(UnsupportedModelError, match="the tokenizer of 'odd' does not encode a text"):
        open_draft_model(path, target_of_odd, options)


@pytest.mark.slow
@pytest.mark.model
def test_a_real_draft_model_of_another_family() -> None:
    """smollm2-135m drafts for qwen2.5-coder-0.5b: the same text, greedy and sampled, and most of the draft is right."""
    draft, path = map(real_model, REAL)
    prompt = 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number, für n ≥ 0 (费波那契)."""\n'
    options: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.6, "seed": 1}]
    texts = []
    for drafts in (None, draft):
        name = None if drafts is None else "model"
        with edgedec.load(path, runtime="cpu", n_ctx=256, draft=name, draft_model=drafts, n_draft_max=7) as engine:
            found = [engine.generate(prompt, max_tokens=24, ignore_end=True, **option) for option in options]
        texts.append([generation.token_ids for generation in found])
    assert texts[0] == texts[1]
    assert found[0].stats.reasons == []
    assert found[0].stats.mean_accepted > 1

"""Which tokens a head drafts that reads its target's output matrix."""

from pathlib import Path

import numpy as np
import pytest
from support.models.gguf_writer import write_gguf

from edgedec.gguf.file import read_gguf
from edgedec_runtimes.trained_heads import nextn
from edgedec_runtimes.trained_heads.nextn import n_listed, script_of

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

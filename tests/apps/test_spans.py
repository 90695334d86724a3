"""The spans of a passage: where they begin and end, as tokens that a model would write."""

import re
from typing import Any

import pytest

from edgedec_apps.span_search import starts_of


class Words:
    """A tokenizer of words with the space before them, and of single bytes beyond ASCII."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def encode(self, text: str, *, add_special: bool, most: int | None = None) -> list[int]:
        found = re.findall(rb" ?[a-z]+|[\x80-\xff]|.", text.encode(), re.DOTALL)
        self.pieces += [piece for piece in dict.fromkeys(found) if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in found]

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


@pytest.mark.parametrize(
    ("passage", "lead", "expected"),
    [
        ("a big dog", "", {0: ([b"a", b" big"], [1, 5]), 2: ([b"big", b" dog"], [5, 9]), 6: ([b"dog"], [9])}),
        ("a big", " ", {0: ([b" a", b" big"], [1, 5]), 2: ([b" big"], [5])}),
        ("a\u00e9 b", "", {0: ([b"a", b"\xc3"], [1, -1]), 1: ([b"\xc3", b"\xa9"], [-1, 3]), 4: ([b"b"], [5])}),
    ],
)
def test_spans_begin_behind_white_space_and_end_between_characters(
    passage: str, lead: str, expected: dict[int, tuple[list[bytes], list[int]]]
) -> None:
    """Of at most two tokens, with the tokens that the passage has from there on."""
    tokenizer: Any = Words()
    found = starts_of(tokenizer, passage, lead, 2)
    spelled = {start.at: ([tokenizer.piece(i) for i in start.token_ids], list(start.ends)) for start in found}
    assert spelled == expected

"""Where the strings of an array are, found many at once: what one step after another finds."""

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgedec.gguf.values import STRING_BLOCK_BYTES, string_offsets

pytestmark = pytest.mark.slow


def one_by_one(buffer: bytes, start: int, n: int) -> list[int]:
    """Return what string_offsets does, by its definition."""
    offsets = [start]
    for _ in range(n):
        head = buffer[offsets[-1] : offsets[-1] + 8]
        end = offsets[-1] + 8 + int.from_bytes(head, "little")
        if len(head) < 8 or end > len(buffer):
            break
        offsets.append(end)
    return offsets


def packed(strings: list[bytes]) -> bytes:
    """Return strings as a GGUF has them."""
    return b"".join(struct.pack("<Q", len(string)) + string for string in strings)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.text().map(str.encode), st.integers(0, 300).map(bytes)), max_size=60),
    st.binary(max_size=9),
    st.integers(0, 400),
    st.integers(-2, 2),
)
@example([b"a", b"", b"\0", b"b" * 255, b"c" * 256, b"d"], b"", 0, 0)
@example([b"\0" * 8] * 40, b"\0", 3, 1)
def test_offsets_are_those_of_single_steps(strings: list[bytes], before: bytes, cut: int, more: int) -> None:
    """Empty, long and zero-filled strings, a start in the middle, a cut buffer and a wrong count change nothing."""
    whole = before + packed(strings)
    for buffer in (whole, whole[: max(len(before), len(whole) - cut)]):
        n = max(0, len(strings) + more)
        assert string_offsets(buffer, len(before), n).tolist() == one_by_one(buffer, len(before), n)


def test_more_strings_than_a_block_holds() -> None:
    """Blocks and steps join without a gap, in ordinary vocabularies and in ones made to defeat the search."""
    n = 3 * STRING_BLOCK_BYTES // 16
    for strings in ([b"token"] * n, [b"\0" * 8] * n, [b"x", b"\0\0", b"y" * 600] * (n // 3), [b""] * n):
        buffer = packed(strings)
        assert string_offsets(buffer, 0, len(strings)).tolist() == one_by_one(buffer, 0, len(strings))


def test_a_length_beyond_all_bounds_ends_the_search() -> None:
    """2^64 - 1 does not wrap around."""
    buffer = packed([b"ab"]) + b"\xff" * 8 + bytes(100)
    assert string_offsets(buffer, 0, 5).tolist() == [0, 10]
    assert string_offsets(buffer, len(buffer) + 7, 5).tolist() == [len(buffer) + 7]

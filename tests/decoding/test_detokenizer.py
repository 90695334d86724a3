"""Stop strings: where they end a text, however it comes in pieces, and how many there may be."""

import random

import pytest

from edgedec.decoding.ending import TextStream
from edgedec.errors import RequestError
from edgedec.sampling import MAX_STOP_CHARS, MAX_STOPS, SamplingParams


def ended(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return what a text is cut to, and by which string: the longest of those that are complete first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_text_ends_at_the_first_stop_string_however_it_is_cut() -> None:
    """2,000 texts of few letters, with stop strings that overlap, hold each other and begin alike."""
    rng = random.Random(1)
    for _ in range(2000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))]
        text = "".join(rng.choices("aabé", k=rng.randint(0, 14)))
        stream, data, pieces = TextStream(stops), text.encode(), []
        while data:
            n = rng.randint(1, 4)
            pieces.append(stream.feed(data[:n]))
            data = data[n:]
        pieces.append(stream.finish())
        assert ("".join(pieces), stream.stopped) == ended(text, stops)


def test_text_is_held_back_no_longer_than_it_may_become_a_stop_string() -> None:
    """What can't be the beginning of one any more is given out at once."""
    stream = TextStream(["aab", "bcd"])
    assert [stream.feed(character.encode()) for character in "aaabbcx"] == ["", "", "a", "", "", "", ""]
    assert stream.stopped == "aab"
    stream = TextStream(["aab", "bcd"])
    assert [stream.feed(character.encode()) for character in "aacbcd"] == ["", "", "aac", "", "", ""]
    assert (stream.stopped, stream.finish()) == ("bcd", "")


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (("x",) * (MAX_STOPS + 1), "stop holds 1,001 strings; it may hold at most 1,000"),
        (("x" * MAX_STOP_CHARS, "y"), "stop holds 16,385 characters; its strings may have 16,384 together"),
    ],
)
def test_stop_strings_have_a_bound(stop: tuple[str, ...], words: str) -> None:
    """A refusal says what was given and what is allowed; the bound itself is allowed."""
    with pytest.raises(RequestError, match=words):
        SamplingParams(stop=stop)
    assert SamplingParams(stop=tuple(string for string in stop if string != "y")[:MAX_STOPS]).stop


def test_a_refusal_is_short() -> None:
    """A list of many values of a wrong kind is not printed whole."""
    with pytest.raises(RequestError) as refused:
        SamplingParams(stop=("x" * 1000, ""))
    assert len(str(refused.value)) < 300
    with pytest.raises(RequestError) as refused:
        SamplingParams(logit_bias=[1] * 10_000)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 300

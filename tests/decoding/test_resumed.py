"""A text that was interrupted goes on to the end that it would have had."""

from typing import Any

import pytest

import edgedec
from edgedec.errors import RequestError

pytestmark = pytest.mark.slow

PROMPT = "a rose is a rose is"
GREEDY: Any = {"temperature": 0.0, "max_tokens": 24, "ignore_end": True}
SAMPLED: Any = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "repetition_penalty": 1.2, "ignore_end": True}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_resumed_text_is_the_whole_text(tiny: edgedec.Engine, options: Any) -> None:
    """Wherever it was cut, it goes on with the same tokens; a stream begins with those that were there."""
    whole = tiny.generate(PROMPT, **options)
    expected = (whole.token_ids, whole.text, whole.finish_reason)
    for n in (1, 11, 23, 24):
        resumed = tiny.generate(PROMPT, resume=whole.token_ids[:n], **options)
        assert (resumed.token_ids, resumed.text, resumed.finish_reason) == expected
    stream = tiny.stream(PROMPT, resume=whole.token_ids[:5], **options)
    assert tuple(output.token_id for output in stream) == whole.token_ids


def test_a_stop_string_may_lie_across_the_cut(tiny: edgedec.Engine) -> None:
    """The text so far counts for what ends a text."""
    whole = tiny.generate(PROMPT, **SAMPLED)
    stop = whole.text[len(whole.text) // 2 : len(whole.text) // 2 + 3]
    ended = tiny.generate(PROMPT, stop=(stop,), **SAMPLED)
    n = len(ended.token_ids)
    resumed = tiny.generate(PROMPT, stop=(stop,), resume=ended.token_ids[: n - 1], **SAMPLED)
    assert (resumed.text, resumed.stop_string, resumed.finish_reason) == (ended.text, stop, "stop")


def test_what_can_not_be_resumed_is_refused(tiny: edgedec.Engine) -> None:
    """Ids outside of the vocabulary, more tokens than the context has, and several texts."""
    for ids, message in (((10**6,), "outside the vocabulary"), ((5,) * 300, "to resume are over the context of 256")):
        with pytest.raises(RequestError, match=message):
            tiny.generate(PROMPT, resume=ids)
    with pytest.raises(RequestError, match="resume"):
        tiny.samples(PROMPT, 2, resume=(5,))

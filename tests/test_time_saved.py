"""What drafts saved: by the cost curve, from the first step on, and never more than tokens over steps."""

import pytest

from edgedec.stats import DecodeStats

Step = tuple[int, float, float]
"""Tokens of a step, seconds of a plain step, seconds of the step."""


def of_steps(*steps: Step) -> DecodeStats:
    """Return the statistics of a text with these steps."""
    stats = DecodeStats(first_token_s=2.0, total_s=2.5, n_generated_tokens=1)
    for n_tokens, plain_s, step_s in steps:
        stats.n_steps += 1
        stats.n_generated_tokens += n_tokens
        if n_tokens > 1:
            stats.count_draft(n_tokens, n_tokens - 1)
        stats.count_saved(n_tokens, plain_s, step_s)
    return stats


@pytest.mark.parametrize(
    ("steps", "saved_s", "speedup"),
    [
        ([(1, 1.0, 1.0)] * 3 + [(3, 1.0, 1.5)], 1.5, 6 / 4.5),
        ([(5, 1.0, 1.25)], 3.75, 4.0),  # not one plain step in the text
        ([(5, 1.0, 1.25), (1, 2.0, 2.0), (4, 2.0, 2.5)], 9.25, 15 / 5.75),  # a longer context
        ([(1, 1.0, 1.25)] * 5, -1.25, 0.8),  # guesses that were all wrong
        ([(1, 1.0, 1.0)] * 9, 0.0, 1.0),
    ],
)
def test_steps_are_compared_with_plain_ones(steps: list[Step], saved_s: float, speedup: float) -> None:
    """As many plain steps as the steps gave tokens, each of what a plain step took in a context of that length."""
    stats = of_steps(*steps)
    assert stats.saved_s == pytest.approx(saved_s)
    assert stats.speedup == pytest.approx(speedup)
    assert stats.as_dict()["speedup"] == stats.speedup


@pytest.mark.parametrize(
    "steps",
    [
        [(5, 1.0, 0.25)] * 3,  # a step that took less than a plain one, as the machine had become faster
        [(5, 1.0, 0.25)] * 100 + [(1, 9.0, 9.0)],
        [(1, 1.0, 0.5)] * 4,
        [(9, 4.0, 4.0), (1, 0.5, 0.5)],  # steps that gave much while the machine was slow
    ],
)
def test_no_text_is_faster_than_tokens_over_steps(steps: list[Step]) -> None:
    """Whatever the clock said, as a forward of more rows is no faster than a plain one."""
    stats = of_steps(*steps)
    assert stats.speedup is not None
    assert 0 < stats.speedup <= sum(n for n, *_ in steps) / len(steps)
    assert stats.saved_s is not None
    assert stats.saved_s <= sum((n_tokens - 1) * plain_s for n_tokens, plain_s, _ in steps)


def test_nothing_is_known_without_a_step() -> None:
    """A text of one token, one without drafters, a search, and one that was cancelled before its first token."""
    assert of_steps().speedup is None
    assert DecodeStats(total_s=3.0, n_steps=7, n_generated_tokens=8).speedup is None
    assert DecodeStats(saved_s=-0.25).speedup is None

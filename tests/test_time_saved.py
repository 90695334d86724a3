"""What drafts saved: by the plain steps of the same text, by the length of context, and only where these are known."""

from edgedec.stats import DecodeStats, TimeSaved


def test_steps_with_drafts_are_compared_with_the_plain_steps_of_the_text() -> None:
    """Six tokens in three plain steps of 1 s and one draft of 1.5 s take 4.5 s instead of 6."""
    saved = TimeSaved()
    for _ in range(3):
        saved.count(10, 1, 1.0, 1.0)
    saved.count(13, 3, 1.5, None)
    assert saved.seconds() == 1.5
    stats = DecodeStats(first_token_s=2.0, total_s=6.5, saved_s=saved.seconds())
    assert stats.speedup == 6 / 4.5
    assert stats.as_dict()["speedup"] == stats.speedup


def test_plain_steps_count_in_their_own_length_of_context() -> None:
    """A plain step of 2 s in a long context says nothing of the steps in a short one."""
    saved = TimeSaved()
    for n_past, seconds in ((0, 1.0), (4000, 2.0)):
        for _ in range(3):
            saved.count(n_past, 1, seconds, seconds)
        saved.count(n_past, 3, seconds, None)
    assert saved.seconds() == (2 * 1.0) + (2 * 2.0)


def test_nothing_is_known_without_plain_steps() -> None:
    """Fewer than three plain steps tell nothing, nor do those of another length of context."""
    saved = TimeSaved()
    assert saved.seconds() is None
    for _ in range(2):
        saved.count(0, 1, 1.0, 1.0)
    saved.count(2, 5, 1.0, None)
    assert saved.seconds() is None
    assert DecodeStats(total_s=3.0).speedup is None
    saved.count(7, 1, 1.0, 1.0)
    assert saved.seconds() == 8 - 4
    saved.count(5000, 5, 1.0, None)
    assert saved.seconds() is None


def test_what_drafting_cost_is_told_too() -> None:
    """Drafts that were rejected make the text slower, and the speed is below 1."""
    saved = TimeSaved()
    for _ in range(5):
        saved.count(0, 1, 1.25, 1.0)
    assert saved.seconds() == -1.25
    assert DecodeStats(total_s=6.25, saved_s=-1.25).speedup == 0.8

"""When a draft head accepts so little that it rests."""

from edgedec_runtimes.cpu.draft_head.state import accepts_too_little
from edgedec_runtimes.trained_heads.card import HeadCard, Promise


def _card(reach: tuple[float, ...] | None) -> HeadCard:
    promise = None if reach is None else Promise(reach)
    return HeadCard("h", 8, 8, 8, 1, 1, 8, 1e-6, 1e4, (1,), 4, 4, promise=promise)


def test_a_head_is_judged_after_200_drafts() -> None:
    """It rests when it accepts less than a quarter of what its card promises at the depths that were drafted."""
    card = _card((0.6, 0.4, 0.2))
    assert accepts_too_little(card, [], []) is None
    assert accepts_too_little(card, [199], [0]) is None
    assert accepts_too_little(card, [200], [30]) is None
    assert "29 of its 200 tokens" in (accepts_too_little(card, [200], [29]) or "")
    assert accepts_too_little(card, [200, 100, 50], [30, 10, 3]) is None
    assert "promises 170" in (accepts_too_little(card, [200, 100, 50], [30, 10, 2]) or "")
    assert accepts_too_little(card, [200, 100, 50, 50], [30, 10, 3, 0]) is None, "depth 4 was promised nothing"


def test_a_head_without_a_promise_is_judged_by_what_sound_heads_accept() -> None:
    """Wrong taps accept 4 % of first tokens; the weakest public head that was trained as meant accepts 34 %."""
    assert accepts_too_little(_card(None), [1000], [340]) is None
    assert "a sound head has about 300" in (accepts_too_little(_card(None), [1000], [40]) or "")

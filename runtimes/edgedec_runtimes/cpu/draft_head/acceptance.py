"""Tell when a head accepts far less than its card promises: wrong taps, another model, or text of an unknown kind."""

from collections.abc import Sequence

from edgedec_runtimes.trained_heads.card import HeadCard

N_DRAFTS = 200
"""Drafts after which a head is judged."""
SHARE = 0.25
"""The least part of what its card promises that a head must accept.

A sound head can accept a third of it on texts of a kind that it never saw: the one that is shipped did on summaries of
long articles. With wrong taps it is a hundredth to a tenth.
"""
UNKNOWN_REACH = (0.3,)
"""What a head without a promise is held to. Of public heads, the first drafted token of the weakest that was trained as
meant is accepted in 0.34 of cases (speculators' example with 5,000 conversations), and in 0.04 with wrong taps (vllm,
pull request 50170)."""


def accepts_too_little(card: HeadCard, n_drafted: Sequence[int], n_accepted: Sequence[int]) -> str | None:
    """Return a sentence on a head that accepts under a quarter of what its card promises; None while it does not.

    Args:
        card: The head's card.
        n_drafted: Drafts that were verified with at least one, two, three, ... tokens of the head.
        n_accepted: How many of these drafts were accepted up to their first, second, third, ... token.

    >>> from edgedec_runtimes.trained_heads.card import Promise
    >>> card = HeadCard("h", 8, 8, 8, 1, 1, 8, 1e-6, 1e4, (1,), 4, 4, promise=Promise((0.5, 0.2)))
    >>> accepts_too_little(card, [199, 100], [0, 0]), accepts_too_little(card, [200, 100], [25, 5])
    (None, None)
    >>> print(accepts_too_little(card, [200, 100], [24, 5]))
    the draft head h rests: 29 of its 300 tokens in 200 steps were accepted, where its card promises 120
    """
    if not n_drafted or n_drafted[0] < N_DRAFTS:
        return None
    reach = UNKNOWN_REACH if card.promise is None else card.promise.reach
    depth = min(len(reach), len(n_drafted), len(n_accepted))
    expected = sum(n * p for n, p in zip(n_drafted[:depth], reach, strict=False))
    accepted, drafted = sum(n_accepted[:depth]), sum(n_drafted[:depth])
    if accepted >= SHARE * expected:
        return None
    said = "its card promises" if card.promise is not None else "a sound head has about"
    return (
        f"the draft head {card.name} rests: {accepted} of its {drafted} tokens in {n_drafted[0]} steps were accepted, "
        f"where {said} {round(expected)}"
    )

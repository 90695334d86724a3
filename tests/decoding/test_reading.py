"""What of a KV cache a prompt may go on from, and what is known of it afterwards."""

from typing import Any

import pytest

from edgedec.decoding.reading import remember_cached, reuse_prefix
from edgedec.decoding.session_pool import SessionSlot
from edgedec.model_card import Capabilities
from edgedec.sampling import SamplingParams
from edgedec.sequence import Request, TextState

HELD = tuple(range(10))


def slot_of(n_held: int, n_exact: int, *, chunk: int = 1, rollback: bool = True) -> SessionSlot:
    """Return a slot whose session holds tokens of HELD."""

    class Held:
        n_cached = n_held

        class model:
            capabilities = Capabilities(prefill_chunk=chunk, rollback=rollback)

    session: Any = Held()
    return SessionSlot(session, list(HELD[:n_held]), n_exact)


def text_of(prompt: tuple[int, ...], reuse: Any = "exact") -> TextState:
    """Return a text that begins with its prompt."""
    return TextState(Request(prompt, SamplingParams(), 1, reuse), list(prompt))


@pytest.mark.parametrize(
    ("prompt", "reuse", "n_exact", "chunk", "expected"),
    [
        ((*HELD, 80, 81), "longest", 7, 4, (10, 7)),
        ((*HELD, 80, 81), "exact", 7, 4, (4, 4)),
        ((*HELD, 80, 81), "exact", 7, 1, (7, 7)),
        (HELD, "longest", 10, 1, (9, 9)),
        ((*HELD[:5], 80, 81), "longest", 10, 1, (5, 5)),
        ((*HELD[:5], 80, 81), "exact", 10, 4, (4, 4)),
        ((80, *HELD), "longest", 10, 1, (0, 0)),
    ],
)
def test_a_prompt_goes_on_from_what_it_shares(
    prompt: tuple[int, ...], reuse: str, n_exact: int, chunk: int, expected: tuple[int, int]
) -> None:
    """All but its last token; "exact" only what a cold start would have read in the same pieces to the same bits."""
    slot, text = slot_of(10, n_exact, chunk=chunk), text_of(prompt, reuse)
    reuse_prefix(slot, text)
    assert (text.n_cached, slot.n_exact) == expected
    assert (text.stats.n_reused_tokens, slot.cached_ids) == (expected[0], list(prompt[: expected[0]]))


@pytest.mark.parametrize(("prompt", "n_reused"), [((*HELD, 80), 10), ((*HELD[:9], 80, 81), 0)])
def test_a_session_that_can_not_go_back_is_gone_on_from_whole(prompt: tuple[int, ...], n_reused: int) -> None:
    """Or not at all."""
    slot, text = slot_of(10, 10, rollback=False), text_of(prompt)
    reuse_prefix(slot, text)
    assert text.n_cached == n_reused


@pytest.mark.parametrize(
    ("n_reused", "n_exact", "chunk", "expected"),
    [(0, 0, 4, 8), (4, 4, 4, 8), (0, 0, 1, 13), (6, 4, 4, 4), (2, 4, 4, 2)],
)
def test_exact_is_what_was_read_from_an_exact_place_on(n_reused: int, n_exact: int, chunk: int, expected: int) -> None:
    """Of a prompt of 10 tokens its whole pieces; where rows do not depend on the pieces, what was written, too."""
    slot, text = slot_of(10, n_exact, chunk=chunk), text_of(HELD)
    text.token_ids += [80, 81, 82, 83]
    text.n_cached, text.stats.n_reused_tokens = 13, n_reused
    remember_cached(slot, text)
    assert (slot.cached_ids, slot.n_exact) == ([*HELD, 80, 81, 82], expected)

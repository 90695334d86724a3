"""One draft store for all sessions of a model: requests at the same time learn from each other, and nothing is lost."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import edgedec

TEXT = "abcabcabcabc"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_end": True}


def test_a_session_drafts_from_what_another_one_wrote(tiny_path: Path) -> None:
    """While a stream holds the first session, a request on the second drafts the text that the first has written."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, n_parallel=2, draft="suffix") as engine:
        paused = engine.stream("x" + TEXT, **GREEDY)
        for _ in range(35):
            next(paused)
        store = engine.pool.slots[0].drafting.store["suffix"]  # type: ignore[union-attr]
        found = engine.generate("x" + TEXT, **GREEDY)
        assert all(slot.drafting is engine.pool.slots[0].drafting for slot in engine.pool.slots)
        assert len(store.outputs) == 2
        for _ in paused:
            pass
        assert paused.generation.token_ids == found.token_ids
        assert [list(output) for output in store.outputs] == [list(found.token_ids)] * 2


@pytest.mark.slow
def test_texts_in_threads_have_their_texts_and_no_drafter_fails(tiny_path: Path) -> None:
    """Four threads draft from the same store and tables: each text is the plain one, and no drafter is dropped."""
    prompts = [f"{TEXT}{i % 5}" for i in range(24)]
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=None) as engine:
        expected = [engine.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    drafts = "suffix+recycling+trigram+stand"
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, n_parallel=4, draft=drafts) as engine:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda prompt: engine.generate(prompt, **GREEDY), prompts))
        together = engine.samples(TEXT, 4, **GREEDY)
    assert [text.token_ids for text in found] == expected
    for text in (*found, *together):
        assert text.stats.n_drafts > 0
        assert not any(counts["failed"] for counts in text.stats.drafters.values())


def test_texts_of_one_prompt_draft_from_each_other(tiny_path: Path) -> None:
    """In `samples`, a text that comes later in a step finds what an earlier one got: the same token, greedily."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft="suffix") as engine:
        texts = engine.samples("x" + TEXT, 3, **GREEDY)
        store = engine.pool.slots[0].drafting.store["suffix"]  # type: ignore[union-attr]
    assert len({text.token_ids for text in texts}) == 1
    assert [list(output) for output in store.outputs] == [list(text.token_ids) for text in texts]

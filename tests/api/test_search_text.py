"""Every search by its name, on the tiny model: cancelled, without room, at the end of the context, without forks."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.api.best_text import BestOf, best
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import CancelledError, CapabilityError, MemoryCapError
from edgedec.plugins import SEARCHES, load_plugin, plugins
from edgedec.progress import Progress

pytestmark = pytest.mark.slow

PROMPT = "abcabcabcabcabcabc, and so on: abc"
SEED: dict[str, Any] = {"seed": 7, "ignore_end": True}
METHODS = {name: load_plugin(SEARCHES, name) for name in plugins(SEARCHES)}


@pytest.fixture(scope="module")
def engine(tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model on the cpu runtime."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=96, draft=None) as engine:
        yield engine


def rarely_long(prefix: str, steps: Sequence[str], /) -> list[float]:
    """Score texts by what they say, never with 1."""
    return [0.5 + (sum(step.encode()) % 97) / 200 for step in steps]


def search(name: str, n: int = 4) -> SearchBy:
    """Return a search of a small size, with a scorer where it takes one."""
    return SearchBy(name, n, None if METHODS[name].scored == "no" else rarely_long)


@pytest.mark.parametrize("name", METHODS)
def test_a_search_that_ends_early_leaves_nothing(engine: edgedec.Engine, name: str) -> None:
    """Cancelled after some tokens, or without memory for its texts: a clear error, and no branch is left."""
    plain = engine.generate(PROMPT, max_tokens=8, **SEED).token_ids
    cancel = edgedec.CancelToken()

    def after_some(progress: Progress) -> None:
        if progress.phase == "searching" and progress.done > 9:
            cancel.cancel()

    with pytest.raises(CancelledError):
        best(engine, PROMPT, search(name), cancel=cancel, on_progress=after_some, **SEED)
    assert engine.generate(PROMPT, max_tokens=8, **SEED).token_ids == plain
    slot = engine.pool.slots[0]
    kept, slot.fork_tokens = slot.fork_tokens, 64
    try:
        with pytest.raises(MemoryCapError):
            best(engine, PROMPT, search(name, 8), **SEED)
    finally:
        slot.fork_tokens = kept
    assert engine.generate(PROMPT, max_tokens=8, **SEED).token_ids == plain


@pytest.mark.parametrize("name", METHODS)
def test_the_context_ends_a_search_as_any_text(engine: edgedec.Engine, name: str) -> None:
    """Texts end where the context is full; twice the same search is the same text."""
    first, again = (best(engine, PROMPT, search(name), **SEED) for _ in range(2))
    assert first.generation.finish_reason == "length"
    alone = engine.generate(PROMPT, **SEED)
    assert len(first.generation.token_ids) == len(alone.token_ids)
    assert [text.token_ids for text in first.texts] == [text.token_ids for text in again.texts]
    assert (first.place, first.scores, first.why) == (again.place, again.scores, again.why)


@pytest.mark.parametrize("name", METHODS)
def test_a_search_of_its_greatest_size_has_room(engine: edgedec.Engine, name: str) -> None:
    """No search within its bounds asks for more branches than there may be."""
    found = best(engine, PROMPT, search(name, METHODS[name].most), max_tokens=5, **SEED)
    assert len(found.generation.token_ids) == 5


def test_where_rows_depend_on_each_other_a_search_is_refused(tiny_path: Path) -> None:
    """The error says what can't be done and where it can; the same for a judgement, before any text is written."""
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=96, draft=None) as engine:
        for how in (SearchBy(), BestOf(2, "judge")):
            with pytest.raises(CapabilityError, match="choose another runtime"):
                best(engine, PROMPT, how, on_progress=lambda progress: pytest.fail("it reads"))

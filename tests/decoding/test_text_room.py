"""Several texts under a memory plan: those that are begun are written to their ends, whatever is drafted for them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgedec
from edgedec.api.best_text import best
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import ContextFullError, MemoryCapError
from edgedec.model import Forward, ForwardItem, RowGroup
from edgedec.progress import OnProgress
from edgedec.sessions.forks import SessionForks
from edgedec.sessions.outer_session import OuterSession

pytestmark = pytest.mark.slow

PROMPT = "abcabcabcabcabcabc, and so on: abc"
N_CTX = 129
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": None},
    "drafts": {"draft": "suffix"},
    "trees": {"draft": "recycling"},
    "two requests": {"draft": "suffix", "n_parallel": 2},
}
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_end": True}


@pytest.fixture(scope="module", params=WAYS)
def capped(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model under a plan for one text of a context that is no whole number of pages."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=N_CTX, memory="2GB", **WAYS[request.param]) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model without a plan and without drafts."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=N_CTX, draft=None) as engine:
        yield engine


def alone(plain: edgedec.Engine, k: int, **options: Any) -> tuple[tuple[int, ...], str]:
    """Return the tokens of text `k` as it is alone, and why it ends."""
    text = plain.generate(PROMPT, **{**OPTIONS, **options, "seed": OPTIONS["seed"] + k})
    return text.token_ids, text.finish_reason


@pytest.fixture(scope="module")
def eight(plain: edgedec.Engine) -> list[tuple[tuple[int, ...], str]]:
    """The first eight texts, each alone."""
    return [alone(plain, k) for k in range(8)]


@pytest.mark.parametrize("way", WAYS)
def test_planned_texts_fill_the_context(tiny_path: Path, eight: list[tuple[tuple[int, ...], str]], way: str) -> None:
    """Eight texts that were planned are those of their seeds alone, up to a context that is no number of pages."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=N_CTX, n_texts=8, memory="2GB", **WAYS[way]) as engine:
        for _ in range(2):
            found = engine.samples(PROMPT, 8, **OPTIONS)
            assert [(text.token_ids, text.finish_reason) for text in found] == eight


def test_more_texts_than_planned_are_refused_before_they_begin(capped: edgedec.Engine, plain: edgedec.Engine) -> None:
    """A refusal names the texts and lengths that there is room for; these are written whole, with drafts or without."""
    before = capped.generate(PROMPT, max_tokens=90, **OPTIONS).token_ids
    with pytest.raises(MemoryCapError) as refused:
        capped.samples_stream(PROMPT, 3, **OPTIONS)
    told = re.search(
        r"room for 1: ask for 1, 3 of at most (\d+) tokens \(max_tokens\), or .* \(n_texts\)", str(refused.value)
    )
    assert told is not None, str(refused.value)
    most = int(told[1])
    with pytest.raises(MemoryCapError, match=rf"3 texts of up to {most + 1} tokens each"):
        capped.samples(PROMPT, 3, max_tokens=most + 1, **OPTIONS)
    assert capped.generate(PROMPT, max_tokens=90, **OPTIONS).token_ids == before
    for n, max_tokens in ((3, most), (1, None)):
        found = capped.samples(PROMPT, n, max_tokens=max_tokens, **OPTIONS)
        expected = [alone(plain, k, max_tokens=max_tokens) for k in range(n)]
        assert [(text.token_ids, text.finish_reason) for text in found] == expected


def test_a_fork_in_mid_text_has_room_to_its_end(capped: edgedec.Engine) -> None:
    """Texts are forked while all can have their greatest length; else none is, and those that are there go on."""
    stream = capped.samples_stream(PROMPT, 1, max_tokens=29, **OPTIONS)  # 34 tokens of prompt and 29 fill one page
    next(stream)
    assert stream.fork(0, 1) == [1]
    with pytest.raises(MemoryCapError, match=r"2 more texts beside 2 take room for 256 tokens .* has room for 192"):
        stream.fork(0, 2)
    assert stream.fork(1) == [2]
    list(stream)
    assert [len(text.token_ids) for text in stream.generations] == [29, 29, 29]


def test_forwards_return_no_more_rows_than_planned(
    capped: edgedec.Engine, plain: edgedec.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts whose rows are over those that are planned take several forwards, and stay what they are."""
    asked: list[int] = []
    evaluate = SessionForks.forward

    def counted(forks: SessionForks, items: Sequence[ForwardItem]) -> list[Forward]:
        asked.append(sum(len(item.logit_rows) for item in items))
        return evaluate(forks, items)

    monkeypatch.setattr(SessionForks, "forward", counted)
    slots = capped.pool.slots
    planned = slots[0].text_rows
    assert planned is not None
    assert planned >= 16
    for slot in slots:
        slot.text_rows, slot.forward_rows = 3, 3
    try:
        found = capped.samples(PROMPT, 3, max_tokens=20, **OPTIONS)
        texts = [alone(plain, k, max_tokens=20)[0] for k in range(3)]
        assert [text.token_ids for text in found] == texts
        assert max(asked) == 3
    finally:
        for slot in slots:
            slot.text_rows = slot.forward_rows = planned


def test_forks_have_their_logits_in_the_planned_rows(plain: edgedec.Engine) -> None:
    """A forward of forks returns its logits in the model's own rows; one of other sessions returns arrays beside."""
    tokens = np.array(plain.prompt_ids(PROMPT)[:4], np.int32)
    sessions = [plain.session(64) for _ in range(2)]
    for session in sessions:
        session.forward(tokens, n_past=0)
    forks = [sessions[0].fork() for _ in range(3)]
    items = [ForwardItem(fork, 4, (RowGroup(tokens[:1]),)) for fork in forks]
    assert not any(forward.is_own for forward in forks[0].model.forward(items))
    assert all(
        forward.is_own
        for forward in plain.model.forward([items[0], ForwardItem(sessions[1], 4, (RowGroup(tokens[:1]),))])
    )
    for each in (*forks, *sessions):
        each.close()


def test_a_search_has_room_for_its_texts_or_does_not_begin(tiny_path: Path, plain: edgedec.Engine) -> None:
    """A search that was planned finds what it finds without a plan; one that was not is refused by its texts."""
    options: dict[str, Any] = {"temperature": 0.0, "seed": 7, "ignore_end": True}
    expected = best(plain, PROMPT, SearchBy("beam", 4), **options).texts
    for n_texts in (8, 7):
        with edgedec.load(tiny_path, runtime="cpu", n_ctx=N_CTX, n_texts=n_texts, draft=None, memory="2GB") as engine:
            if n_texts == 8:
                found = best(engine, PROMPT, SearchBy("beam", 4), **options).texts
                assert [text.token_ids for text in found] == [text.token_ids for text in expected]
                continue
            with pytest.raises(MemoryCapError, match=r"8 texts of up to 94 tokens each .* room for 7: ask for 7"):
                best(engine, PROMPT, SearchBy("beam", 4), **options)
            short = {**options, "max_tokens": 29}
            engine.pool.slots[0].fork_tokens = 10 * 64  # for the prompt's page and nine of texts
            assert len(best(engine, PROMPT, SearchBy("beam", 4), **short).texts) == 4
            # A larger vocabulary: the two rows that are not planned are over a page.
            engine.pool.slots[0].row_tokens = 40.0
            with pytest.raises(MemoryCapError, match="8 texts of up to 29 tokens"):
                best(engine, PROMPT, SearchBy("beam", 4), **short)


class _Pool(OuterSession):
    """A session on a KV pool of which other sessions have taken cells: a forward past them is refused."""

    n_cells = 0

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        if item.n_past + item.n_rows > self.n_cells:
            raise ContextFullError("no cells are free")
        return super().evaluate(item, on_progress)


@pytest.mark.parametrize("draft", [None, "suffix", "recycling"])
def test_a_full_pool_ends_a_text_where_it_ends_without_drafts(tiny_path: Path, draft: str | None) -> None:
    """A forward whose draft finds no cells is made without it; the text ends where a single token finds none."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=draft) as engine:
        whole = engine.generate(PROMPT, max_tokens=100, **OPTIONS)
        pool = _Pool(engine.pool.slots[0].session)
        pool.n_cells = len(engine.prompt_ids(PROMPT)) + 59
        engine.pool.slots[0].session = pool
        found = engine.generate(PROMPT, max_tokens=100, **OPTIONS)
        assert found.finish_reason == "length"
        assert "KV cache is full" in " ".join(found.stats.notes)
        assert found.token_ids == whole.token_ids[:60]
        assert (found.stats.n_drafts > 0) == (draft is not None)

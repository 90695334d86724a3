"""Parallel requests whose prompts begin alike: the prefix is read once, and each text is the one that it is alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from support.heads.loaded_blocks import FLOATS, of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import write_tiny

import edgedec
from edgedec.api.options import Lossy
from edgedec.decoding import shared_prefix
from edgedec.decoding.session_pool import SessionSlot
from edgedec.decoding.shared_prefix import SharedPrefixes
from edgedec.drafters.head import HeadFactory
from edgedec.errors import SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec.sequence import Generation
from edgedec.sessions.batching import LONE_PIECE_ROWS, BatchedSession, Batcher
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.shared.library_model import LibraryModel

Files = dict[str, Path]
Texts = list[tuple[int, ...]]
N_SYSTEM, N_TOKENS = 600, 24
_RNG = np.random.default_rng(3)
SYSTEM = tuple(_RNG.integers(4, N_VOCAB, 300).tolist()) * 2
PROMPTS = [(*SYSTEM, 4 + i, *_RNG.integers(4, N_VOCAB, 20 + 7 * i).tolist()) for i in range(3)]
STRANGER = tuple(_RNG.integers(4, N_VOCAB, 90).tolist())
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "off"},
    "drafts": {"draft": "suffix+recycling"},
    "a head": {"draft": "head+suffix"},
    "a block head": {"draft": "head+suffix"},
}
BLOCK = of_floats({"n_layer": 2, "size": 5, "markov": "vanilla", "rank": 6, "shifted": False})


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each item of a forward has from now on."""
    evaluate = LibraryModel.forward_with_progress
    found: list[int] = []

    def counting(
        model: LibraryModel[Any, Any], items: Sequence[ForwardItem], on_progress: OnProgress | None
    ) -> list[Any]:
        found.extend(item.n_rows for item in items if item.groups[0].tokens is not None)
        return evaluate(model, items, on_progress)

    monkeypatch.setattr(LibraryModel, "forward_with_progress", counting)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A tiny model and random heads for it, by the ways that draft with them."""
    folder = tmp_path_factory.mktemp("prefixes")
    write_head(folder / "head", OF_FLOATS)
    write_block(folder / "block", tiny_block(BLOCK))
    heads = {"a head": folder / "head", "a block head": folder / "block"}
    return {"target": write_tiny(folder / "m.gguf", FLOATS), **heads}


def opened(files: Files, way: str = "plain", **options: Any) -> edgedec.Engine:
    chosen: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 3, "n_threads": 1, "draft_head": files.get(way, "off")}
    chosen |= WAYS[way] | options
    return edgedec.load(files["target"], runtime="cpu", **chosen)


def wanted(k: int) -> dict[str, Any]:
    """Return the options of request k: the first is greedy."""
    return {"temperature": 0.9 * (k > 0), "seed": 5 + k, "max_tokens": N_TOKENS, "ignore_end": True}


@pytest.fixture(scope="module")
def alone(files: Files) -> Iterator[Texts]:
    """The texts of the prompts without any other."""
    with opened(files, n_parallel=1) as engine:
        yield [engine.generate(prompt, **wanted(k)).token_ids for k, prompt in enumerate(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_one_that_begins_while_another_writes_takes_its_prefix(
    files: Files, alone: Texts, rows: list[int], way: str
) -> None:
    """Three streams, each begun while those before write: the texts of being alone, the common prefix read once."""
    with opened(files, way) as engine:
        rows.clear()
        streams = [engine.stream(prompt, **wanted(k)) for k, prompt in enumerate(PROMPTS)]
        for i in range(2 * N_TOKENS):
            for k, stream in enumerate(streams):
                if i >= 5 * k:
                    next(stream, None)
        found = [stream.generation for stream in streams]
    assert [text.token_ids for text in found] == alone
    assert [text.stats.n_reused_tokens for text in found] == [0, N_SYSTEM, N_SYSTEM]
    if way == "plain":
        n_prompts = len(PROMPTS[0]) + sum(len(prompt) - N_SYSTEM for prompt in PROMPTS[1:])
        assert sum(rows) == n_prompts + 3 * (N_TOKENS - 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_those_that_come_at_once_wait_for_the_first(files: Files, alone: Texts, rows: list[int], way: str) -> None:
    """Three threads begin together: one reads the prefix, the others wait for it; and again, with full caches."""
    begin = Barrier(3)

    def ask(k: int) -> Generation:
        begin.wait(30)
        return engine.generate(PROMPTS[k], **wanted(k))

    with opened(files, way) as engine, ThreadPoolExecutor(3) as pool:
        for n_first in (0, N_SYSTEM):
            rows.clear()
            found = list(pool.map(ask, range(3)))
            assert [text.token_ids for text in found] == alone
            reused = [text.stats.n_reused_tokens for text in found]
            assert sorted(reused)[0] >= n_first
            assert sorted(reused)[1] >= N_SYSTEM
            if way == "plain":
                assert sum(rows) == sum(map(len, PROMPTS)) - sum(reused) + 3 * (N_TOKENS - 1)


def test_a_reader_that_is_cancelled_leaves_what_it_has_read(files: Files, alone: Texts) -> None:
    """One that waits goes on from there; one that is cancelled while it waits ends at once, and the reader reads on."""
    begun, cancel, waits = Event(), CancelToken(), CancelToken()

    def stop_after_a_piece(progress: Progress) -> None:
        if not progress.done:
            return
        assert progress.done == LONE_PIECE_ROWS
        waiting = pool.submit(engine.generate, PROMPTS[1], cancel=waits, **wanted(1))
        begun.set()
        waits.cancel()
        assert waiting.result(30).finish_reason == "cancelled"
        found.append(pool.submit(engine.generate, PROMPTS[2], **wanted(2)))
        cancel.cancel()

    found: list[Any] = []
    with opened(files) as engine, ThreadPoolExecutor(2) as pool:
        stopped = engine.generate(PROMPTS[0], cancel=cancel, on_progress=stop_after_a_piece, **wanted(0))
        text = found[0].result(60)
        assert (stopped.finish_reason, stopped.token_ids) == ("cancelled", ())
        assert (text.token_ids, text.stats.n_reused_tokens) == (alone[2], LONE_PIECE_ROWS)


def test_a_reader_that_gets_no_further_is_not_waited_for(
    files: Files, alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request from within another one's progress would wait for ever: it takes what was read, and reads the rest."""
    monkeypatch.setattr(shared_prefix, "_MOST_WAIT_S", 0.05)
    inner: list[Generation] = []

    def ask(progress: Progress) -> None:
        if progress.done and not inner:
            inner.append(engine.generate(PROMPTS[1], **wanted(1)))

    with opened(files) as engine:
        outer = engine.generate(PROMPTS[0], on_progress=ask, **wanted(0))
    assert [outer.token_ids, inner[0].token_ids] == alone[:2]
    assert inner[0].stats.n_reused_tokens == LONE_PIECE_ROWS


def test_several_texts_of_a_prompt_begin_with_the_prefix_of_another_request(
    files: Files, alone: Texts, rows: list[int]
) -> None:
    """Samples of a prompt that another slot holds whole read nothing, and are the texts of their seeds."""
    with opened(files, n_parallel=2) as engine, opened(files, n_parallel=1) as single:
        expected = [single.generate(PROMPTS[0], **{**wanted(1), "seed": 9 + k}).token_ids for k in range(2)]
        stream = engine.stream(PROMPTS[0], **wanted(0))
        next(stream)
        rows.clear()
        found = engine.samples(PROMPTS[0], n=2, **{**wanted(1), "seed": 9})
        assert [text.token_ids for text in found] == expected
        assert sum(rows) == 2 * N_TOKENS
        list(stream)
        assert stream.generation.token_ids == alone[0]


@pytest.mark.slow
def test_a_head_can_be_shed_after_the_first_session_took_a_prefix(files: Files, alone: Texts) -> None:
    """What a head knows of all texts is counted, and freed, though the first slot goes on with another session."""
    with opened(files, "a head", n_parallel=2) as engine:
        first = engine.stream(STRANGER, **wanted(0))
        next(first)
        second = engine.stream(PROMPTS[0], **wanted(0))
        next(second)
        first.close()
        third = engine.stream(PROMPTS[1], **wanted(1))
        next(third)
        assert third.generation.stats.n_reused_tokens == N_SYSTEM
        drafting = engine.pool.slots[0].drafting
        assert drafting is not None
        head = drafting.factories["head"]
        assert isinstance(head, HeadFactory)
        assert head.memory_bytes() > 0
        head.shed()
        assert head.state.held_bytes == 0
        for _ in (*second, *third):
            pass
        assert [second.generation.token_ids, third.generation.token_ids] == alone[:2]


def test_a_branched_session_gives_nothing_away(files: Files) -> None:
    """While a tree is verified nothing changes; when a path was kept, the fork has the bits of its own reading."""
    with Cpu().load(files["target"], LoadOptions(n_ctx=1024, n_parallel=3, n_threads=1)) as model:
        batcher, prompt = Batcher(model), np.array(PROMPTS[0], np.int32)
        one, two, cold = (batcher.session(1024) for _ in range(3))
        one.forward(prompt[:-1], n_past=0)
        two.forward(prompt[:70], n_past=0)
        tree = np.array([-1, 0, 0], np.int32)
        one.forward(np.array([5, 6, 7], np.int32), n_past=len(prompt) - 1, parents=tree, rows="all")
        slots = [SessionSlot(one, list(PROMPTS[0][:-1])), SessionSlot(two, list(PROMPTS[0][:70]))]
        with pytest.raises(SessionError, match="branched"):
            two.take_prefix(one, 100)
        SharedPrefixes(slots).take(slots[1], PROMPTS[0], exact=False)
        assert (slots[1].cached_ids, two.n_cached) == (list(PROMPTS[0][:70]), 70)
        one.keep(np.array([0, 2], np.int32))
        SharedPrefixes(slots).take(slots[1], PROMPTS[1], exact=True)
        assert two.n_cached == 70  # nothing is known to have the bits of a cold start
        SharedPrefixes(slots).take(slots[1], PROMPTS[1], exact=False)
        assert (slots[1].cached_ids, two.n_cached) == (list(SYSTEM), N_SYSTEM)
        rest = np.array(PROMPTS[1][N_SYSTEM:], np.int32)
        expected = cold.forward(np.array(PROMPTS[1], np.int32), n_past=0).logits.copy()
        assert (two.forward(rest, n_past=N_SYSTEM).logits.view(np.uint32) == expected.view(np.uint32)).all()
        assert one.n_cached == len(prompt) + 1


def test_what_changed_while_it_was_taken_counts_for_nothing(files: Files) -> None:
    """The other session began another text meanwhile: nothing is known of what was taken over."""

    class Late(BatchedSession):
        def take_prefix(self, other: edgedec.model.Session, n_tokens: int) -> bool:
            slots[0].cached_ids = []
            return super().take_prefix(other, n_tokens)

    with Cpu().load(files["target"], LoadOptions(n_ctx=1024, n_parallel=2, n_threads=1)) as model:
        batcher = Batcher(model)
        slots = [SessionSlot(batcher.session(1024)), SessionSlot(Late(model.session(1024), batcher))]
        slots[0].session.forward(np.array(SYSTEM, np.int32), n_past=0)
        slots[0].cached_ids, slots[1].cached_ids = list(SYSTEM), [1]
        SharedPrefixes(slots).take(slots[1], PROMPTS[0], exact=False)
        assert slots[1].cached_ids == []


@pytest.mark.parametrize("options", [{"lossy": Lossy(slide=True)}, {"n_parallel": 1}])
def test_other_sessions_share_nothing(files: Files, options: dict[str, Any]) -> None:
    """A context that slides, and a session alone, read every prompt as they did."""
    with opened(files, **options) as engine:
        assert all(slot.prefixes is None for slot in engine.pool.slots)

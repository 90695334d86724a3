"""An engine with several requests at once: each gets the text that it gets alone, whatever the others do."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.decoding.session_pool import SessionPool
from edgedec.errors import BusyError
from edgedec.progress import CancelToken
from edgedec.sessions.batching import BatchedSession
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache

PROMPTS = [
    "one, two, three, one, two, three, one, two",
    "Some text to go on from",
    "x",
    "a long prompt that takes several pieces to read, as it has more bytes than one piece has rows",
    "one, two, three, four",
    "Some text to go on with",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("parallel") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[edgedec.Engine]:
    """Three requests at once, with drafters that are always verified."""
    with edgedec.load(path, runtime="cpu", n_parallel=3, draft="suffix+recycling", n_threads=2) as loaded:
        yield loaded


def texts(engine: edgedec.Engine, jobs: Sequence[tuple[str, float]]) -> list[tuple[int, ...]]:
    """Return the tokens of requests made from a thread each, all at once."""
    begin = threading.Barrier(len(jobs))

    def ask(prompt: str, temperature: float) -> tuple[int, ...]:
        begin.wait(30)
        options: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_tokens": 40, "ignore_end": True}
        return engine.generate(prompt, **options).token_ids

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(120) for future in [pool.submit(ask, *job) for job in jobs]]


@pytest.mark.slow
def test_each_request_gets_the_text_of_being_alone(path: Path, engine: edgedec.Engine) -> None:
    """Six requests, greedy and sampled, three at a time with drafts: == plain decoding of one after the other."""
    jobs = [(prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 0.9)]
    with edgedec.load(path, runtime="cpu", draft="off") as plain:
        expected = [texts(plain, [job])[0] for job in jobs]
    assert texts(engine, jobs) == expected
    assert texts(engine, jobs) == expected  # with caches and stores as the first round left them


def test_as_many_streams_as_asked_for_run_at_once(engine: edgedec.Engine) -> None:
    """One thread may hold three streams and take from each in turn; a fourth would wait for itself."""
    streams = [engine.stream(prompt, temperature=0, max_tokens=6, ignore_end=True) for prompt in PROMPTS[:3]]
    for _ in range(6):
        for stream in streams:
            next(stream)
        if streams[0].generation.stats.n_steps == 1:
            with pytest.raises(BusyError, match="in the middle of a stream"):
                engine.generate(PROMPTS[3], max_tokens=1)
    for stream in streams:
        stream.close()
        assert len(stream.generation.token_ids) == 6


def test_a_request_goes_where_most_of_its_prompt_is_known(engine: edgedec.Engine) -> None:
    """Of three sessions that hold three texts the one with the same beginning is taken, and evaluates the rest only."""
    texts(engine, [(prompt, 0.0) for prompt in PROMPTS[:2]])
    again = engine.generate(PROMPTS[1] + ", again", temperature=0, max_tokens=2)
    assert again.stats.n_reused_tokens >= len(PROMPTS[1])


def test_cancelling_one_leaves_the_others(path: Path) -> None:
    """The others' texts stay, and the cancelled one, which would go on and on, ends with what it had."""
    cancel = CancelToken()
    with (
        edgedec.load(path, runtime="cpu", n_parallel=3, draft="suffix+recycling", n_threads=2, n_ctx=100_000) as engine,
        ThreadPoolExecutor(3) as pool,
    ):
        expected = texts(engine, [(PROMPTS[0], 0.0), (PROMPTS[1], 0.0)])
        futures = [
            pool.submit(engine.generate, prompt, temperature=0, seed=5, max_tokens=40, ignore_end=True)
            for prompt in PROMPTS[:2]
        ]
        stopped = pool.submit(engine.generate, PROMPTS[2], temperature=0, ignore_end=True, cancel=cancel)
        cancel.cancel()
        assert stopped.result(60).finish_reason == "cancelled"
        assert [future.result(60).token_ids for future in futures] == expected


def test_prompt_caches_and_forgetting_wait_for_all(path: Path, tmp_path: Path) -> None:
    """What the last request left can be saved and restored; forget() empties every session's drafters."""
    with edgedec.load(path, runtime="cpu", n_parallel=2, draft="suffix") as engine:
        whole = engine.generate(PROMPTS[3], temperature=0, max_tokens=8)
        save_prompt_cache(engine, tmp_path / "cache")
        engine.forget()
        load_prompt_cache(engine, tmp_path / "cache")
        again = engine.generate(PROMPTS[3], temperature=0, max_tokens=8)
    assert again.token_ids == whole.token_ids
    assert again.stats.n_reused_tokens == whole.stats.n_prompt_tokens - 1


@pytest.mark.slow
@pytest.mark.parametrize("n_parallel", [1, 2])
def test_a_prompt_cache_holds_the_text_and_nothing_of_drafts(path: Path, tmp_path: Path, n_parallel: int) -> None:
    """Texts that a stop string ends within a draft, or an error after one, leave a cache that can be loaded again."""
    again, nothing = PROMPTS[0] * 2, {i: float("-inf") for i in range(260)}
    with edgedec.load(path, runtime="cpu", n_parallel=n_parallel, draft="suffix+recycling", n_threads=1) as engine:
        for i in range(8):
            whole = engine.generate(again, temperature=0, max_tokens=40, ignore_end=True)
            ended = engine.generate(again, temperature=0, stop=(whole.outputs[12 + i].text or "x",), ignore_end=True)
            save_prompt_cache(engine, tmp_path / "cache")
            n_known = len(again) + len(ended.token_ids)
            assert len(again) <= load_prompt_cache(engine, tmp_path / "cache") <= n_known + 1
            assert engine.generate(again, temperature=0, max_tokens=40, ignore_end=True).text == whole.text
        with pytest.raises(edgedec.errors.RequestError):
            engine.generate(again, temperature=0, logit_bias=nothing)
        save_prompt_cache(engine, tmp_path / "cache")
        load_prompt_cache(engine, tmp_path / "cache")


@pytest.mark.slow
def test_requests_take_turns_where_rows_depend_on_each_other(path: Path) -> None:
    """llama.cpp's rows do, so a text could depend on who else asks: one session, and equal texts."""
    pytest.importorskip("llama_cpp")
    jobs = [(prompt, 0.0) for prompt in PROMPTS[:3]]
    with edgedec.load(path, runtime="llamacpp", n_parallel=3, draft="off") as engine:
        assert not isinstance(engine.pool.slots[0].session, BatchedSession)
        assert texts(engine, jobs) == [texts(engine, [job])[0] for job in jobs]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_waits_for_no_thread_of_its_parent(path: Path) -> None:
    """close() in a child returns, though a thread of the parent held the lock of the joined forwards at the fork."""
    held, done = threading.Event(), threading.Event()
    with edgedec.load(path, runtime="cpu", n_parallel=2, draft="off") as engine, ThreadPoolExecutor(1) as pool:
        session = engine.pool.slots[0].session
        assert isinstance(session, BatchedSession)

        def hold() -> None:
            with session.model.lock:
                held.set()
                done.wait(30)

        pool.submit(hold)
        assert held.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            engine.close()
            os._exit(0)
        done.set()
        assert os.waitpid(child, 0)[1] == 0


def in_threads(*calls: Callable[[], None]) -> None:
    """Run calls in threads of their own; none may be left after a while."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_that_would_wait_for_each_other_are_told() -> None:
    """Two threads that hold one thing each and ask for another: the second is refused, the first gets the other's."""
    pool, both, found = SessionPool(["a", "b"]), threading.Barrier(2), list[str]()

    def hold_and_ask() -> None:
        with pool.turn(CancelToken()) as mine:
            both.wait(20)
            try:
                with pool.turn(CancelToken()) as other:
                    found.append("both" if mine != other else "the same")
            except BusyError:
                found.append("refused")

    in_threads(hold_and_ask, hold_and_ask)
    assert sorted(found) == ["both", "refused"]


def test_one_that_holds_something_does_not_wait_behind_all() -> None:
    """all() waits for its holder, so the holder that asks for a second thing is refused; then all() has its turn."""
    pool, holds, found = SessionPool(["a", "b"]), threading.Event(), list[str]()

    def ask_again() -> None:
        with pool.turn(CancelToken()):
            holds.set()
            while not pool.n_waiting:
                threading.Event().wait(0.001)
            with pytest.raises(BusyError), pool.turn(CancelToken()):
                pass
            found.append("refused")

    def take_all() -> None:
        holds.wait(20)
        with pool.all():
            found.append("all")

    in_threads(ask_again, take_all)
    assert found == ["refused", "all"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to a thread")
def test_one_that_is_interrupted_leaves_the_queue() -> None:
    """Ctrl-C while waiting for a turn, or for all: those behind get theirs."""
    pool, holds, release = SessionPool(["a"]), threading.Event(), threading.Event()

    def hold() -> None:
        with pool.turn(CancelToken()):
            holds.set()
            release.wait(20)

    def interrupt() -> None:
        while not pool.n_waiting:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(hold)
        assert holds.wait(20)
        for wait in (pool.all, lambda: pool.turn(CancelToken())):
            interrupter = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt), wait():
                pass
            interrupter.result(20)
        release.set()
    holds.clear()
    in_threads(hold)
    assert holds.is_set()


def test_turns_are_fair_and_prefer_by_value() -> None:
    """The free thing of the highest value is taken; who waits longest gets what comes free; all() waits for all."""
    pool = SessionPool(["a", "b", "c"])
    with pool.turn(CancelToken(), "abc".index) as first, pool.turn(CancelToken(), "abc".index) as second:
        assert (first, second) == ("c", "b")
        with pytest.raises(BusyError), pool.all():
            pass
    assert pool.last == "c"
    order: list[int] = []
    release = threading.Event()

    def hold() -> None:
        with pool.all():
            release.wait(30)

    def take(i: int) -> None:
        with pool.turn(CancelToken()):
            order.append(i)

    with ThreadPoolExecutor(6) as threads:
        threads.submit(hold)
        while not pool.n_held:
            threading.Event().wait(0.001)
        for i in range(5):
            threads.submit(take, i)
            while pool.n_waiting < i + 1:
                threading.Event().wait(0.001)
        release.set()
    assert sorted(order) == list(range(5))


def test_requests_that_take_turns_say_so(path: Path) -> None:
    """Where a row depends on what else is in a forward, parallel requests that were asked for are not to be had."""
    pytest.importorskip("llama_cpp")
    with edgedec.load(path, runtime="llamacpp", n_ctx=64, n_parallel=2, draft="off") as loaded:
        assert loaded.generate("a", max_tokens=2).stats.notes == [
            "2 parallel requests take turns: on the llamacpp runtime a row depends on what else is in its forward"
        ]
    with edgedec.load(path, runtime="cpu", n_ctx=64, n_parallel=2, draft="off") as loaded:
        assert loaded.generate("a", max_tokens=2).stats.notes == []

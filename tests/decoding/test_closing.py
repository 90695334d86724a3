"""Streams have one reader, and close() returns whatever streams, threads and callbacks there are."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.errors import CancelledError, SessionError
from edgedec.progress import CancelToken, Progress
from edgedec_apps.prompt_cache import save_prompt_cache
from edgedec_runtimes.chat import budget as chat_budget

PROMPT = "Some text to go on from"
LONG = "x" * 3000  # several reports of progress while it is read
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_end": True}
WAIT_S = 60.0


def in_thread(work: Callable[[], Any]) -> Any:
    """Run work in a thread of its own that ends, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(WAIT_S)


def soon(*calls: Callable[[], Any]) -> None:
    """Run calls at once, each in a daemon thread; they must end, not hang."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), f"{calls} do not return"


def read_all(stream: edgedec.TokenStream, begun: threading.Event) -> None:
    """Read a stream to its end, and say when it has begun."""
    for _ in stream:
        begun.set()


def started(stream: edgedec.TokenStream) -> edgedec.TokenStream:
    """Take two tokens of a stream, and leave it paused."""
    next(stream)
    next(stream)
    return stream


@contextmanager
def loaded(path: Path, runtime: str = "cpu", **options: Any) -> Iterator[edgedec.Engine]:
    """Load a model with a long context; a test that fails does not wait for its closing."""
    given: Any = {"n_ctx": 20_000, "draft": "off", **options}
    yield edgedec.load(path, runtime=runtime, **given)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["reference", "llamacpp", "cpu"])
@pytest.mark.parametrize("chat", [False, True])
def test_close_ends_a_paused_stream_of_another_thread(tiny_path: Path, runtime: str, chat: bool) -> None:
    """close() ends a stream that was begun and is not iterated any more as cancelled, even if its thread is gone."""
    with loaded(tiny_path, runtime) as engine:
        messages = [{"role": "user", "content": "x"}]

        def begin() -> edgedec.TokenStream:
            return started(engine.chat_stream(messages, **ENDLESS) if chat else engine.stream(PROMPT, **ENDLESS))

        stream = in_thread(begin)
        soon(engine.close)
        engine.close()
        assert list(stream) == []
        assert (stream.generation.finish_reason, len(stream.generation.token_ids)) == ("cancelled", 2)
        with pytest.raises(SessionError, match="closed"):
            engine.generate([1])


def test_close_ends_a_paused_stream_that_was_cancelled(tiny_path: Path) -> None:
    """close() does not wait for a stream that was cancelled and is not iterated any more."""
    with loaded(tiny_path) as engine:
        stream = in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS)))
        stream.cancel()
        soon(engine.close)
        assert stream.generation.finish_reason == "cancelled"


@pytest.mark.parametrize(("runtime", "n_paused", "n_running"), [("cpu", 2, 1), ("cpu", 0, 3), ("llamacpp", 0, 1)])
def test_close_ends_paused_and_running_streams_side_by_side(
    tiny_path: Path, runtime: str, n_paused: int, n_running: int
) -> None:
    """All end, the running ones with the text that they have."""
    n_streams = n_paused + n_running
    with loaded(tiny_path, runtime, n_parallel=n_streams) as engine, ThreadPoolExecutor(n_running) as pool:
        paused = [in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS))) for _ in range(n_paused)]
        running = [(engine.stream(PROMPT, **ENDLESS), threading.Event()) for _ in range(n_running)]
        futures = [pool.submit(read_all, stream, begun) for stream, begun in running]
        assert all(begun.wait(WAIT_S) for _, begun in running)
        soon(engine.close)
        for future in futures:
            future.result(WAIT_S)
        streams = (*paused, *(stream for stream, _ in running))
        assert [stream.generation.finish_reason for stream in streams] == ["cancelled"] * n_streams


def test_close_refuses_those_who_wait_behind_a_paused_stream(tiny_path: Path, tmp_path: Path) -> None:
    """A request that waits for its turn is refused; a prompt cache that waits is written before the model goes."""
    with loaded(tiny_path) as engine, ThreadPoolExecutor(2) as pool:
        held = in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS)))
        waiting = pool.submit(engine.generate, PROMPT, **ENDLESS)
        saving = pool.submit(save_prompt_cache, engine, tmp_path / "cache")
        while engine.pool.n_waiting < 2:
            assert not waiting.done()
            assert not saving.done()
        soon(engine.close)
        with pytest.raises(SessionError, match="closed"):
            waiting.result(WAIT_S)
        saving.result(WAIT_S)
        assert (tmp_path / "cache").exists()
        assert held.generation.finish_reason == "cancelled"


@pytest.mark.slow
def test_a_thread_is_not_taken_for_the_one_that_paused_a_stream(tiny_path: Path) -> None:
    """A thread with the id of an ended thread that paused a stream waits for its turn until that stream is closed."""
    with loaded(tiny_path) as engine:
        for _ in range(20):  # the system gives a number again mostly at once
            stream = in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS)))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(engine.generate, PROMPT, temperature=0, max_tokens=1, ignore_end=True)
                while not engine.pool.n_waiting:
                    assert not waiting.done()
                stream.close()
                assert waiting.result(WAIT_S).finish_reason == "length"
        engine.close()


def test_close_from_two_threads(tiny_path: Path) -> None:
    """Two threads may call close() at once: both calls return, and the paused stream has ended."""
    with loaded(tiny_path) as engine:
        stream = in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS)))
        soon(engine.close, engine.close)
        assert list(stream) == []


def test_close_ends_a_paused_stream_of_a_reference_cycle(tiny_path: Path) -> None:
    """close() does not wait for a stream that is part of a reference cycle and was not collected yet."""
    with loaded(tiny_path) as engine:

        def leave() -> None:
            stream: Any = started(engine.stream(PROMPT, **ENDLESS))
            stream.itself = stream

        in_thread(leave)
        soon(engine.close)


def test_the_draft_store_is_written_though_a_stream_is_paused(tiny_path: Path, tmp_path: Path) -> None:
    """close() ends the stream, whose text the store learns, and writes the store."""
    file = tmp_path / "store"
    with loaded(tiny_path, draft="suffix", drafting=DraftOptions(store=file)) as engine:
        in_thread(lambda: engine.generate(PROMPT, temperature=0, max_tokens=5))
        stream = in_thread(lambda: started(engine.stream(PROMPT, **ENDLESS)))
        soon(engine.close)
        assert stream.generation.finish_reason == "cancelled"
        assert file.exists()


@pytest.mark.slow
def test_a_process_ends_though_a_stream_of_another_thread_is_paused(tiny_path: Path) -> None:
    """Leaving the with block, and then the interpreter, does not wait for a reader that never continues."""
    code = (
        "import sys, threading, edgedec\n"
        "streams = []\n"
        "with edgedec.load(sys.argv[1], runtime='cpu', n_ctx=2000) as m:\n"
        "    def work():\n"
        "        streams.append(m.stream('abc', ignore_end=True)); next(streams[0])\n"
        "    thread = threading.Thread(target=work); thread.start(); thread.join()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tiny_path], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "n_parallel"), [("reference", 1), ("llamacpp", 1), ("cpu", 1), ("cpu", 2)])
def test_close_within_a_callback_frees_the_model_after_the_step(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, n_parallel: int
) -> None:
    """close() in on_progress returns; the model is freed when the stream's step is over, and the stream ends."""
    events: list[str] = []
    with loaded(tiny_path, runtime, n_parallel=n_parallel) as engine:
        free = type(engine.model).close

        def noted(model: Any) -> None:
            events.append("freed")
            free(model)

        monkeypatch.setattr(type(engine.model), "close", noted)

        def close(progress: Progress) -> None:
            engine.close()
            events.append("called back")

        stream = engine.stream(LONG, on_progress=close, **ENDLESS)
        soon(lambda: list(stream))
        assert stream.generation.finish_reason == "cancelled"
        assert (events[0], events[-1]) == ("called back", "freed")
        with pytest.raises(SessionError, match="closed"):
            engine.session(16)


@pytest.mark.slow
def test_two_callbacks_that_close_do_not_wait_for_each_other(tiny_path: Path) -> None:
    """Two threads that close the model, each from a callback of its own stream, do not wait for each other."""
    together = threading.Barrier(2)
    with loaded(tiny_path, n_parallel=2) as engine:

        def close(progress: Progress) -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(WAIT_S)
            together.abort()
            engine.close()

        soon(*[lambda: engine.generate(LONG, on_progress=close, **ENDLESS)] * 2)
        with pytest.raises(SessionError, match="closed"):
            engine.session(16)


# Who reads.


@pytest.mark.slow
def test_a_second_reader_of_a_stream_is_told(tiny: edgedec.Engine) -> None:
    """While one thread reads, another one, and a callback of the first, get a SessionError; the text is the same."""
    expected = tiny.generate(PROMPT, temperature=0, max_tokens=8, ignore_end=True).text
    stream = tiny.stream(PROMPT, temperature=0, max_tokens=8, ignore_end=True)
    errors: list[str] = []

    def read() -> None:
        try:
            next(stream)
        except SessionError as error:
            errors.append(str(error))

    step = tiny.pool.slots[0].session.evaluate

    def evaluate(*args: Any, **options: Any) -> Any:
        if not errors:
            in_thread(read)
            read()
        return step(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.pool.slots[0].session, "evaluate", evaluate)
        outputs = list(stream)
    assert "".join(output.text for output in outputs) == expected
    assert len(errors) == 2
    assert all("one reader at a time" in error for error in errors)


def test_a_stream_can_be_closed_while_another_thread_reads_it(tiny_path: Path) -> None:
    """close() waits for the reader, who comes to the stream's end; the next request has its turn."""
    with loaded(tiny_path) as engine, ThreadPoolExecutor(1) as pool:
        stream = engine.stream(PROMPT, **ENDLESS)
        begun = threading.Event()
        future = pool.submit(read_all, stream, begun)
        assert begun.wait(WAIT_S)
        soon(stream.close)
        future.result(WAIT_S)
        assert stream.generation.finish_reason == "cancelled"
        assert engine.generate(PROMPT, temperature=0, max_tokens=1, ignore_end=True).finish_reason == "length"
        engine.close()


def test_a_stream_can_be_closed_by_its_own_callback(tiny_path: Path) -> None:
    """close() in on_progress stops the stream that reports."""
    with loaded(tiny_path) as engine:
        streams: list[edgedec.TokenStream] = []
        streams.append(engine.stream(LONG, on_progress=lambda _: streams[0].close(), **ENDLESS))
        soon(lambda: list(streams[0]))
        assert streams[0].generation.finish_reason == "cancelled"
        engine.close()


@pytest.mark.slow
def test_cancelling_a_stream_leaves_others_of_the_same_token(tiny: edgedec.Engine) -> None:
    """stream.cancel() ends that stream only; the token that it was made with ends both."""
    cancel = CancelToken()
    stream = tiny.stream(PROMPT, cancel=cancel, **ENDLESS)
    next(stream)
    stream.cancel()
    assert list(stream) == []
    assert tiny.generate(PROMPT, cancel=cancel, temperature=0, max_tokens=2, ignore_end=True).finish_reason == "length"
    cancel.cancel()
    assert tiny.generate(PROMPT, cancel=cancel, temperature=0, max_tokens=2).finish_reason == "cancelled"


def test_cancelling_between_two_pieces_of_a_prompt(tiny_path: Path) -> None:
    """Where forwards are joined, a prompt is read in pieces; a cancel that comes between two ends the reading."""
    with loaded(tiny_path, n_parallel=2) as engine:
        cancel, reports = CancelToken(), []

        def on_progress(progress: Progress) -> None:
            if progress.done:  # else the reading begins
                reports.append(progress.done)
                cancel.cancel()

        result = engine.generate(LONG, cancel=cancel, on_progress=on_progress, **ENDLESS)
        assert result.finish_reason == "cancelled"
        assert len(reports) == 1
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["reference", "llamacpp", "cpu"])
def test_cancelling_while_the_template_is_rendered(
    tiny_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat whose template is still being rendered ends as a cancelled one, with nothing evaluated."""
    monkeypatch.setattr(chat_budget, "LIMIT_BYTES", 1 << 50)
    monkeypatch.setattr(chat_budget, "LIMIT_S", 60.0)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    endless = f"{{% if messages[0].content == 'x' %}}{endless}{{% endif %}}"  # not at the trial when it is loaded
    cancel = CancelToken()
    timer = threading.Timer(0.1, cancel.cancel)
    with edgedec.load(tiny_path, runtime=runtime, n_ctx=256, chat_template=endless) as engine:
        timer.start()
        result = engine.chat([{"role": "user", "content": "x"}], cancel=cancel)
        timer.join()
        assert (result.finish_reason, result.text, result.stats.n_prompt_tokens) == ("cancelled", "", 0)
        with pytest.raises(CancelledError):
            engine.chat_ids([{"role": "user", "content": "x"}], cancel=cancel)


def test_a_second_task_that_reads_an_async_stream_is_told(tiny: edgedec.Engine) -> None:
    """Of two tasks that wait for the same stream's next token one gets it, the other a SessionError."""

    async def work() -> list[object]:
        stream = tiny.astream(PROMPT, temperature=0, max_tokens=8, ignore_end=True)
        found = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
        rest = [output async for output in stream]
        return [type(value).__name__ for value in found] + [len(rest)]

    assert asyncio.run(work()) == ["TokenOutput", "SessionError", 7]


def test_closing_an_async_stream_that_another_task_reads(tiny_path: Path) -> None:
    """aclose() stops the generation; the task that reads comes to the end of what there is."""
    with loaded(tiny_path) as engine:

        async def work() -> int:
            stream = engine.astream(PROMPT, **ENDLESS)
            first = await anext(stream)

            async def read() -> int:
                return len([output async for output in stream])

            reader = asyncio.create_task(read())
            await asyncio.sleep(0)
            await stream.aclose()
            n_more = await asyncio.wait_for(reader, WAIT_S)
            assert first is not None
            return n_more

        assert asyncio.run(work()) < 19_000
        assert engine.generate(PROMPT, temperature=0, max_tokens=1, ignore_end=True).finish_reason == "length"
        engine.close()


def test_close_ends_an_async_stream_that_nobody_reads(tiny_path: Path) -> None:
    """An async stream that was begun and left waits for nobody; close() ends it, and its reader sees the end."""
    with loaded(tiny_path) as engine:

        async def work() -> int:
            stream = engine.astream(PROMPT, **ENDLESS)
            await anext(stream)
            await asyncio.to_thread(engine.close)
            return len([output async for output in stream])

        assert asyncio.run(work()) < 19_000

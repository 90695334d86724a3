"""Several texts of one prompt: each is that of its seed alone, bit for bit, whatever is forked, dropped or ended."""

import asyncio
import gc
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import edgedec
from edgedec.api.options import Lossy
from edgedec.constraint import Constraint
from edgedec.errors import CapabilityError, MemoryCapError, RequestError, SessionError
from edgedec.grammar import Grammar
from edgedec.sequence import Generation
from edgedec.sessions.forks import SessionForks
from edgedec_runtimes.shared.library_model import LibraryModel

PROMPT = "abcabcabcabcabcabc, and so on: abc"
CHAT = [{"role": "user", "content": "abcabcabc"}]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 7}
COLD: dict[str, Any] = {"temperature": 0.0, "seed": 7}


@pytest.fixture(scope="module", params=["plain", "drafts", "trees", "two requests"])
def model(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model on the cpu runtime, with and without drafts, and loaded for two requests at a time."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"draft": None},
        "drafts": {"draft": "suffix"},
        "trees": {"draft": "recycling"},
        "two requests": {"draft": "suffix", "n_parallel": 2},
    }
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, **ways[request.param]) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model on the cpu runtime, without drafts."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=None) as engine:
        yield engine


def alone(engine: edgedec.Engine, prompt: Any, k: int, **options: Any) -> Generation:
    """Return the text of a seed plus `k`, generated alone."""
    options = {"logprobs": 0, **options, "seed": options["seed"] + k}
    return engine.generate(prompt, **options) if isinstance(prompt, str) else engine.chat(prompt, **options)


@pytest.fixture(scope="module")
def alone_before() -> dict[str, list[Generation]]:
    """The texts that were generated alone, which are the same for every way to draft."""
    return {}


def same(found: Generation, expected: Generation) -> None:
    """Check that a text is another one, with the bits of its log-probabilities."""
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert found.finish_reason == expected.finish_reason
    assert [output.logprob for output in found.outputs] == [output.logprob for output in expected.outputs]
    assert found.logprob_sum == expected.logprob_sum
    assert (found.is_whole, found.stop_string) == (expected.is_whole, expected.stop_string)
    assert found.stats.seed == expected.stats.seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        WARM,
        COLD,
        {**WARM, "repetition_penalty": 1.2, "stop": ("a", "ef")},
        {**WARM, "grammar": Grammar.regex("[a-f]{3,30}")},
        {**COLD, "grammar": Grammar.regex("(abc|bca)*x"), "json_close": True},
    ],
    ids=["sampled", "greedy", "stop strings", "grammar", "closed grammar"],
)
@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["text", "chat"])
def test_each_text_is_that_of_its_seed_alone(
    model: edgedec.Engine,
    plain: edgedec.Engine,
    alone_before: dict[str, list[Generation]],
    prompt: Any,
    options: dict[str, Any],
) -> None:
    """Text k == the text of seed + k alone: without drafts, and with drafts by every rule that keeps the text."""
    found = model.samples(prompt, 5, max_tokens=40, **options)
    assert len(found) == 5
    key = repr((prompt, options))
    if key not in alone_before:
        alone_before[key] = [alone(plain, prompt, k, max_tokens=40, **options) for k in range(5)]
    for text, expected in zip(found, alone_before[key], strict=True):
        same(text, expected)
    assert all(text.stats.n_reused_tokens == text.stats.n_prompt_tokens - 1 for text in found[1:])


def test_drafts_are_verified_in_common_forwards(tiny_path: Path) -> None:
    """With a pinned drafter, each text verifies drafts of its own."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft="suffix") as engine:
        found = engine.samples(PROMPT, 4, max_tokens=40, **COLD)
    assert all(text.stats.n_drafts > 0 for text in found)


def test_streams_yield_each_texts_tokens(plain: edgedec.Engine) -> None:
    """The outputs of each text, put together, are its text; the texts take turns."""
    stream = plain.samples_stream(PROMPT, 3, max_tokens=10, **WARM)
    assert stream.live == ()
    found = list(stream)
    assert [output.text for output in found[:6]] == [0, 1, 2, 0, 1, 2]
    for k, text in enumerate(stream.generations):
        assert "".join(output.output.text for output in found if output.text == k) == text.text
        same(text, alone(plain, PROMPT, k, max_tokens=10, **WARM))
    assert stream.live == ()


@pytest.mark.slow
def test_a_forked_text_goes_on_as_its_own_seed_would(model: edgedec.Engine, plain: edgedec.Engine) -> None:
    """A fork has its parent's tokens, then those that the next seed draws behind them; the others don't change."""
    options: dict[str, Any] = {**WARM, "max_tokens": 30, "ignore_end": True}
    stream = model.samples_stream(PROMPT, 2, **options)
    for _ in range(9):
        next(stream)
    n_before = len(stream.generations[1].token_ids)
    assert stream.fork(1, 2) == [2, 3]
    assert stream.live == (0, 1, 2, 3)
    list(stream)
    texts = stream.generations
    for k in (0, 1):
        same(texts[k], alone(plain, PROMPT, k, **options))
    for k in (2, 3):
        assert texts[k].stats.seed == WARM["seed"] + k
        assert texts[k].token_ids[:n_before] == texts[1].token_ids[:n_before]
        tail = [*plain.prompt_ids(PROMPT), *texts[1].token_ids[:n_before]]
        on = plain.generate(tail, logprobs=0, **{**options, "seed": WARM["seed"] + k, "max_tokens": 30 - n_before})
        assert texts[k].token_ids[n_before:] == on.token_ids
        logprobs = [output.logprob for output in (*texts[1].outputs[:n_before], *on.outputs)]
        assert texts[k].logprob_sum == pytest.approx(sum(p for p in logprobs if p is not None), rel=1e-12)


@pytest.mark.slow
def test_a_forked_text_keeps_to_its_grammar(model: edgedec.Engine) -> None:
    """A fork knows what its grammar has taken before: the whole text matches, with the beginning of its parent."""
    pattern = "a[bc]{4}d[ef]{40}g"
    stream = model.samples_stream(PROMPT, 2, max_tokens=60, grammar=Grammar.regex(pattern), **WARM)
    for _ in range(9):
        next(stream)
    n_before = len(stream.generations[1].token_ids)
    stream.fork(1, 2)
    list(stream)
    texts = stream.generations
    assert all(re.fullmatch(pattern, text.text) and text.is_whole for text in texts)
    assert all(texts[k].token_ids[:n_before] == texts[1].token_ids[:n_before] for k in (2, 3))
    assert len({text.text for text in texts}) > 1


def test_texts_are_dropped_and_chosen(model: edgedec.Engine, plain: edgedec.Engine) -> None:
    """A dropped text ends where it is; what goes on is what it would have been."""
    stream = model.samples_stream(PROMPT, 4, max_tokens=30, **WARM)
    next(stream)
    stream.drop(2)
    with pytest.raises(RequestError, match=r"text 2 isn't being written; these are: \[0, 1, 3\]"):
        stream.drop(2)
    for _ in range(5):
        assert next(stream).text != 2
    stream.choose(3)
    assert {output.text for output in stream} == {3}
    texts = stream.generations
    assert [text.finish_reason for text in texts[:3]] == ["cancelled"] * 3
    same(texts[3], alone(plain, PROMPT, 3, max_tokens=30, **WARM))
    whole = alone(plain, PROMPT, 0, max_tokens=30, **WARM)
    assert texts[0].token_ids == whole.token_ids[: len(texts[0].token_ids)]


@pytest.mark.slow
def test_a_callers_rule_ends_the_rest(model: edgedec.Engine) -> None:
    """`until` sees the texts that have ended, in that order; when it is content, the others are cancelled."""
    seen: list[int] = []

    def enough(ended: Sequence[Generation]) -> bool:
        seen.append(len(ended))
        return len(ended) >= 2

    found = model.samples(PROMPT, 6, max_tokens=200, until=enough, grammar=Grammar.regex("[a-f]*"), **WARM)
    ended = [text for text in found if text.finish_reason != "cancelled"]
    assert seen[-1] >= 2
    assert len(ended) >= 2
    assert all(n < 2 for n in seen[:-1])

    def failing(ended: Sequence[Generation]) -> bool:
        raise KeyError("mine")

    before = n_sessions(model)
    with pytest.raises(KeyError, match="mine"):
        model.samples(PROMPT, 6, max_tokens=200, until=failing, grammar=Grammar.regex("[a-f]*"), **WARM)
    assert n_sessions(model) == before


def n_sessions(engine: edgedec.Engine) -> int:
    """Return how many sessions of the engine's model are open."""
    gc.collect()
    assert isinstance(engine.model, LibraryModel)
    return engine.model.n_sessions


@pytest.mark.slow
def test_cancelling_leaves_nothing_over(model: edgedec.Engine, plain: edgedec.Engine) -> None:
    """Cancelled in mid-text, dropped, closed, or ended by an error: all forks are closed, the next texts are right."""
    before = n_sessions(model)
    token = edgedec.CancelToken()
    stream = model.samples_stream(PROMPT, 5, max_tokens=200, cancel=token, **WARM)
    for _ in range(12):
        next(stream)
    assert n_sessions(model) == before + 5
    token.cancel()
    assert len(list(stream)) <= 5
    assert [text.finish_reason for text in stream.generations] == ["cancelled"] * 5
    assert n_sessions(model) == before

    stream = model.samples_stream(PROMPT, 5, max_tokens=200, **WARM)
    next(stream)
    del stream
    assert n_sessions(model) == before

    stream = model.samples_stream(PROMPT, 5, max_tokens=200, **WARM)
    next(stream)
    stream.close()
    assert n_sessions(model) == before
    assert list(stream) == []
    with pytest.raises(RequestError, match="isn't being written"):
        stream.fork(0)

    early = edgedec.CancelToken()
    early.cancel()
    texts = model.samples(PROMPT, 3, cancel=early, **WARM)
    assert [(text.text, text.finish_reason, text.stats.seed) for text in texts] == [
        ("", "cancelled", 7 + k) for k in range(3)
    ]
    assert n_sessions(model) == before
    same(model.samples(PROMPT, 2, max_tokens=20, **WARM)[1], alone(plain, PROMPT, 1, max_tokens=20, **WARM))


@pytest.mark.slow
def test_wrong_requests_are_clear_errors(model: edgedec.Engine) -> None:
    """Wrong numbers, types and prompts are refused before anything is read."""
    for n in (0, -1, 257, 10**6, True, 2.0, "3", None):
        with pytest.raises(RequestError, match=r"n is .*; it must be (from 1 to 256|a whole number)"):
            model.samples(PROMPT, n, **WARM)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="until is 3; it must be a function"):
        model.samples(PROMPT, 2, until=3, **WARM)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.samples([], 2, **WARM)
    with pytest.raises(RequestError, match="think is for chats"):
        model.samples(PROMPT, 2, think=True, **WARM)
    with pytest.raises(RequestError, match=r"samples\(\) has no argument 'warmth'"):
        model.samples(PROMPT, 2, warmth=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError):
        model.samples(PROMPT, 2, grammar=Grammar.regex("("), **WARM)
    stream = model.samples_stream(PROMPT, 2, max_tokens=60, ignore_end=True, **WARM)  # no draft ends a text at once
    with pytest.raises(RequestError, match="read the first token before"):
        stream.fork(0)
    next(stream)
    for n in (0, 255):
        with pytest.raises(RequestError):
            stream.fork(0, n)
    assert stream.live == (0, 1)
    stream.close()  # the errors that were raised hold this frame, and with it the stream


def test_one_reader_at_a_time(plain: edgedec.Engine) -> None:
    """While a thread reads, another one can't change the texts, nor can the stream's own callback."""
    errors: list[BaseException] = []

    def meddling(ended: Sequence[Generation]) -> bool:
        try:
            stream.drop(0)
        except SessionError as error:
            errors.append(error)
        return False

    stream = plain.samples_stream(PROMPT, 3, max_tokens=60, grammar=Grammar.regex("[a-f]{1,9}"), until=meddling, **WARM)
    list(stream)
    assert errors


def test_a_refused_fork_closes_its_grammar(plain: edgedec.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text can't be forked, the grammar that was opened for the fork is closed at once."""
    stream, closed = plain.samples_stream(PROMPT, 1, grammar=Grammar.regex("[a-f]{40,}"), **WARM), list[Constraint]()
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(Constraint, "close", lambda constraint: closed.append(constraint))
        patch.setattr(SessionForks, "fork", lambda *_: (_ for _ in ()).throw(CapabilityError("no fork")))
        with pytest.raises(CapabilityError, match="no fork"):
            stream.fork(0)
    assert len(closed) == 1


def test_closing_the_model_ends_the_texts(tiny_path: Path) -> None:
    """close() ends a paused stream; its texts are those so far."""
    engine = edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=None)
    stream = engine.samples_stream(PROMPT, 3, max_tokens=100, **WARM)
    for _ in range(6):
        next(stream)
    thread = threading.Thread(target=engine.close)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert list(stream) == []
    assert [len(text.token_ids) for text in stream.generations] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"runtime": "llamacpp"}, {"runtime": "cpu", "lossy": Lossy(slide=True)}])
def test_without_common_forwards_texts_come_one_after_another(tiny_path: Path, options: dict[str, Any]) -> None:
    """The texts are the same ones, their statistics say why, and forking says what to do."""
    with edgedec.load(tiny_path, n_ctx=128, draft=None, **options) as engine:
        stream = engine.samples_stream(PROMPT, 3, max_tokens=12, **WARM)
        next(stream)
        with pytest.raises(CapabilityError, match="one after another"):
            stream.fork(0)
        list(stream)
        for k, text in enumerate(stream.generations):
            same(text, alone(engine, PROMPT, k, max_tokens=12, **WARM))
            assert any(reason.startswith("the texts are written one after another") for reason in text.stats.notes)
        first = engine.samples(PROMPT, 3, max_tokens=12, until=lambda ended: True, **WARM)
        assert [text.finish_reason for text in first][1:] == ["cancelled"] * 2


@pytest.mark.slow
def test_the_full_context_ends_texts_as_alone(plain: edgedec.Engine) -> None:
    """Texts that fill the context end there, with the same reason as alone."""
    prompt = [5] * 200
    found = plain.samples(prompt, 3, ignore_end=True, **WARM)
    for k, text in enumerate(found):
        one = plain.generate(prompt, ignore_end=True, logprobs=0, **{**WARM, "seed": 7 + k})
        same(text, one)
        assert text.stats.notes == one.stats.notes


def test_event_loops_get_the_same_texts(plain: edgedec.Engine) -> None:
    """The asynchronous forms give the same texts; leaving the loop ends them."""

    async def both() -> None:
        found = await plain.asamples(PROMPT, 3, max_tokens=10, **WARM)
        for k, text in enumerate(found):
            same(text, alone(plain, PROMPT, k, max_tokens=10, **WARM))
        stream = plain.asamples_stream(CHAT, 3, max_tokens=10, **WARM)
        read = [output async for output in stream]
        for k, text in enumerate(stream.generations):
            assert "".join(output.output.text for output in read if output.text == k) == text.text
        short = plain.asamples_stream(PROMPT, 3, max_tokens=200, **WARM)
        async for _ in short:
            break
        await short.aclose()

    asyncio.run(both())
    for thread in threading.enumerate():
        if thread.name == "edgedec-stream":  # closing the iterator stops it, and does not wait for it
            thread.join(60)
    assert n_sessions(plain) == 1


@pytest.mark.slow
def test_texts_and_other_requests_share_forwards(tiny_path: Path, plain: edgedec.Engine) -> None:
    """Beside another request, texts and request have the bits of being alone."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=None, n_parallel=2) as engine:
        other: list[Generation] = []
        thread = threading.Thread(target=lambda: other.append(engine.generate("xyz", max_tokens=60, **WARM)))
        thread.start()
        found = engine.samples(PROMPT, 4, max_tokens=40, **WARM)
        thread.join(60)
        for k, text in enumerate(found):
            same(text, alone(plain, PROMPT, k, max_tokens=40, **WARM))
        assert other[0].token_ids == plain.generate("xyz", max_tokens=60, **WARM).token_ids


@pytest.mark.slow
def test_a_plan_keeps_room_for_texts(tiny_path: Path) -> None:
    """n_texts is a term of the plan; with it, so many texts of the context's length are written to their ends."""
    options: dict[str, Any] = {"runtime": "cpu", "n_ctx": 256, "draft": None, "memory": "2GB"}
    with edgedec.load(tiny_path, **options) as one, edgedec.load(tiny_path, n_texts=4, **options) as four:
        kv = next(term.n_bytes for term in one.plan.terms if term.name == "KV cache")
        (term,) = (term for term in four.plan.terms if term.name == "texts of one prompt")
        assert term.n_bytes >= 3 * kv
        found = four.samples(PROMPT, 4, ignore_end=True, **WARM)
        assert {text.stats.n_prompt_tokens + text.stats.n_generated_tokens for text in found} == {256}
        with pytest.raises(MemoryCapError, match="room for"):
            one.samples(PROMPT, 5, **WARM)
    for wrong in (0, 257, 1.5):
        with pytest.raises(RequestError, match=r"n_texts is .*; it must be (from 1 to 256|a whole number)"):
            edgedec.load(tiny_path, runtime="cpu", n_texts=wrong)  # type: ignore[arg-type]

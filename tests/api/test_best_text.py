"""The best of several texts of a real model, by each method among its texts; and every search, on the tiny one."""

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.real_models import real_model

import edgedec
from edgedec.api.best_text import EPS, MOST_AUTO, ROUND, BestOf, best
from edgedec.api.branching import partial_texts
from edgedec.choosing.choice import chooser_named, chosen_among
from edgedec.choosing.sample_count import another_is_wanted, n_agreeing
from edgedec.choosing.scorer import CallerScorer
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import (
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryCapError,
    OptionError,
    PluginError,
    RequestError,
    ScorerError,
)
from edgedec.plugins import SEARCHES, load_plugin, plugins
from edgedec.progress import Progress
from edgedec_methods.beam import beam_search
from edgedec_methods.first_finish import first_finish
from edgedec_methods.particles import filtered
from edgedec_methods.sampled_steps import Steps, write_steps

CHAT = [{"role": "user", "content": "How much is 2 + 3? End with 'Answer: ' and the number."}]
OPTIONS: dict[str, Any] = {"seed": 5, "temperature": 0.9, "max_tokens": 24}

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def engine() -> Iterator[edgedec.Engine]:
    """The 135M on the cpu runtime."""
    path = real_model("smollm2-135m.gguf")
    with edgedec.load(path, runtime="cpu", n_ctx=256, draft="off", n_threads=2) as engine:
        yield engine


def test_each_method_chooses_among_the_texts_of_the_seeds(engine: edgedec.Engine) -> None:
    """The texts are those of samples(); nothing but the choice differs. A text that was stopped is a beginning."""
    texts = engine.samples(CHAT, 4, **OPTIONS)
    for choose in ("likely", "judge", "bag"):
        found = best(engine, CHAT, BestOf(4, choose), **OPTIONS)
        assert [each.token_ids for each in found.texts] == [each.token_ids for each in texts]
        again = chosen_among(found.texts, choose, scores=found.scores)
        assert (found.place, found.text) == (again.place, texts[found.place].text)
    for choose in ("first", "vote"):
        found = best(engine, CHAT, BestOf(4, choose, answer=r"\d+"), **OPTIONS)
        for mine, whole in zip(found.texts, texts, strict=True):
            assert mine.token_ids == whole.token_ids[: len(mine.token_ids)]


def test_one_text_is_the_plain_one(engine: edgedec.Engine) -> None:
    """n = 1 chooses the text that the seed gives alone, by every method."""
    plain = engine.chat(CHAT, **OPTIONS)
    for how in (BestOf(1), BestOf(1, "likely"), BestOf(1, "judge"), BestOf(1, "first"), BestOf(1, "bag")):
        assert best(engine, CHAT, how, **OPTIONS).text == plain.text


def test_auto_goes_on_in_rounds(engine: edgedec.Engine) -> None:
    """Its texts are those of the seeds, in rounds, until another one adds too little."""
    found = best(engine, CHAT, BestOf("auto", "vote", answer=r"\d+"), **OPTIONS)
    n = len(found.texts)
    assert n % ROUND == 0
    texts = engine.samples(CHAT, n, **OPTIONS)
    assert [each.token_ids for each in found.texts] == [each.token_ids for each in texts]
    wanted = [another_is_wanted(n_agreeing(found.answers[:k]), k, EPS, MOST_AUTO) for k in range(ROUND, n + 1, ROUND)]
    assert wanted == [True] * (n // ROUND - 1) + [False]


def test_a_scorer_chooses(engine: edgedec.Engine) -> None:
    """A function, and a command, that prefer short texts; the prefix is the last message."""
    prefixes = list[str]()

    def short(prefix: str, steps: Sequence[str], /) -> list[float]:
        prefixes.append(prefix)
        return [1 / (1 + len(step)) for step in steps]

    found = best(engine, CHAT, BestOf(4, "score", scorer=short), **OPTIONS)
    assert len(found.text) == min(len(each.text) for each in found.texts)
    assert prefixes == [CHAT[0]["content"]]
    code = "import json, sys; print([1 / (1 + len(s)) for s in json.load(sys.stdin)['steps']])"
    command = BestOf(4, "score", scorer=[sys.executable, "-c", code])
    assert best(engine, CHAT, command, **OPTIONS).place == found.place


def test_what_is_refused(engine: edgedec.Engine) -> None:
    """Before anything is written."""
    wrong: list[dict[str, Any]] = [
        {"choose": "best"},
        {"answer": "("},
        {"choose": "score"},
        {"scorer": ["true"]},
        {"n": "many"},
        {"n": "auto", "choose": "likely"},
        {"choose": "score", "scorer": "rm -rf"},
        {"choose": "score", "scorer": [1]},
        {"scorer_seconds": 0},
    ]
    for options in wrong:
        with pytest.raises(OptionError):
            BestOf(**options)
    for n in (0, -3, 10**6):
        with pytest.raises(RequestError):
            best(engine, CHAT, BestOf(n), **OPTIONS)
    with pytest.raises(OptionError, match="log-probabilities"):
        best(engine, CHAT, BestOf(2, "likely"), **OPTIONS, logprobs=None)
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        best(engine, CHAT, BestOf(2, "score", scorer=lambda prefix, steps: [1 / 0]), **OPTIONS)


def test_cancelling_chooses_among_what_there_is(engine: edgedec.Engine) -> None:
    """samples() returns what was written, and so does best()."""
    cancel = edgedec.CancelToken()
    threading.Timer(0.3, cancel.cancel).start()
    found = best(engine, CHAT, BestOf(4), cancel=cancel, **(OPTIONS | {"max_tokens": 180, "ignore_end": True}))
    assert {each.finish_reason for each in found.texts} == {"cancelled"}
    assert chooser_named("likely").may_stop(found.texts, 0, "x") is False


def test_searches_on_a_real_model(engine: edgedec.Engine) -> None:
    """One beam is greedy decoding; particles, and the first that ends, write; the next request is as ever."""
    greedy = engine.chat(CHAT, temperature=0, max_tokens=24)
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=24) as texts:
        assert texts.text(beam_search(texts, 1)[0].text) == greedy.text
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=24) as texts:
        best, *_ = beam_search(texts, 4)
        assert best.text.mean_logprob == pytest.approx(best.score / best.text.n_scored)
    params = engine.requests.sampling(temperature=0.9)
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=24) as texts:
        found = filtered(texts, 4, Steps(params, 5, "\n", 8), CallerScorer(lambda p, s: [0.5] * len(s), "x"))
        assert len(found.texts) == 4
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=24, stop=["a"]) as texts:
        root = texts.begin()
        said = texts.text(first_finish(texts, [root, texts.fork(root)], params, [5, 6]))
        assert "a" not in said
    assert engine.chat(CHAT, temperature=0, max_tokens=24).token_ids == greedy.token_ids


def test_a_search_that_is_cancelled_or_has_no_room_leaves_nothing(engine: edgedec.Engine) -> None:
    """The error comes through, and the next request is as ever."""
    plain = engine.chat(CHAT, **OPTIONS)
    cancel = edgedec.CancelToken()
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=180, cancel=cancel) as texts:
        live = texts.advance([(texts.begin(), 5)])
        cancel.cancel()
        with pytest.raises(CancelledError):
            write_steps(texts, live, engine.requests.sampling(temperature=0.9), [1], separator=None)
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=10**6) as texts, pytest.raises(ContextFullError):
        texts.extend(texts.begin(), [1] * 250, 0.0)
    assert engine.chat(CHAT, **OPTIONS).token_ids == plain.token_ids


def test_a_search_by_its_name(engine: edgedec.Engine) -> None:
    """best() with a search is the search itself: the same tokens; its log-probabilities are those of the tokens."""
    found = best(engine, CHAT, SearchBy("beam", 4), max_tokens=24)
    with partial_texts(engine, engine.chat_ids(CHAT), max_tokens=24) as texts:
        beams = beam_search(texts, 4)
        assert [each.token_ids for each in found.texts] == [beam.text.token_ids for beam in beams]
    for name in ("particles", "a-star", "cntp"):
        one = best(engine, CHAT, SearchBy(name, 1), **OPTIONS)
        assert one.text == engine.chat(CHAT, **OPTIONS).text
    plain = engine.chat(CHAT, **OPTIONS, logprobs=0)
    assert one.generation.logprob_sum == pytest.approx(plain.logprob_sum, abs=1e-4)
    greedy = engine.chat(CHAT, temperature=0, max_tokens=24).text
    for how in (SearchBy("beam", 1), SearchBy("diverse", 1), SearchBy("adadec", 1)):
        assert best(engine, CHAT, how, max_tokens=24).text == greedy


def test_a_search_that_fails_leaves_the_model_as_it_was(engine: edgedec.Engine) -> None:
    """A scorer that raises keeps the texts in the error; cancelling, and no room, raise; the next text is as ever."""
    plain = engine.chat(CHAT, **OPTIONS).token_ids
    with pytest.raises(ScorerError, match="ZeroDivisionError") as failed:
        best(engine, CHAT, SearchBy("particles", 4, lambda prefix, steps: [1 / 0]), **OPTIONS)
    assert len(failed.value.texts) == 4
    cancel = edgedec.CancelToken()
    release = threading.Event()
    threading.Timer(0.2, cancel.cancel).start()
    hangs = SearchBy("particles", 2, lambda prefix, steps: [float(release.wait(60))] * 2)
    with pytest.raises(CancelledError):
        best(engine, CHAT, hangs, cancel=cancel, **OPTIONS)
    release.set()
    with pytest.raises(CancelledError):
        best(engine, CHAT, SearchBy(), cancel=cancel)
    for options in ({"grammar": edgedec.Grammar.regex("a+")}, {"temperature": 0.5}, {"verify": "block"}):
        with pytest.raises(OptionError, match="search"):
            best(engine, CHAT, SearchBy(), **options)
    for name, n in (("beam", 0), ("beam", 10**6), ("beam", True), ("best", 1), (None, 1)):
        with pytest.raises(OptionError):
            SearchBy(name, n)  # type: ignore[arg-type]
    assert engine.chat(CHAT, **OPTIONS).token_ids == plain


def test_what_was_written_is_not_lost(engine: edgedec.Engine) -> None:
    """Where the scorer fails or is cancelled, the texts are there; the last seeds wrap around."""
    with pytest.raises(ScorerError, match="2 numbers") as failed:
        best(engine, CHAT, BestOf(2, "score", scorer=lambda prefix, steps: [7]), **OPTIONS)
    texts = engine.samples(CHAT, 2, **OPTIONS)
    assert list(failed.value.texts) == [each.text for each in texts]
    cancel = edgedec.CancelToken()

    def cancelling(prefix: str, steps: Sequence[str], /) -> list[float]:
        cancel.cancel()
        return [0.5] * len(steps)

    found = best(engine, CHAT, BestOf(2, "score", scorer=cancelling), cancel=cancel, **OPTIONS)
    assert [each.token_ids for each in found.texts] == [each.token_ids for each in texts]
    last = best(engine, CHAT, BestOf("auto", answer="x"), **(OPTIONS | {"seed": 2**64 - 1, "max_tokens": 2}))
    assert len(last.texts) >= ROUND


PROMPT = "abcabcabcabcabcabc, and so on: abc"
SEED: dict[str, Any] = {"seed": 7, "ignore_end": True}
SEARCH = {name: load_plugin(SEARCHES, name) for name in plugins(SEARCHES)}


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[edgedec.Engine]:
    """The tiny model on the cpu runtime."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=96, draft=None) as engine:
        yield engine


def rarely_long(prefix: str, steps: Sequence[str], /) -> list[float]:
    """Score texts by what they say, never with 1."""
    return [0.5 + (sum(step.encode()) % 97) / 200 for step in steps]


def search(name: str, n: int = 4) -> SearchBy:
    """Return a search of a small size, with a scorer where it takes one."""
    return SearchBy(name, n, None if SEARCH[name].scored == "no" else rarely_long)


@pytest.mark.parametrize("name", SEARCH)
def test_a_search_that_ends_early_leaves_nothing(tiny: edgedec.Engine, name: str) -> None:
    """Cancelled after some tokens, or without memory for its texts: a clear error, and no branch is left."""
    plain = tiny.generate(PROMPT, max_tokens=8, **SEED).token_ids
    cancel = edgedec.CancelToken()

    def after_some(progress: Progress) -> None:
        if progress.phase == "searching" and progress.done > 9:
            cancel.cancel()

    with pytest.raises(CancelledError):
        best(tiny, PROMPT, search(name), cancel=cancel, on_progress=after_some, **SEED)
    assert tiny.generate(PROMPT, max_tokens=8, **SEED).token_ids == plain
    slot = tiny.pool.slots[0]
    kept, slot.fork_tokens = slot.fork_tokens, 64
    try:
        with pytest.raises(MemoryCapError):
            best(tiny, PROMPT, search(name, 8), **SEED)
    finally:
        slot.fork_tokens = kept
    assert tiny.generate(PROMPT, max_tokens=8, **SEED).token_ids == plain


@pytest.mark.parametrize("name", SEARCH)
def test_the_context_ends_a_search_as_any_text(tiny: edgedec.Engine, name: str) -> None:
    """Texts end where the context is full; twice the same search is the same text."""
    first, again = (best(tiny, PROMPT, search(name), **SEED) for _ in range(2))
    assert first.generation.finish_reason == "length"
    alone = tiny.generate(PROMPT, **SEED)
    assert len(first.generation.token_ids) == len(alone.token_ids)
    assert [text.token_ids for text in first.texts] == [text.token_ids for text in again.texts]
    assert (first.place, first.scores, first.why) == (again.place, again.scores, again.why)


@pytest.mark.parametrize("name", SEARCH)
def test_a_search_of_its_greatest_size_has_room(tiny: edgedec.Engine, name: str) -> None:
    """No search within its bounds asks for more branches than there may be."""
    found = best(tiny, PROMPT, search(name, SEARCH[name].most), max_tokens=5, **SEED)
    assert len(found.generation.token_ids) == 5


def test_where_rows_depend_on_each_other_a_search_is_refused(tiny_path: Path) -> None:
    """The error says what can't be done and where it can; the same for a judgement, before any text is written."""
    with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=96, draft=None) as tiny:
        for how in (SearchBy(), BestOf(2, "judge")):
            with pytest.raises(CapabilityError, match="choose another runtime"):
                best(tiny, PROMPT, how, on_progress=lambda progress: pytest.fail("it reads"))

"""Write, check, write again: which texts are written, which one is the best, and what a check costs at the most."""

import math
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import CHATML, tiny_llama

import edgedec
from edgedec.errors import MemoryCapError, OptionError, RequestError, ScorerError
from edgedec.grammar import Grammar
from edgedec.progress import CancelToken, Progress
from edgedec_apps.refine import RefineBy, Verdict, cut, refined, revised

pytestmark = pytest.mark.slow

ASKED = [{"role": "user", "content": "Say something."}]
DRAWN: dict[str, Any] = {"seed": 7, "temperature": 1.5, "max_tokens": 6, "ignore_end": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("refine")
    return tiny_llama(folder / "tiny.gguf", chat_template=CHATML, n_ctx_train=512, n_vocab=261)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[edgedec.Engine]:
    """It with 512 tokens of context."""
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=512) as loaded:
        yield loaded


def worth(text: str) -> float:
    """Return a score below 1 that scatters over the texts."""
    return sum(text.encode()) % 97 / 100


def check(prefix: str, text: str) -> Verdict:
    """Give a score below 1, and say it."""
    return Verdict(worth(text), f"only {worth(text)} of {prefix!r}")


def kinds(scores: Sequence[float], rounds: Sequence[int]) -> list[bool]:
    """Return by round whether it answers the best text, from the scores of all texts: the rule in a plain form."""
    found, gains, counts = [False, False], {False: [0.125], True: [0.125]}, {False: 0, True: 0}
    for turn in range(1, rounds[-1] + 1):
        places = [k for k, at in enumerate(rounds) if at == turn]
        for k in places:
            counts[found[turn]] += 1
            gains[found[turn]].append(max(0.0, scores[k] - max(scores[:k])))
        rates = {kind: sum(gains[kind]) / counts[kind] if counts[kind] else math.inf for kind in gains}
        found.append(rates[True] > rates[False])
    return found


@pytest.mark.parametrize("first", [7, 8, 21])
def test_every_text_is_that_of_its_seed_and_of_its_rounds_prompt(engine: edgedec.Engine, first: int) -> None:
    """Text 0 is greedy; text k draws with the seed plus k; a revised one answers the best text before its round."""
    how, options = RefineBy(check=check, n=3, texts=18), DRAWN | {"seed": first}
    found = refined(engine, ASKED, how, **options)
    assert [text.text for text in refined(engine, ASKED, how, **options).texts] == [text.text for text in found.texts]
    assert found.rounds == (0, *(turn for turn in range(1, 6) for _ in range(3)), 6, 6)
    assert found.texts[0].token_ids == engine.chat(ASKED, **options | {"temperature": 0}).token_ids
    expected = kinds(found.scores, found.rounds)
    assert found.revised == tuple(expected[turn] for turn in found.rounds)
    for k in range(1, 18):
        best = max(range(found.rounds.index(found.rounds[k])), key=found.scores.__getitem__)
        asked = revised(ASKED, found.texts[best].text, found.verdicts[best]) if found.revised[k] else ASKED
        assert found.texts[k].token_ids == engine.chat(asked, **options | {"seed": first + k}).token_ids, k
    assert found.scores == tuple(worth(text.text) for text in found.texts)
    assert found.place == max(range(18), key=found.scores.__getitem__)
    assert not found.passed
    assert "none passed" in found.why


def test_what_raises_the_score_goes_on(engine: edgedec.Engine) -> None:
    """Where the first revised texts are better, all later rounds revise; where nothing helps, the kinds take turns."""
    seen, helps = list[str](), [True]

    def check(prefix: str, text: str) -> Verdict:
        seen.append(text)
        return Verdict(0.6 if helps[0] and len(seen) > 3 else 0.0)

    how = RefineBy(check=check, n=2, texts=13)
    assert refined(engine, ASKED, how, **DRAWN).revised[::2] == (False, False, True, True, True, True, True)
    helps[0] = False
    assert refined(engine, ASKED, how, **DRAWN).revised[::2] == (False, False, True, False, True, False, True)


def test_drafts_stop_strings_and_grammars_change_nothing(engine: edgedec.Engine, path: Path) -> None:
    """With drafts all texts are the same, also where a stop string ends them or they keep to a grammar."""
    how = RefineBy(check=check, n=2, texts=5)
    plain = refined(engine, ASKED, how, **DRAWN | {"max_tokens": 24})
    stop = plain.texts[3].text[2:4]
    ways: list[dict[str, Any]] = [{}, {"stop": (stop,)}, {"grammar": Grammar.regex("[a-c]{4,30}"), "ignore_end": False}]
    with edgedec.load(path, runtime="cpu", draft="suffix", n_ctx=512) as drafting:
        for way in ways:
            options = DRAWN | {"max_tokens": 24} | way
            texts = [text.text for text in refined(engine, ASKED, how, **options).texts]
            assert [text.text for text in refined(drafting, ASKED, how, **options).texts] == texts
            assert all(stop not in text for text in texts) or "stop" not in way


def test_it_ends_with_the_text_that_passes(engine: edgedec.Engine) -> None:
    """No round follows; the texts of the same round are kept and checked."""
    texts = refined(engine, ASKED, RefineBy(check=check, n=3, texts=7), **DRAWN).texts
    for wanted, n in ((0, 1), (2, 4), (5, 7)):

        def passes(prefix: str, text: str, wanted: int = wanted) -> Verdict:
            return Verdict(1.0) if text == texts[wanted].text else check(prefix, text)

        found = refined(engine, ASKED, RefineBy(check=passes, n=3), **DRAWN)
        assert (found.place, len(found.texts), found.passed) == (wanted, n, True)
        assert found.why == "it passed the check"


def test_at_temperature_0_every_round_revises_until_one_does_not_help(engine: edgedec.Engine) -> None:
    """Several texts would be the same, and so would a text that answers the same again."""
    scores = [0.1, 0.2, 0.3, 0.3, 0.4]
    how = RefineBy(check=lambda prefix, text: Verdict(scores.pop(0)), n=3, texts=9)
    found = refined(engine, ASKED, how, **DRAWN | {"temperature": 0})
    assert (found.rounds, found.revised) == ((0, 1, 2, 3), (False, True, True, True))
    assert (found.place, found.why) == (2, "none passed; its score, 0.300, is the highest of 4")


def test_texts_tokens_and_seconds_end_it(engine: edgedec.Engine) -> None:
    """Tokens are looked at before a round; seconds end a check in the middle, whose text then has no verdict."""
    assert len(refined(engine, ASKED, RefineBy(check=check, n=3), **DRAWN).texts) == 13
    assert len(refined(engine, ASKED, RefineBy(check=check, n=3, texts=1), **DRAWN).texts) == 1
    assert len(refined(engine, ASKED, RefineBy(check=check, n=3, tokens=7), **DRAWN).texts) == 4
    release = threading.Event()

    def hangs(prefix: str, text: str) -> Verdict:
        return check(prefix, text) if not calls else Verdict(float(release.wait(60)))

    calls: list[str] = []
    found = refined(engine, ASKED, RefineBy(check=hangs, n=2, texts=1), **DRAWN)
    calls.append("from now on it hangs")
    try:
        cut_off = refined(engine, ASKED, RefineBy(check=hangs, n=2, seconds=0.3), **DRAWN)
    finally:
        release.set()
    assert (cut_off.verdicts, cut_off.text, cut_off.why) == ((None,), found.text, "nothing was checked")


def test_cancelling_returns_the_best_text_so_far(engine: edgedec.Engine) -> None:
    """Also where the check cancels in the middle of a round; what was not checked can't be the best."""
    cancel, seen = CancelToken(), list[str]()

    def cancels(prefix: str, text: str) -> Verdict:
        seen.append(text)
        if len(seen) == 3:
            cancel.cancel()
        return check(prefix, text)

    found = refined(engine, ASKED, RefineBy(check=cancels, n=3), cancel=cancel, **DRAWN)
    checked = [verdict is not None for verdict in found.verdicts]
    assert len(found.texts) == 4
    assert checked[:2] == [True, True]
    assert checked[3] is False
    assert found.place == max(range(4), key=lambda k: found.scores[k] if checked[k] else -1)
    nothing = refined(engine, ASKED, RefineBy(check=check), cancel=cancel, **DRAWN)
    assert [text.finish_reason for text in nothing.texts] == ["cancelled"]


def test_a_chat_that_does_not_fit_is_asked_again_as_it_is(engine: edgedec.Engine) -> None:
    """The texts of such a round are those of the prompt alone."""
    long = [{"role": "user", "content": "x" * 300}]
    how = RefineBy(check=lambda prefix, text: Verdict(0.0, "y" * 200), n=1, texts=3)
    found = refined(engine, long, how, **DRAWN)
    assert found.texts[2].token_ids == engine.chat(long, **DRAWN | {"seed": 9}).token_ids
    assert found.revised == (False,) * 3
    assert refined(engine, long, how, **DRAWN | {"temperature": 0}).rounds == (0, 1)


def test_under_a_memory_cap_all_texts_are_those_of_no_cap(engine: edgedec.Engine, path: Path) -> None:
    """Where the plan has no room for the texts of a longer chat, they answer the prompt; drafts change nothing."""
    wordy = RefineBy(check=lambda prefix, text: Verdict(worth(text), "y" * 200), n=4, texts=9)
    short = RefineBy(check=check, n=2, texts=9)
    with edgedec.load(path, runtime="cpu", draft="suffix", n_ctx=512, memory="2GB") as capped:
        found = refined(capped, ASKED, wordy, **DRAWN)
        assert not any(found.revised)
        for k in range(1, 9):
            assert found.texts[k].token_ids == engine.chat(ASKED, **DRAWN | {"seed": 7 + k}).token_ids
        texts = [text.text for text in refined(capped, ASKED, short, **DRAWN).texts]
        assert texts == [text.text for text in refined(engine, ASKED, short, **DRAWN).texts]
        with pytest.raises(MemoryCapError, match="room for"):
            refined(capped, ASKED, RefineBy(check=check, n=8), **DRAWN | {"max_tokens": 400})


def test_a_cancelled_round_has_the_beginnings_of_its_texts(engine: edgedec.Engine) -> None:
    """The best text is one that was checked; those that were cut in the middle begin as they would have gone on."""
    cancel, steps, long = CancelToken(), list[int](), DRAWN | {"max_tokens": 40}

    def on_progress(progress: Progress) -> None:
        if progress.phase == "generating" and progress.total == 120:
            steps.append(progress.done)
            if len(steps) == 30:
                cancel.cancel()

    how = RefineBy(check=check, n=3, texts=4)
    found = refined(engine, ASKED, how, cancel=cancel, on_progress=on_progress, **long)
    whole = refined(engine, ASKED, how, **long)
    assert [text.finish_reason for text in found.texts] == ["length", *["cancelled"] * 3]
    for cut_off, text in zip(found.texts, whole.texts, strict=True):
        assert text.token_ids[: len(cut_off.token_ids)] == cut_off.token_ids
    assert (found.place, found.verdicts) == (0, (whole.verdicts[0], None, None, None))


@pytest.mark.parametrize(
    ("code", "score", "words"),
    [
        ("print([0.5]); print('half', file=sys.stderr)", 0.5, "half"),
        ("print([1])", 1.0, ""),
        ("sys.exit('2 of 3 tests failed')", 0.0, "2 of 3 tests failed"),
        ("os.kill(os.getpid(), 9)", 0.0, "The check ended with status -9."),
        ("time.sleep(60)", 0.0, "The check took longer than 0.7 s and was ended."),
        ("print('x')", 0.0, "The check printed b'x\\n', and no JSON array with one score."),
        ("print([1, 1])", 0.0, "The check printed b'[1, 1]\\n', and no JSON array with one score."),
        ("print('[NaN]')", 0.0, "The check printed b'[NaN]\\n', and no JSON array with one score."),
        (
            "os.write(1, bytes(2 << 20)); time.sleep(60)",
            0.0,
            "The check printed more than 1048576 bytes and was ended.",
        ),
        ("os.write(2, b'\\xff\\x00z'); print([0])", 0.0, "\ufffd\x00z"),
        ("os.fork() or time.sleep(60); print([0.25])", 0.25, ""),
        ("os.fork() or (os.setsid(), time.sleep(3)); print([0.25])", 0.25, ""),
    ],
)
def test_a_command_that_misbehaves_costs_its_time_and_its_text(
    engine: edgedec.Engine, code: str, score: float, words: str
) -> None:
    """The verdict says what went wrong; nothing of the command is waited for longer than its limit, or read after."""
    command = [sys.executable, "-c", f"import os, sys, time; {code}"]
    found = refined(engine, ASKED, RefineBy(check=command, texts=1, check_seconds=0.7), **DRAWN)
    assert found.verdicts == (Verdict(score, words),)
    assert found.passed == (score == 1)
    assert "edgedec-scorer" not in [thread.name for thread in threading.enumerate()]


def test_a_flood_of_words_is_cut() -> None:
    """The model is shown the beginning and the end."""
    assert len(cut("a" * 10_000 + "the end")) == 1505
    assert cut("a" * 10_000 + "the end").endswith("the end")
    turn = revised(ASKED, "mine", Verdict(0.0, "\x1b[31mred"))[-1]["content"]
    assert "\x1b" not in turn
    assert "[31mred" in turn


def test_what_is_refused(engine: edgedec.Engine, tmp_path: Path) -> None:
    """Values out of range, commands that do not start, and functions that are no checks; the texts are not lost."""
    cases: list[dict[str, Any]] = [{"n": 0}, {"n": 257}, {"texts": 0}, {"texts": True}, {"seconds": 0}, {"tokens": 0}]
    for wrong in [*cases, {"check": "x"}]:
        with pytest.raises(OptionError):
            RefineBy(**{"check": check, **wrong})
    with pytest.raises(ScorerError, match="does not start") as failed:
        refined(engine, ASKED, RefineBy(check=[str(tmp_path)]), **DRAWN)
    assert failed.value.texts == (engine.chat(ASKED, **DRAWN | {"temperature": 0}).text,)
    results: list[Any] = [0.5, (0.5,), (0.5, None), Verdict(2.0), Verdict(float("nan"))]
    while results:
        with pytest.raises(ScorerError, match="must return"):
            refined(engine, ASKED, RefineBy(check=lambda prefix, text: results.pop()), **DRAWN)
    with pytest.raises(RequestError, match="flavour"):
        refined(engine, ASKED, RefineBy(check=check), flavour=1, **DRAWN)


def test_a_function_that_hangs_ends_the_work_with_its_texts(engine: edgedec.Engine) -> None:
    """Python can't end a thread, so such a check is an error, after its seconds."""
    release = threading.Event()
    hangs = RefineBy(check=lambda prefix, text: Verdict(float(release.wait(60))), check_seconds=0.2)
    try:
        with pytest.raises(ScorerError, match=r"longer than 0\.2 s"):
            refined(engine, ASKED, hangs, **DRAWN)
    finally:
        release.set()

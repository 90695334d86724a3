"""Where a text ends, with drafts as without, that an interrupted one goes on to the same end; random requests."""

import random
import sys
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import edgedec
import edgedec.decoding.step as steps
from edgedec.api.best_text import BestOf, best
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_methods.futures import Futures

pytestmark = pytest.mark.slow

Pair = tuple[edgedec.Engine, edgedec.Engine]
PROMPT = "abcabcabcabcabcabc, and so on: abc"
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 60}


@pytest.fixture(scope="module")
def pair(tiny_path: Path) -> Iterator[Pair]:
    """The tiny model without drafts, and with long ones."""
    with (
        edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft=None) as plain,
        edgedec.load(tiny_path, runtime="cpu", n_ctx=256, draft="suffix", n_draft_max=15) as drafting,
    ):
        yield plain, drafting


seen = attrgetter(
    *"text token_ids finish_reason stop_string is_whole logprob_sum constraint_logprob outputs".split()
)  # all that a caller sees of a text, but for counts and times


@pytest.mark.parametrize("stop", [("cabcabca",), ("abda", "ca"), ("b",)])
def test_a_stop_string_within_a_draft_ends_what_is_counted_and_learned(pair: Pair, stop: tuple[str, ...]) -> None:
    """The grammar's log-probability, and the texts that follow by way of Futures, are those of plain decoding."""
    found: list[list[Any]] = []
    n_drafts = 0
    for engine in pair:
        futures = Futures()
        engine.generate(PROMPT, **WARM, grammar=Grammar.regex("(abc|abd)*x"))  # so that there is something to propose
        texts = [
            engine.generate(
                PROMPT, **{**WARM, "seed": seed}, stop=stop, grammar=Grammar.regex("(abc|abd)*x"), futures=futures
            )
            for seed in range(6)
        ]
        n_drafts = sum(text.stats.n_accepted_tokens for text in texts)
        found.append([*map(seen, texts), len(futures)])
    assert n_drafts > 0
    assert found[0] == found[1]


def test_a_text_that_is_cancelled_within_a_draft_is_that_of_its_tokens(pair: Pair) -> None:
    """Whoever cancels behind the k-th token gets the text, and teaches the futures, that plain decoding would."""
    for n in (1, 4, 7, 10):
        found: list[list[Any]] = []
        for engine in pair:
            futures, rounds = Futures(), list[Any]()
            for seed in range(3):
                cancel = CancelToken()
                stream = engine.stream(
                    PROMPT,
                    **{**WARM, "seed": seed},
                    stop=("abcabcabx",),
                    grammar=Grammar.regex("(abc|abd)*x"),
                    futures=futures,
                    cancel=cancel,
                )
                for count, _ in enumerate(stream, 1):
                    if count == n:
                        cancel.cancel()
                rounds += [seen(stream.generation), len(futures)]
            found.append(rounds)
        assert found[0] == found[1]


def test_a_caller_that_stops_the_texts_sees_the_same_ends(pair: Pair) -> None:
    """`until` gets the texts in the order in which plain decoding ends them, and the others end where it would."""
    for seed in range(8):
        found: list[list[Any]] = []
        for engine in pair:
            calls: list[tuple[str, ...]] = []

            def two(ended: Sequence[Generation], calls: list[tuple[str, ...]] = calls) -> bool:
                calls.append(tuple(text.text for text in ended))
                return len(ended) >= 2

            texts = engine.samples(PROMPT, 5, until=two, grammar=Grammar.regex("(abc|abd)*x"), **{**WARM, "seed": seed})
            found.append([calls, *map(seen, texts)])
        assert found[0] == found[1]


@pytest.mark.parametrize("choose", ["first", "vote"])
def test_the_choice_is_that_of_plain_decoding(pair: Pair, choose: str) -> None:
    """The chosen text, those that were counted and where the others end do not depend on drafts."""
    for seed in range(12):
        how = BestOf(n=5, choose=choose, answer="(ab.)x")
        found = [
            best(engine, PROMPT, how, grammar=Grammar.regex("((abc){1,9}|(abd){2,5})x"), **{**WARM, "seed": 100 * seed})
            for engine in pair
        ]
        assert [(c.place, c.answers, c.why, *map(seen, c.texts)) for c in found[:1]] == [
            (c.place, c.answers, c.why, *map(seen, c.texts)) for c in found[1:]
        ]


RESUMED = "a rose is a rose is"
GREEDY: Any = {"temperature": 0.0, "max_tokens": 24, "ignore_end": True}
SAMPLED: Any = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "repetition_penalty": 1.2, "ignore_end": True}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_resumed_text_is_the_whole_text(tiny: edgedec.Engine, options: Any) -> None:
    """Wherever it was cut, it goes on with the same tokens; a stream begins with those that were there."""
    whole = tiny.generate(RESUMED, **options)
    expected = (whole.token_ids, whole.text, whole.finish_reason)
    for n in (1, 11, 23, 24):
        resumed = tiny.generate(RESUMED, resume=whole.token_ids[:n], **options)
        assert (resumed.token_ids, resumed.text, resumed.finish_reason) == expected
    stream = tiny.stream(RESUMED, resume=whole.token_ids[:5], **options)
    assert tuple(output.token_id for output in stream) == whole.token_ids


def test_a_stop_string_may_lie_across_the_cut(tiny: edgedec.Engine) -> None:
    """The text so far counts for what ends a text."""
    whole = tiny.generate(RESUMED, **SAMPLED)
    stop = whole.text[len(whole.text) // 2 : len(whole.text) // 2 + 3]
    ended = tiny.generate(RESUMED, stop=(stop,), **SAMPLED)
    n = len(ended.token_ids)
    resumed = tiny.generate(RESUMED, stop=(stop,), resume=ended.token_ids[: n - 1], **SAMPLED)
    assert (resumed.text, resumed.stop_string, resumed.finish_reason) == (ended.text, stop, "stop")


def test_what_can_not_be_resumed_is_refused(tiny: edgedec.Engine) -> None:
    """Ids outside of the vocabulary, more tokens than the context has, and several texts."""
    for ids, message in (((10**6,), "outside the vocabulary"), ((5,) * 300, "to resume are over the context of 256")):
        with pytest.raises(RequestError, match=message):
            tiny.generate(RESUMED, resume=ids)
    with pytest.raises(RequestError, match="resume"):
        tiny.samples(RESUMED, 2, resume=(5,))


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "texts"))
    import random_same_text

    return random_same_text


def test_drafts_change_nothing_that_a_caller_sees(harness: ModuleType, tmp_path: Path) -> None:
    """In 8 drawn configurations of the cpu runtime, no request differs, and drafts are accepted."""
    from drawn_requests import Files, drawn

    files, outcomes = Files(tmp_path), []
    for number in range(8):
        config = drawn(random.Random(f"test:{number}"), real=False, only_cpu=True)
        outcomes.append(harness.compared(number, config, files))
    assert [outcome.different for outcome in outcomes] == [{}] * len(outcomes)
    assert sum(outcome.n_requests for outcome in outcomes) > 40
    assert sum(outcome.n_accepted for outcome in outcomes) > 200


def test_a_draft_that_chooses_a_token_is_found_and_can_be_replayed(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a verification that takes the first drafted token as it is, the run differs, and says which request."""
    from edgedec.draft import Draft, Verification
    from edgedec.verification.coupled import ChooseToken, verify_coupled

    def lax(draft: Draft, choose: ChooseToken) -> Verification:
        return Verification((), (int(draft.tokens[0]),)) if len(draft) else verify_coupled(draft, choose)

    monkeypatch.setattr(steps, "verify_coupled", lax)
    monkeypatch.setattr(harness, "has_real", lambda: False)
    counts = harness.run(1000, 0, 1, tmp_path, only=3)
    assert counts["different"] > 0
    assert counts["differing"] == [3]
    assert "replay: --seed 0 --only 3" in capsys.readouterr().err

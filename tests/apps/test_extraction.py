"""extract: the most probable quotations equal those of scoring every span, for fewer rows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.real_models import real_model
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import CancelledError, OptionError, PromptTooLongError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.extraction import Extraction, extract, question_text
from edgedec_apps.span_search import starts_of

pytestmark = pytest.mark.slow

PASSAGE = (
    "The café at the tower opened in 1889. It was named after Gustave Eiffel, whose company built it — for a fair."
)
QUESTION = "Who is the café named after?"


@pytest.fixture(scope="module")
def engine() -> Any:
    with edgedec.load(real_model("smollm2-135m.gguf"), runtime="cpu", draft="off", offline=True) as loaded:
        yield loaded


def every_span(engine: edgedec.Engine, question: str, passage: str, most: int) -> dict[tuple[int, ...], float]:
    """Return the log-probability of every span, each token evaluated by itself after all that stands before it."""
    text = question_text(question, passage)
    lead = "" if engine.template is not None else " "
    ids = engine.chat_ids([{"role": "user", "content": text}]) if engine.template is not None else None
    prompt = list(ids if ids is not None else engine.prompt_ids(f"{text}\nAnswer:"))
    tokenizer, session, found = engine.tokenizer, engine.session(), dict[tuple[int, ...], float]()
    end_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_end(i)]

    def logprobs(tokens: list[int], n_past: int) -> Any:
        row = session.forward(np.array(tokens, np.int32), n_past=n_past).logits[0].astype(np.float64)
        return row - row.max() - math.log(np.exp(row - row.max()).sum())

    first = logprobs(prompt, 0)
    for start in starts_of(tokenizer, passage, lead, most):
        total, after = 0.0, first
        for i, (token, end) in enumerate(zip(start.token_ids, start.ends, strict=True)):
            total += after[token]
            after = logprobs([token], len(prompt) + i)
            if end >= 0:
                found[tuple(start.token_ids[: i + 1])] = total + float(np.logaddexp.reduce(after[end_ids]))
    session.close()
    return found


def check(engine: edgedec.Engine, found: Extraction, scores: dict[tuple[int, ...], float], passage: str) -> None:
    """Require that what was found is the best of all spans, and that places and texts agree."""
    best = sorted(scores.values(), reverse=True)[: len(found.spans)]
    assert [span.logprob for span in found.spans] == pytest.approx(best, abs=1e-6)
    for span in found.spans:
        assert scores[span.token_ids] == pytest.approx(span.logprob, abs=1e-6)
        assert span.probability == math.exp(span.logprob)
        assert passage[span.start : span.end] == span.text == engine.tokenizer.decode(list(span.token_ids)).lstrip()


@pytest.fixture(scope="module")
def scores(engine: edgedec.Engine) -> dict[tuple[int, ...], float]:
    """The log-probability of every span of PASSAGE."""
    return every_span(engine, QUESTION, PASSAGE, 12)


@pytest.mark.parametrize("n", [1, 3, 10])
def test_the_best_spans_are_those_of_scoring_every_span(
    engine: edgedec.Engine, scores: dict[tuple[int, ...], float], n: int
) -> None:
    """On a model that answers, whose search takes fewer rows than there are tokens to score; and on a warm cache."""
    for _ in range(2):
        found = extract(engine, QUESTION, PASSAGE, n=n, max_tokens=12)
        assert len(found.spans) == n
        check(engine, found, scores, PASSAGE)
        assert n == 10 or found.n_rows < 0.75 * found.n_span_tokens
        assert found.n_forwards < found.n_rows
    assert found.n_reused_tokens > 0


def test_no_quotation_goes_from_one_passage_to_the_next(engine: edgedec.Engine) -> None:
    """Of two passages, the spans are those of each behind the prompt of both; places count in the joined text."""
    parts = ["The tower was built by Gustave", "Eiffel was born in Dijon."]
    joined = "\n\n".join(parts)
    found = extract(engine, "Who built the tower?", parts, n=100, max_tokens=4)
    assert len(found.spans) > 20
    assert all("\n\n" not in span.text and joined[span.start : span.end] == span.text for span in found.spans)
    assert {span.start > len(parts[0]) for span in found.spans} == {True, False}
    whole = extract(engine, "Who built the tower?", joined, n=100, max_tokens=4)
    assert any("\n\n" in span.text for span in whole.spans)
    empty = "the passage is empty or no text"
    for wrong, says in (([], empty), (["x", ""], empty), (["x", 3], r"passage\[1\] is 3; it must be a text")):
        with pytest.raises(RequestError, match=says):
            extract(engine, "Who?", wrong)  # type: ignore[arg-type]


def test_the_text_after_an_extraction_is_that_of_a_cold_start(engine: edgedec.Engine) -> None:
    """The search's rows leave nothing in the KV cache, and the prompt's may be used again."""
    messages = [{"role": "user", "content": question_text(QUESTION, PASSAGE)}]
    cold = engine.chat(messages, temperature=0, max_tokens=8, reuse="exact")
    engine.generate("Something else", temperature=0, max_tokens=2)
    extract(engine, QUESTION, PASSAGE)
    warm = engine.chat(messages, temperature=0, max_tokens=8, reuse="exact")
    assert (warm.token_ids, warm.stats.n_reused_tokens > 0) == (cold.token_ids, True)


def test_a_runtime_without_trees_finds_the_same(engine: edgedec.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forwards are paths of tokens, each behind the other."""
    trees = extract(engine, QUESTION, PASSAGE, max_tokens=12)
    without = replace(engine.model.capabilities, trees=False, max_rows=4)
    monkeypatch.setattr(engine.model, "capabilities", without)
    chains = extract(engine, QUESTION, PASSAGE, max_tokens=12)
    assert chains.spans == trees.spans
    assert chains.n_forwards > trees.n_forwards


@pytest.mark.parametrize("runtime", ["cpu", "reference"])
def test_a_model_that_finds_everything_likely_is_searched_exactly(tmp_path: Path, runtime: str) -> None:
    """Random weights: hardly a bound prunes anything; more spans are asked for than there are; there is no template."""
    passage = "a bc, ab é bca " * 2
    with edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime=runtime, draft="off", n_ctx=512) as tiny:
        scores = every_span(tiny, "b?", passage, 5)
        check(tiny, extract(tiny, "b?", passage, n=4, max_tokens=5), scores, passage)
        every = extract(tiny, "b?", passage, n=100, max_tokens=2)
        few = every_span(tiny, "b?", passage, 2)
        assert len(every.spans) == min(100, len(few))
        check(tiny, every, few, passage)


def test_the_room_behind_the_prompt_bounds_a_quotation(tmp_path: Path) -> None:
    """Only what a quotation of the passage may really take must fit; else the message says how much there is."""
    with edgedec.load(tiny_llama(tmp_path / "tiny.gguf"), runtime="cpu", draft="off", n_ctx=256) as tiny:
        short = extract(tiny, "a?", "b abc ab cab", max_tokens=tiny.n_ctx, n=3)
        assert short.spans == extract(tiny, "a?", "b abc ab cab", max_tokens=20, n=3).spans
        passage = "abc " * 25
        room = tiny.n_ctx - extract(tiny, "a?", passage, max_tokens=5).n_prompt_tokens
        assert 0 < room < 100
        assert extract(tiny, "a?", passage, max_tokens=room).spans
        for most in (room + 1, tiny.n_ctx, 512):
            with pytest.raises(
                OptionError, match=f"max_tokens is {most}; it must be at most {room}: the context of 256"
            ):
                extract(tiny, "a?", passage, max_tokens=most)


def test_what_can_not_be_extracted_is_refused(engine: edgedec.Engine) -> None:
    """Empty texts, numbers out of range, a passage that does not fit, a search that is cancelled."""
    for question, passage, says in (
        (" ", PASSAGE, "is empty or no"),
        (QUESTION, "", "is empty or no"),
        (3, PASSAGE, "is 3;"),
    ):
        with pytest.raises(RequestError, match=says):
            extract(engine, question, passage)  # type: ignore[arg-type]
    for name, value in (("n", 0), ("n", 101), ("max_tokens", 0), ("max_tokens", True), ("n", 1.5)):
        with pytest.raises(OptionError, match=name):
            extract(engine, QUESTION, PASSAGE, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError):
        extract(engine, QUESTION, PASSAGE * 400)
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        extract(engine, QUESTION, PASSAGE, cancel=cancel)
    assert extract(engine, QUESTION, PASSAGE, n=1).spans

"""What ends a text, with drafts and without: stop_unsure before a token that is likely wrong; min_tokens not yet."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.real_models import real_model
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.cost_curve import CostCurve
from edgedec.errors import RequestError
from edgedec.grammar import Grammar
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.model_card import ModelCard
from edgedec.sequence import Generation
from edgedec_methods.unsure import FITS, GENERAL, Doubt, Fit, unsure_stop
from edgedec_runtimes.cpu.logit_ops import NativeRowOps

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"
N = 40
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "top_p": 1.0, "seed": 6},
    {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 7},
]
CARD = ModelCard("m", "qwen2", "cpu", 256, 896, 24, 64, "f")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with random weights."""
    return tiny_llama(tmp_path_factory.mktemp("unsure") / "tiny.gguf")


@pytest.fixture(scope="module")
def plain() -> Iterator[edgedec.Engine]:
    """smollm2-135m, which drafts nothing."""
    with edgedec.load(real_model("smollm2-135m.gguf"), runtime="cpu", draft="off", offline=True) as engine:
        yield engine


@pytest.mark.parametrize("ops", [NUMPY_ROW_OPS, NativeRowOps()])
def test_the_signs_of_doubt_are_those_of_the_softmax(ops: LogitOps) -> None:
    """p, entropy and margin of every token of random rows equal a plain computation in float64."""
    rng = np.random.default_rng(0)
    for scale in (0.1, 3.0, 30.0):
        row = rng.normal(0, scale, 50).astype(np.float32)
        wide = row.astype(np.float64)
        p = np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum()
        bits = -sum(each * math.log2(each) for each in p.tolist() if each > 0)
        for token in range(50):
            found = Doubt.of(row, token, ops)
            margin = p[token] - np.delete(p, token).max()
            assert (found.p, found.entropy, found.margin) == pytest.approx((p[token], bits, margin), abs=2e-5)


def test_a_row_that_is_not_finite_has_no_chance() -> None:
    """Its chance is not a number, so no text ends because of it; a vocabulary of one token has no rival."""
    row = np.zeros(8, np.float32)
    row[3] = np.nan
    assert math.isnan(GENERAL.chance(Doubt.of(row, 2, NUMPY_ROW_OPS)))
    assert Doubt.of(np.zeros(1, np.float32), 0, NUMPY_ROW_OPS) == Doubt(1.0, 0.0, 1.0)


def test_the_chance_is_a_logistic_function() -> None:
    """Each coefficient counts for its own sign, and extreme probabilities stay in bounds."""
    doubt = Doubt(0.7, 1.5, 0.4)
    total = 0.1 + 0.2 * math.log(0.7 / 0.3) - 0.3 * 1.5 + 0.5 * 0.4
    assert Fit(0.1, 0.2, -0.3, 0.5).chance(doubt) == pytest.approx(1 / (1 + math.exp(-total)), rel=1e-12)
    assert 0 < GENERAL.chance(Doubt(0.0, 17.0, -1.0)) < 0.01
    assert 0.99 < GENERAL.chance(Doubt(1.0, 0.0, 1.0)) < 1


def test_the_coefficients_are_those_of_the_benchmark() -> None:
    """The table equals benchmarks/results/stop_unsure.json."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "stop_unsure.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    shapes = {tuple(shape): name for name, shape in result["shapes"].items()}
    assert {shapes[shape]: asdict(fit) for shape, fit in FITS.items()} == result["fits"]
    assert asdict(GENERAL) == result["general_fit"]


def test_a_model_without_a_fit_of_its_own_gets_the_general_one_with_a_note() -> None:
    """So does a model of which layers are left out; without a threshold there is nothing to judge by."""
    assert unsure_stop(None, CARD) is None
    own = unsure_stop(0.5, CARD)
    assert own is not None
    assert (own.fit, own.note) == (FITS["qwen2", 24, 896], "")
    for card in (
        ModelCard("m", "llama", "cpu", 256, 896, 24, 64, "f"),
        ModelCard("m", "qwen2", "cpu", 256, 896, 24, 64, "f", left_out=((3, 0),)),
    ):
        other = unsure_stop(0.5, card)
        assert other is not None
        assert other.fit == GENERAL
        assert "other models" in other.note


def chances(engine: edgedec.Engine, prompt: str, token_ids: tuple[int, ...]) -> list[float]:
    """Return the chance of each token of a text, from forwards of one token each."""
    ids, result = [*engine.tokenizer.encode(prompt), *token_ids], []
    stop = unsure_stop(0.5, engine.card)
    assert stop is not None
    n_prompt = len(ids) - len(token_ids)
    with closing(engine.session()) as session:
        forward = session.forward(np.array(ids[:n_prompt], np.int32), n_past=0)
        for place in range(n_prompt, len(ids)):
            result.append(stop.chance(forward.logits[0], ids[place], forward.ops))
            forward = session.forward(np.array([ids[place]], np.int32), n_past=place)
    return result


def summary(result: Generation) -> tuple[tuple[int, ...], str, str, float | None]:
    """Return what must not depend on drafts."""
    return result.token_ids, result.text, result.finish_reason, result.stats.chance_right


@pytest.fixture(scope="module")
def ends(plain: edgedec.Engine) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Options of requests that end in different places, with what plain decoding makes of them."""
    found = []
    for way in WAYS:
        whole = plain.generate(PROMPT, max_tokens=N, ignore_end=True, **way)
        known = chances(plain, PROMPT, whole.token_ids)
        lowest = sorted(set(np.minimum.accumulate(known).tolist()))
        for least in lowest[:-1][:3]:
            options = way | {"stop_unsure": math.nextafter(least, 1)}
            n = next(i for i, chance in enumerate(known) if chance < options["stop_unsure"])
            result = plain.generate(PROMPT, max_tokens=N, ignore_end=True, **options)
            assert summary(result)[0] == whole.token_ids[:n]
            assert (result.finish_reason, result.stats.chance_right) == ("unsure", known[n])
            assert len(result.outputs) == n == result.stats.n_generated_tokens
            assert "unsure" in " ".join(result.stats.notes)
            found.append((options, summary(result)))
    assert len(found) >= 8
    assert len({len(expected[0]) for _, expected in found}) >= 4
    return found


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("draft", "n_draft_max"),
    [("suffix+recycling+stand", 13), pytest.param("suffix", 2, marks=pytest.mark.long), ("auto", 15)],
)
def test_drafts_do_not_change_where_a_text_ends(
    draft: str, n_draft_max: int, ends: list[tuple[dict[str, Any], tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, text, reason and chance are ==, greedy and sampled, whatever was drafted beyond the end."""
    monkeypatch.setattr("edgedec.api.load.cost_curve", lambda *_, **__: CostCurve({1: 0.01, 64: 0.01}))
    model = real_model("smollm2-135m.gguf")
    with edgedec.load(model, draft=draft, n_draft_max=n_draft_max, runtime="cpu", offline=True) as engine:
        results = [engine.generate(PROMPT, max_tokens=N, ignore_end=True, **options) for options, _ in ends]
    assert [summary(result) for result in results] == [expected for _, expected in ends]
    assert any(result.stats.n_accepted_tokens for result in results)


@pytest.mark.slow
@pytest.mark.model
def test_what_ends_the_text_first_is_the_reason(plain: edgedec.Engine, ends: list[Any]) -> None:
    """max_tokens or a stop string before the unsure token end the text for their own reason, without a chance."""
    options, (token_ids, text, *_) = max(ends, key=lambda end: len(end[1][0]))
    cut = plain.generate(PROMPT, ignore_end=True, **options | {"max_tokens": len(token_ids)})
    assert summary(cut) == (token_ids, text, "length", None)
    stopped = plain.generate(PROMPT, ignore_end=True, max_tokens=N, stop=(text.strip()[:4],), **options)
    assert (stopped.finish_reason, stopped.stats.chance_right) == ("stop", None)
    one_more = plain.generate(PROMPT, ignore_end=True, **options | {"max_tokens": len(token_ids) + 1})
    assert one_more.finish_reason == "unsure"


@pytest.mark.slow
def test_requests_beside_each_other_end_where_they_end_alone(tiny: Path) -> None:
    """Six requests, three at a time with drafts: == one after the other without."""
    prompts = ["one, two, three, one, two", "x", "Some text to go on from", "one, two, three, four", "ab ab ab", "yes"]
    with edgedec.load(tiny, runtime="cpu", draft="off") as engine:
        known = [
            chances(engine, prompt, engine.generate(prompt, temperature=0.9, seed=5, max_tokens=24).token_ids)
            for prompt in prompts
        ]
        least = float(np.median([min(each) for each in known]))
        options: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 24, "stop_unsure": least}
        alone = [summary(engine.generate(prompt, **options)) for prompt in prompts]
    assert {end[2] for end in alone} >= {"unsure", "length"}
    parallel = edgedec.load(tiny, runtime="cpu", n_parallel=3, draft="suffix+recycling", n_threads=2)
    with parallel as engine, ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: summary(engine.generate(prompt, **options)), prompts))
    assert together == alone


def test_the_first_token_may_be_the_unsure_one(tiny: Path) -> None:
    """The text is empty then; the note says whose fit it was, and the next request is as ever."""
    with edgedec.load(tiny, runtime="cpu", draft="off") as engine:
        before = engine.generate("Once", temperature=0, max_tokens=8, ignore_end=True)
        empty = engine.generate("Once", temperature=0, max_tokens=8, stop_unsure=0.999)
        assert (empty.text, empty.token_ids, empty.outputs, empty.finish_reason) == ("", (), (), "unsure")
        assert "other models" in " ".join(empty.stats.notes)
        assert engine.generate("Once", temperature=0, max_tokens=8, ignore_end=True).token_ids == before.token_ids


def test_what_can_not_be_kept_is_refused(tiny: Path) -> None:
    """A threshold beyond 0 and 1, and one beside a grammar."""
    with edgedec.load(tiny, runtime="cpu", draft="off") as engine:
        for value in (0, 1, -0.5, 1.5, math.nan, "much", True):
            with pytest.raises(RequestError, match="stop_unsure"):
                engine.generate("Once", max_tokens=4, stop_unsure=value)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"grammar decides.*stop_unsure"):
            engine.generate("Once", max_tokens=4, stop_unsure=0.5, grammar=Grammar.regex("a+"))


SHORT_PROMPT = "the cat and the cat and the "


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
def test_a_text_has_as_many_tokens(tmp_path: Path, way: dict[str, Any]) -> None:
    """No text is shorter, and with drafts it is the same; a plain text that is long enough stays as it is."""
    texts = []
    for draft in ("off", "suffix"):
        with edgedec.load(tiny_llama(tmp_path / f"{draft}.gguf"), runtime="cpu", n_ctx=256, draft=draft) as engine:
            (end, *_) = (i for i in range(engine.tokenizer.n_vocab) if engine.tokenizer.is_end(i))
            likely = way | {"logit_bias": {end: 8.0}, "max_tokens": 60}
            plain = engine.generate(SHORT_PROMPT, **likely)
            n = len(plain.token_ids)
            for least in (0, n, n + 9):
                longer = engine.generate(SHORT_PROMPT, **likely, methods={"min_tokens": least})
                assert len(longer.token_ids) >= least
                assert longer.token_ids[:n] == plain.token_ids
                assert (longer.token_ids == plain.token_ids) == (least <= n)
                texts.append((draft, longer.token_ids))
            with pytest.raises(RequestError, match="a grammar decides where the text ends"):
                engine.generate(SHORT_PROMPT, grammar=Grammar.regex("a+"), methods={"min_tokens": 2})
            with pytest.raises(RequestError, match=r"min_tokens is 2\.5; it must be a whole number from 0"):
                engine.generate(SHORT_PROMPT, methods={"min_tokens": 2.5})
            past = engine.generate(SHORT_PROMPT, **likely, ignore_end=True, methods={"min_tokens": 2})
            assert past.token_ids == engine.generate(SHORT_PROMPT, **likely, ignore_end=True).token_ids
    assert [ids for draft, ids in texts if draft == "off"] == [ids for draft, ids in texts if draft == "suffix"]

"""Reflective Verification: each row is the mixture that a slow evaluation of the whole text gives."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.stopped import Stopped
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import ContextFullError, RequestError, SessionError
from edgedec.grammar import Grammar
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_methods.reflective import MOST_DRAFT, Reflective, ReflectiveSession, mixed
from edgedec_runtimes.cpu.runtime import Cpu

PROMPT = [5, 9, 30, 7, 8]
REFLECTION = [40, 41, 42]
N_CTX, N_DRAFT, WEIGHT = 64, 3, 0.3
Ids = Sequence[int]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a target, and of a model that drafts, which is like it."""
    folder = tmp_path_factory.mktemp("reflective")
    return [tiny_llama(folder / f"{seed}.gguf", seed=seed, n_ctx_train=256, n_layer=1) for seed in (1, 2)]


@pytest.fixture(scope="module")
def models(paths: list[Path]) -> Iterator[list[Model]]:
    """They on the cpu runtime."""
    options = LoadOptions(n_ctx=N_CTX, n_threads=1)
    with Cpu().load(paths[0], options) as target, Cpu().load(paths[1], options) as small:
        yield [target, small]


def law(model: Model, ids: Ids) -> NDArray[np.float64]:
    """Return the law behind tokens, from a session that evaluates all of them."""
    session = model.session(N_CTX)
    row = session.forward(np.array(ids, np.int32), n_past=0).logits[0].astype(np.float64)
    session.close()
    return np.asarray(np.exp(row - row.max()) / np.exp(row - row.max()).sum())


def slowly(models: list[Model], text: Ids, place: int) -> NDArray[np.float64]:
    """Return the law behind the token at a place, with drafts from the prompt's end on."""
    start, draft = len(PROMPT) - 1, list[int]()
    while True:
        draft = []
        for _ in range(min(N_DRAFT, (N_CTX - start - 1 - len(REFLECTION)) // 2)):
            draft.append(int(law(models[1], [*text[: start + 1], *draft]).argmax()))
        n = 0
        while n < len(draft) and start + n < place and text[start + 1 + n] == draft[n]:
            n += 1
        if start + n == place:
            break
        start += n + 1
    first, again = law(models[0], text[: place + 1]), [*text[: start + 1], *draft, *REFLECTION, *draft[:n]]
    return (1 - WEIGHT) * first + WEIGHT * law(models[0], again) if draft else first


def session_of(models: list[Model], weight: float = WEIGHT) -> ReflectiveSession:
    """Return a session around one of each."""
    target, small = (model.session(N_CTX) for model in models)
    return ReflectiveSession(target, small, REFLECTION, weight=weight, n_draft=N_DRAFT)


def test_the_law_of_a_token_is_the_mixture() -> None:
    """Of all laws of three tokens on a grid, the sum is 1, and each chance is that of its two parts."""
    grid = [np.log(np.array(p, np.float32)) for p in ([0.1, 0.2, 0.7], [0.98, 0.01, 0.01], [0.3, 0.3, 0.4])]
    for p, r in product(grid, repeat=2):
        for weight in (0.01, 0.5, 0.99):
            found = np.exp(mixed(p[None] + 3, r[None] - 5, weight)[0])
            assert found == pytest.approx((1 - weight) * np.exp(p) + weight * np.exp(r), abs=1e-6)


@pytest.mark.slow
def test_rows_are_those_of_a_slow_evaluation(models: list[Model]) -> None:
    """Texts keep to the draft for some tokens or leave it; the session goes back, and reads several tokens at once."""
    session = session_of(models)
    n = len(PROMPT)
    with session.generating(n):
        text = list(PROMPT)
        rows = [session.forward(np.array(text, np.int32), n_past=0).logits[0].copy()]
        for k in range(9):  # greedy by the small model, but for two tokens: whole drafts, and parts of them
            text.append(50 + k if k in (1, 6) else int(law(models[1], text).argmax()))
            rows.append(session.forward(np.array(text[-1:], np.int32), n_past=len(text) - 1).logits[0].copy())
        for k, row in enumerate(rows):
            p = np.exp(row.astype(np.float64))
            assert p.sum() == pytest.approx(1, abs=1e-5)
            assert p == pytest.approx(slowly(models, text, n - 1 + k), abs=1e-5), k
        assert 3 < len(session._starts) < 10
        for n_past in (n + 6, n + 2, n, n - 1, 2):
            again = session.forward(np.array(text[n_past:], np.int32), n_past=n_past, rows="all").logits.copy()
            first = max(0, n - 1 - n_past)
            np.testing.assert_array_equal(again[first:], rows[n_past + first - n + 1 :])
        assert session.forward(np.array(text[3:], np.int32), n_past=3, rows=np.empty(0, np.int32)).logits.size == 0
        with pytest.raises(SessionError, match="has evaluated 14"):
            session.forward(np.array([1], np.int32), n_past=15)
    session.close()


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1], ids=["target", "small"])
def test_after_an_interruption_rows_are_the_same(models: list[Model], who: int) -> None:
    """After Ctrl-C while a draft is written or read, also one that was known before the text went back."""
    inner = [Stopped(model.session(N_CTX)) for model in models]
    session = ReflectiveSession(inner[0], inner[1], REFLECTION, weight=WEIGHT, n_draft=N_DRAFT)
    text = list(PROMPT)
    for k in range(14):
        text.append(50 + k if k in (2, 9) else int(law(models[1], text).argmax()))
    with session.generating(len(PROMPT)):
        rows = session.forward(np.array(text, np.int32), n_past=0, rows="all").logits.copy()
        n_stopped = 0
        for n_past in (17, 15, 14, 12, 10, 7, 6, 5, 3):
            inner[who].n_times = 1
            with suppress(KeyboardInterrupt):  # the small model may have no two tokens to read
                session.forward(np.array(text[n_past:], np.int32), n_past=n_past)
            n_stopped += not inner[who].n_times
            inner[who].n_times = 0
            begin = min(session.n_cached, n_past)
            again = session.forward(np.array(text[begin:], np.int32), n_past=begin, rows="all").logits
            np.testing.assert_array_equal(again, rows[begin:])
    assert n_stopped > 3
    session.close()


@pytest.mark.slow
def test_at_the_end_of_the_context_drafts_are_shorter(models: list[Model]) -> None:
    """The last rows have no draft, so they are the target's own."""
    session, rng = session_of(models), np.random.default_rng(1)
    text = [*PROMPT, *rng.integers(3, 90, N_CTX - len(PROMPT)).tolist()]
    with session.generating(len(PROMPT)):
        rows = session.forward(np.array(text, np.int32), n_past=0, rows="all").logits.copy()
        for place in (N_CTX - 8, N_CTX - 5, N_CTX - 4, N_CTX - 1):
            p = np.exp(rows[place].astype(np.float64))
            assert p / p.sum() == pytest.approx(slowly(models, text, place), abs=1e-5)
        with pytest.raises(ContextFullError):
            session.forward(np.array([5], np.int32), n_past=N_CTX)
        np.testing.assert_array_equal(
            session.forward(np.array(text[-1:], np.int32), n_past=N_CTX - 1).logits[0], rows[-1]
        )
    session.close()


def load(paths: list[Path], weight: float | None) -> edgedec.Engine:
    """Load the target, with the small model where there is a weight."""
    lossy = Lossy() if weight is None else Lossy(methods={"reflective": {"draft_model": paths[1], "weight": weight}})
    return edgedec.load(paths[0], runtime="cpu", n_ctx=256, n_threads=1, offline=True, draft="off", lossy=lossy)


@pytest.mark.slow
def test_texts(paths: list[Path]) -> None:
    """The weight 0 is the target's own text; another weight gives one text of a seed, whatever was written before."""
    options: dict[str, Any] = {"max_tokens": 24, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"grammar": Grammar.regex("[a-h]{8,40}")}]
    with load(paths, None) as alone, load(paths, 0.0) as lossless:
        for way in ways:
            own = alone.generate(PROMPT, **options | way)
            assert lossless.generate(PROMPT, **options | way).token_ids == own.token_ids
        assert not any("lossy" in reason for reason in own.stats.notes)
    with load(paths, 0.6) as engine:
        found = engine.generate(PROMPT, **options)
        engine.generate([1, 2, 3], **options)
        assert engine.generate(PROMPT, **options).token_ids == found.token_ids
        stop = found.text[5:7]
        assert engine.generate(PROMPT, **options | {"stop": (stop,)}).text == found.text.partition(stop)[0]
    assert any(reason.startswith("lossy: 0.6 of each token's law") for reason in found.stats.notes)
    assert any("24 tokens by" in line for line in found.stats.explanation)


def test_what_is_refused() -> None:
    """Both options are needed, and values have ranges."""
    given: dict[str, Any] = {"draft_model": "x", "weight": 0.5}
    wrong: list[dict[str, Any]] = [{"weight": 1.0}, {"weight": -0.1}, {"weight": None}, {"draft_model": None}]
    for options in [*wrong, {"n_draft": 0}, {"n_draft": MOST_DRAFT + 1}, {"n_draft": True}, {"words": ""}]:
        with pytest.raises(RequestError, match=next(iter(options))):
            Reflective(**given | options)

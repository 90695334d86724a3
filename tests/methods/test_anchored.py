"""Anchored Decoding: the law of a token is the nearest within the budget, and so is the law of whole texts."""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.load_options import LoadOptions
from edgedec_methods.anchored import Anchored, AnchoredSession, anchored, divergence, log_law
from edgedec_runtimes.cpu.runtime import Cpu

RNG = np.random.default_rng(5)
PROMPT = list(range(5, 30))


def laws(n: int, n_vocab: int) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Yield pairs of random laws."""
    for _ in range(n):
        yield tuple(log_law(RNG.normal(0, 3, n_vocab).astype(np.float32)) for _ in range(2))  # type: ignore[misc]


@pytest.mark.slow
def test_the_law_is_the_nearest_within_the_budget() -> None:
    """No law on the way from one to the other, and no law near the one found, is nearer and keeps to the bound."""
    for risky, safe in laws(20, 6):
        far = divergence(risky, safe)
        for nats in (0.0, 0.1 * far, 0.7 * far):
            found, spent = anchored(risky, safe, nats)
            assert math.isclose(np.exp(found).sum(), 1.0)
            assert spent == pytest.approx(divergence(found, safe))
            assert spent <= nats
            assert spent == pytest.approx(nats, abs=1e-5)
            for _ in range(50):
                other = log_law((found + RNG.normal(0, 0.02, 6)).astype(np.float32))
                if divergence(other, safe) <= nats:
                    assert divergence(other, risky) >= divergence(found, risky) - 1e-5
        assert anchored(risky, safe, far)[0] is risky


@pytest.mark.slow
def test_the_law_of_texts_keeps_to_the_sum_of_the_budgets() -> None:
    """All texts of three letters and four tokens are enumerated, with what earlier tokens left."""
    n_tokens, nats = 4, 0.2
    tables = [
        {text: law[which] for n in range(n_tokens) for text in product(range(3), repeat=n) for law in laws(1, 3)}
        for which in range(2)
    ]
    total = 0.0
    for text in product(range(3), repeat=n_tokens):
        spent, logs = 0.0, [0.0, 0.0]
        for n in range(n_tokens):
            before = text[:n]
            law, cost = anchored(tables[0][before], tables[1][before], nats * (n + 1) - spent)
            spent += cost
            logs[0] += law[text[n]]
            logs[1] += tables[1][before][text[n]]
        assert spent <= nats * n_tokens + 1e-9
        total += math.exp(logs[0]) * (logs[0] - logs[1])
    assert 0 < total <= nats * n_tokens


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of two models of one vocabulary."""
    folder = tmp_path_factory.mktemp("anchored")
    return [tiny_llama(folder / f"{seed}.gguf", seed=seed, n_ctx_train=256, n_layer=1) for seed in (1, 2)]


def load(paths: list[Path], nats: float | None) -> edgedec.Engine:
    """Load the first model, near the second where `nats` says how near."""
    lossy = Lossy() if nats is None else Lossy(methods={"anchored": {"safe_model": paths[1], "nats": nats}})
    return edgedec.load(paths[0], runtime="cpu", n_ctx=256, n_threads=1, offline=True, draft="off", lossy=lossy)


@pytest.mark.slow
def test_rows_are_the_nearest_laws_with_what_earlier_rows_left(paths: list[Path]) -> None:
    """Also behind a forward that wanted no row."""
    models = [Cpu().load(path, LoadOptions(n_ctx=64, n_threads=1)) for path in paths]
    tokens, found = np.arange(1, 9, dtype=np.int32), []
    own = [model.session(64).forward(tokens, n_past=0, rows="all").logits.copy() for model in models]
    pairs = [(log_law(risky), log_law(safe)) for risky, safe in zip(*own, strict=True)][1:]
    nats = float(np.mean([divergence(*pair) for pair in pairs]))
    for n in (0, 3):
        session = AnchoredSession(models[0].session(64), models[1].session(64), nats)
        with session.generating(2):
            first = session.forward(tokens[:n], n_past=0, rows=np.empty(0, np.int32)).logits if n else None
            assert first is None or first.shape == (0, models[0].card.n_vocab)
            found.append(session.forward(tokens[n:], n_past=n, rows="all").logits.copy())
        session.close()
    np.testing.assert_array_equal(found[0][3:], found[1])
    spent = 0.0
    for n, (risky, safe) in enumerate(pairs, 1):
        law, cost = anchored(risky, safe, n * nats - spent)
        spent += cost
        np.testing.assert_allclose(log_law(found[0][n]), law, atol=1e-5)
    for model in models:
        model.close()


@pytest.mark.slow
def test_texts(paths: list[Path]) -> None:
    """Budget 0 writes the safe model's text, a great one the model's own; between, each row is what the law says."""
    options: dict[str, Any] = {"max_tokens": 24, "seed": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with load(paths, None) as alone:
        own = alone.generate(PROMPT, **options).token_ids
    with load(paths[::-1], None) as alone:
        safe = alone.generate(PROMPT, **options).token_ids
    assert own != safe
    for nats, expected in ((0.0, safe), (100.0, own)):
        with load(paths, nats) as engine:
            assert engine.generate(PROMPT, **options).token_ids == expected
    with load(paths, 0.05) as engine:
        found = engine.generate(PROMPT, **options)
        assert found.token_ids not in (own, safe)
        assert engine.generate(PROMPT, **options).token_ids == found.token_ids
        engine.generate([1, 2, 3], **options)
        assert engine.generate(PROMPT, **options).token_ids == found.token_ids
    (line,) = [line for line in found.stats.explanation if line.startswith("anchored: ")]
    spent = float(line.split()[1])
    assert 0 < spent <= 0.05 * 24 + 1e-9
    assert any("nats a token" in reason for reason in found.stats.notes)


@pytest.mark.slow
def test_another_vocabulary_is_refused(paths: list[Path], tmp_path: Path) -> None:
    """The paper's form over bytes is not here."""
    other = tiny_llama(tmp_path / "other.gguf", n_vocab=300)
    with pytest.raises(
        UnsupportedModelError, match=r"300 tokens is not .* for a model that stays near another one both must"
    ):
        load([paths[0], other], 1.0)


def test_what_is_refused() -> None:
    """Both options are needed, and the budget is no negative number."""
    cases: list[dict[str, Any]] = [{}, {"nats": 1.0}, {"safe_model": "x"}, {"safe_model": "x", "nats": -1.0}]
    for wrong in cases:
        with pytest.raises(RequestError, match="nats"):
            Anchored(**wrong)

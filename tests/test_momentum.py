"""momentum: repeating a stretch of the text costs probability, by the text alone."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.real_models import real_model

import edgedec
from edgedec.errors import OptionError
from edgedec.logit_ops import repeated_lengths, slow_loops
from edgedec.sampling import SamplingParams, distribution

PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat"


def naive_lengths(text: list[int]) -> dict[int, int]:
    """Return what repeated_lengths should, by looking at every stretch of the text."""
    found: dict[int, int] = {}
    for n in range(2, 6):
        stretches = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        for token in set(text):
            if (*text[len(text) - n + 1 :], token) in stretches and n <= len(text):
                found[token] = n
    return found


def naive_greedy(row: NDArray[np.float32], text: list[int], strength: float) -> int:
    """Return the token with the greatest p - strength * n, by the definition."""
    wide = row.astype(np.float64)
    p = np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum()
    found = naive_lengths(text)
    left = [p[i] - strength * found[i] if i in found else p[i] for i in range(len(row))]
    return int(np.argmax(left))


def test_the_repeated_lengths_are_those_of_a_search_through_every_stretch() -> None:
    """Random texts of few tokens, and the shortest ones."""
    rng = np.random.default_rng(0)
    for n_vocab, n in [(2, 30), (4, 60), (30, 200)] * 30:
        text = rng.integers(0, n_vocab, n).tolist()
        assert repeated_lengths(text) == naive_lengths(text)
    for text in ([], [1], [1, 1], [1, 2, 1], [1, 1, 1, 1, 1, 1, 1]):
        assert repeated_lengths(text) == naive_lengths(text)


def test_the_penalty_is_taken_from_the_probability() -> None:
    """p - strength * n, renormalised; -inf from the start stays, and a token that loses all of it is ruled out."""
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(temperature=1, top_p=1, momentum=0.1)
    text = [3, 0, 1, 2, 3, 0]  # 1 would repeat 3 tokens
    assert distribution(row, params, text).dense(4) == pytest.approx([0.4 / 0.7, 0, 0.2 / 0.7, 0.1 / 0.7])
    weak = replace(params, momentum=0.05)
    assert distribution(row, weak, text).dense(4) == pytest.approx([0.4 / 0.85, 0.15 / 0.85, 0.2 / 0.85, 0.1 / 0.85])
    row[2] = -np.inf
    assert distribution(row, weak, text).dense(4)[2] == 0


def test_where_every_token_is_ruled_out_the_best_stays() -> None:
    """The text 0 0 1 1 0 of two tokens repeats two whichever comes: the token that loses least is taken."""
    for p in (0.3, 0.6):
        row = np.log(np.array([p, 1 - p], np.float32))
        slow_loops(row, [0, 0, 1, 1, 0], 1.0)
        assert np.isfinite(row).tolist() == [p > 0.5, p <= 0.5]
    alone = np.array([-np.inf, 2.0, -np.inf], np.float32)  # as a grammar leaves it
    slow_loops(alone, [0, 1, 0], 1.0)
    assert alone.tolist() == [-np.inf, 2.0, -np.inf]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "0.2", True])
def test_a_strength_out_of_range_is_refused(value: Any) -> None:
    """It must be from 0 to 1."""
    with pytest.raises(OptionError, match="momentum"):
        SamplingParams(momentum=value)


@pytest.mark.slow
def test_greedy_texts_are_those_of_a_naive_loop_with_drafts_and_without() -> None:
    """On smollm2-135m, which repeats the prompt's sentence for ever without a penalty; and sampled texts agree, too."""
    n = 24
    with edgedec.load(real_model("smollm2-135m.gguf"), runtime="cpu", draft="suffix", offline=True) as engine:
        free = engine.generate(PROMPT, temperature=0, max_tokens=n)
        prompt = list(engine.prompt_ids(PROMPT))
        for strength in (0.02, 0.2, 1.0):
            text = list(prompt)
            with closing(engine.session()) as session:
                for _ in range(n):
                    forward = session.forward(np.array(text[session.n_cached :], np.int32), n_past=session.n_cached)
                    text.append(naive_greedy(forward.logits[0], text, strength))
                    if engine.tokenizer.is_end(text[-1]):
                        break
            options: dict[str, Any] = {"temperature": 0, "max_tokens": n, "momentum": strength}
            drafted = engine.generate(PROMPT, **options)
            assert drafted.stats.n_draft_tokens > 0
            assert list(drafted.token_ids) == [i for i in text[len(prompt) :] if not engine.tokenizer.is_end(i)]
            assert strength < 0.1 or drafted.token_ids != free.token_ids  # a small one may decide nothing here
            assert engine.generate(PROMPT, draft=False, **options).token_ids == drafted.token_ids
            warm: dict[str, Any] = {**options, "temperature": 0.8, "seed": 3}
            assert engine.generate(PROMPT, **warm).token_ids == engine.generate(PROMPT, draft=False, **warm).token_ids

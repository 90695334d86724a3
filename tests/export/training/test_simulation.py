"""Replayed drafts add up to what a step-by-step walk counts, and the report draws the right conclusion."""

from typing import Any

import numpy as np
import pytest

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec_export.training.report import drafted_token_share, drafter_report
from edgedec_export.training.short_list import count_tokens, coverage, short_list
from edgedec_export.training.simulation import Drafted, best_outcome, reach, replay
from edgedec_runtimes.trained_heads.card import HeadCard


def random_texts(seed: int, n: int = 6, p: float = 0.6) -> list[Drafted]:
    """Return texts of random drafts of four tokens."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, n)
    return [
        Drafted("ab"[i % 2], rng.random((size, 4)) < p, rng.random((size, 4)).astype(np.float32))
        for i, size in enumerate(sizes)
    ]


def walk(text: Drafted, n_most: int, least_sure: float) -> list[tuple[int, int]]:
    """Return, for each step, how many tokens are drafted and how many are added: one token after another."""
    steps, i, n = [], 0, len(text.right)
    while i < n:
        length, sure = 0, 1.0
        while length < n_most and (sure := sure * float(text.sure[i, length])) >= least_sure:
            length += 1
        kept = 0
        while kept < length and text.right[i, kept]:
            kept += 1
        steps.append((min(length, n - i), min(kept + 1, n - i)))
        i += kept + 1
    return steps


@pytest.mark.parametrize(("n_most", "least_sure"), [(1, 0.0), (3, 0.0), (4, 0.2), (2, 0.5)])
def test_replay_is_a_walk(n_most: int, least_sure: float) -> None:
    """Tokens, drafts and time are those of the walk."""
    texts = random_texts(1)
    steps = [step for text in texts for step in walk(text, n_most, least_sure)]
    found = replay(texts, lambda n: 1 + 0.3 * n, n_most, least_sure)
    n_tokens = sum(added for _, added in steps)
    assert n_tokens == sum(len(text.right) for text in texts)
    assert found.tokens_per_step == n_tokens / len(steps)
    assert found.drafted_per_step == sum(drafted for drafted, _ in steps) / len(steps)
    assert found.speed == pytest.approx(n_tokens / sum(1 + 0.3 * drafted for drafted, _ in steps))


def test_reach_by_hand() -> None:
    """Three steps: two tokens accepted, then none, then one (the draft of the fourth token is not begun)."""
    right = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]], np.bool_)
    text = Drafted("a", right, np.ones((6, 3), np.float32))
    assert reach([text], 3) == (2 / 3, 1 / 3, 0.0)
    assert reach([], 3) == (0.0, 0.0, 0.0)


def test_the_best_way_is_the_fastest_and_never_slower_than_plain() -> None:
    """Where a row costs a whole step nothing is drafted; where rows are free the longest drafts are best."""
    texts = random_texts(2)
    assert best_outcome(texts, lambda n: 1.0 + n).n_most == 0
    free = best_outcome(texts, lambda n: 1.0)
    assert (free.n_most, free.least_sure) == (4, 0.0)
    assert free.speed == replay(texts, lambda n: 1.0, 4).tokens_per_step
    assert best_outcome([], lambda n: 1.0).speed == 1.0


def test_a_report_says_whether_the_head_pays() -> None:
    """By kind and for all; the sentence says "does not pay here" where that is so."""
    texts = random_texts(3, n=8, p=0.9)
    flat = drafter_report(texts, CostCurve({1: 0.010, 8: 0.011}), DraftPrice(0.05))
    assert [kind.kind for kind in flat.kinds] == ["a", "b", "all"]
    assert flat.pays
    assert f"about {flat.all.best.speed:.2f} times plain decoding here" in flat.sentence()
    assert flat.promise.reach == reach(texts, 4)
    assert set(flat.promise.reach_by_kind) == {"a", "b"}
    steep = drafter_report(texts, CostCurve({1: 0.010, 2: 0.020, 8: 0.080}), DraftPrice(0.05))
    assert not steep.pays
    assert "does not pay here" in steep.sentence()
    assert steep.as_json()["kinds"]["all"]["expected_speed"] == 1.0


def test_what_a_draft_takes_once_counts_in_every_step_that_drafts() -> None:
    """Also where its first token is too improbable to be verified; plain decoding does not pay it."""
    texts, price, curve = random_texts(5), DraftPrice(0.1, once=0.4), CostCurve({1: 0.010, 8: 0.010})
    steps = [step for text in texts for step in walk(text, 3, 0.5)]
    assert any(drafted == 0 for drafted, _ in steps)
    found = replay(texts, lambda n: 1 + price.of(n), 3, 0.5)
    n_tokens = sum(added for _, added in steps)
    assert found.speed == pytest.approx(n_tokens / sum(1.4 + 0.1 * drafted for drafted, _ in steps))
    report = drafter_report(texts, curve, price)
    assert report.all.best.speed < drafter_report(texts, curve, DraftPrice(0.1)).all.best.speed
    assert {key: report.as_json()[key] for key in ("draft", "drafted_token")} == {"draft": 0.4, "drafted_token": 0.1}
    assert drafter_report(texts, curve, DraftPrice(0.1, once=9.0)).all.best.speed == 1.0


def test_a_drafted_tokens_share_is_that_of_the_bytes() -> None:
    """Of a layer at 8 bits a weight and the output rows."""
    card = HeadCard("h", 8, 8, 16, 2, 1, 4, 1e-5, 1e4, (1, 2, 3), 10, 99)
    n_weights = 8 * 16 + 2 * 4 * 16 + 8 * 8 + 3 * 8 * 16
    assert drafted_token_share(card, 10_000, 9.0) == pytest.approx((1.0625 * n_weights + 90) / 10_000)


def test_the_short_list_is_the_most_frequent_tokens(make_lessons: Any) -> None:
    """The most frequent first; among equals the lower id; as many as cover 90 % unless a number is given."""
    counts = count_tokens([np.array([5, 5, 5, 2, 2, 9], np.int32), np.array([9, 7], np.int32)], 5000)
    assert short_list(counts, 3).tolist() == [5, 2, 9]
    assert short_list(counts, 5).tolist() == [5, 2, 9, 7, 0]
    assert coverage(counts, short_list(counts, 2)) == 5 / 8
    assert len(short_list(counts)) == 1024
    assert coverage(counts, short_list(counts)) == 1.0
    assert len(short_list(np.ones(4000, np.int64))) == 4000
    assert len(short_list(np.ones(40_000, np.int64))) == 32_768
    assert coverage(np.zeros(9, np.int64), np.array([1], np.int32)) == 0.0

"""Several requests that share each forward, each with its own policy: drafts where they pay, and nowhere else."""

from collections.abc import Callable
from threading import Lock

import numpy as np
import pytest
from support.decoding.simulation import Oracle, a_text, member, policy_of

from edgedec.cost_curve import CostCurve, SharedForward
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.stats import DecodeStats
from edgedec.verification.coupled import verify_coupled

pytestmark = pytest.mark.slow

Seconds = Callable[[int], float]
MEASURED = (1, 2, 4, 8, 16, 32, 64)


def in_proportion(n: int) -> float:
    """Return the seconds of n rows where each costs what it costs alone."""
    return 0.01 * n


def four_at_once(n: int) -> float:
    """Return them where four cost as much as one."""
    return 0.01 * max(1.0, n / 4)


def nearly_flat(n: int) -> float:
    """Return them where a row adds next to nothing."""
    return 0.01 * (1 + 0.02 * (n - 1))


def gain(n: int, p: float, seconds: Seconds, measured: Seconds, n_steps: int = 600) -> float:
    """Return how much faster than plainly n requests decode in lockstep, each with an oracle of its own."""
    common, lock = CostCurve({rows: measured(rows) for rows in MEASURED}), Lock()
    curves = [JoinedCurve(common, lock) for _ in range(n)]
    texts = [a_text(n_steps * 16, seed) for seed in range(n)]
    oracles = [Oracle(text, p, rng=np.random.default_rng(i)) for i, text in enumerate(texts)]
    policies = [policy_of([member(oracle)], curve) for oracle, curve in zip(oracles, curves, strict=True)]
    done, stats, total_s, plain_s = [0] * n, DecodeStats(), 0.0, 0.0
    for _ in range(n_steps):
        drafts = [policy.propose(stats, 0, 15) for policy in policies]
        n_rows = sum(1 + len(draft) for draft in drafts)
        total_s += seconds(n_rows)
        for i, draft in enumerate(drafts):
            curves[i].shared = SharedForward(seconds(n_rows), n_rows, n)
            curves[i].observe(1 + len(draft), seconds(n_rows))
            start, text = done[i], texts[i]
            verified = verify_coupled(draft, lambda row, accepted, start=start, text=text: text[start + len(accepted)])  # type: ignore[misc]
            policies[i].learn(stats, draft, verified, {})
            done[i] += len(verified.token_ids)
            plain_s += len(verified.token_ids) * seconds(n) / n
    return plain_s / total_s


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("p", [0.6, 0.9])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_where_rows_cost_their_full_price_trials_start_nothing(n: int, p: float) -> None:
    """A draft of one request does not make the others' look cheap."""
    assert gain(n, p, in_proportion, in_proportion) >= 0.99


@pytest.mark.usefixtures("clock")
def test_room_for_rows_is_used_and_not_fought_over() -> None:
    """Two requests leave room for two more rows, four for none."""
    assert gain(2, 0.9, four_at_once, four_at_once) >= 1.7
    assert gain(4, 0.9, four_at_once, four_at_once) >= 0.985


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("n", [2, 4])
def test_a_wrong_curve_is_put_right_for_all(n: int) -> None:
    """Measured as if rows cost their full price."""
    assert gain(n, 0.9, nearly_flat, in_proportion, 1500) >= 1.5


def in_groups(n: int) -> float:
    """Return them where up to eight cost as much as one, and each one more costs a half of that."""
    return 0.01 * (1 + 0.5 * max(0, n - 8))


@pytest.mark.usefixtures("clock")
def test_four_requests_share_the_few_rows_that_are_free() -> None:
    """One node each is free and gives 1.9 times the tokens; if each took all four, the forward would take 7 times."""
    assert gain(4, 0.9, in_groups, in_groups) >= 1.7


def test_a_session_pays_its_part_of_what_all_drafts_cost() -> None:
    """Others draft like this session as far as they did lately; forwards are noted with all rows."""
    common = CostCurve({1: 0.010, 4: 0.020, 8: 0.030})
    curve = JoinedCurve(common, Lock())
    curve.shared = SharedForward(0.032, 10, 4)
    assert curve.seconds(1) == common.seconds(4)  # four had rows in the prompt's last forward
    curve.observe(3, 0.9)
    assert curve.others == 3
    assert curve.latest_s == pytest.approx(0.032)
    plain, all_rows = common.seconds(4), common.up_to(20)
    assert curve.seconds(1) == plain
    # 10 rows are 3 own ones and 7 of three others, which drafted 4 / 3 nodes each: less than this one's 2
    n_alike = 1 + 3 * (7 / 8 + 1 / 8 * 4 / 3) / (7 / 8 + 1 / 8 * 2)
    parts = [(all_rows[3 + round(n * n_alike)] - all_rows[3]) / n_alike for n in range(4)]
    assert curve.up_to(4) == pytest.approx([all_rows[3] + part for part in parts])
    assert curve.seconds(3) == pytest.approx(all_rows[3] + parts[2])
    for _ in range(200):  # only this session drafts: it pays for all of its rows
        curve.shared = SharedForward(0.032, 6, 4)
        curve.observe(3, 0.9)
    assert curve.up_to(5) == pytest.approx(common.up_to(8)[3:])
    assert [curve.is_unknown(n) for n in (7, 8)] == [False, True]
    assert curve.trials is common.trials
    assert curve.table().keys() == {1, 4, 6, 8, 10}

"""Every decision of simulated generations is the recorded one: how many nodes each step verified, and what it drew.

After a change that is meant to decide otherwise, EDGEDEC_RECORD=1 makes these tests record anew.
Under the modelled curves of devices, `auto` asks the way to draft that is the fastest there.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import cast

import numpy as np
import pytest
from support.decoding.simulation import Clock, Oracle, Run, a_text, best_fixed, decode, policy_of

from edgedec.cost_curve import CostCurve, DraftPrice, SharedForward
from edgedec.draft import Draft, Verification
from edgedec.drafter import DrafterNeeds, Floor
from edgedec.drafter_traits import DraftCost
from edgedec.sampling import Distribution
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.shared_cost_curve import JoinedCurve
from edgedec.stats import DecodeStats
from edgedec_apps.bench.recorder import Recorder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))
from rooflines import DEVICES, modelled

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).with_suffix(".json")
JAGGED = [1, 1.6, 1.7, 1.2, 1.9, 2, 2.1, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5]
CURVES: Mapping[str, Callable[[int], float]] = {
    "jagged": lambda n: 0.01 * JAGGED[n - 1],
    "flat": lambda n: 0.01 * (1 + 0.02 * (n - 1)),
    "steep": lambda n: 0.011 * n**0.97,
}


class Layers(Oracle):
    """An oracle in the target's own session, which holds the text."""

    needs = DrafterNeeds(layers=True)


class Drawing(Oracle):
    """An oracle whose nodes are drawn from a distribution."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return the coming tokens, some of them wrong, with the distributions that they are taken to be from."""
        draft = Oracle.propose(self, n_max, deadline_s)
        law = Distribution(np.array([1, 2]), np.array([0.5, 0.5]))
        return Draft(draft.tokens, draft.parents, draft.p_accept, (law,) * len(draft))


@dataclass(slots=True)
class Branching(Oracle):
    """An oracle that proposes a wrong sibling before each token."""

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return a tree of two nodes a level."""
        chain = Oracle.propose(self, n_max // 2, deadline_s)
        tokens, parents, p = [], [], []
        for i, token in enumerate(chain.tokens):
            tokens += [(token + 7) % 1000, token]
            parents += [2 * i - 1] * 2 if i else [-1, -1]
            p += [0.2, float(chain.p_accept[i])]
        return Draft.tree(tokens, parents, p)


@dataclass(slots=True)
class Case:
    """What one simulation is made of; `of` names a drafter's class, its acceptance, what it says, and its seconds."""

    curve: str
    of: list[tuple[type[Oracle], float, float | None, float]]
    n: int = 1200
    seen: tuple[int, ...] = (1, 2, 4, 8, 16)
    real: str | None = None
    trees: bool = True
    always: bool = False
    greedy: bool = True
    coupled: bool = True
    records: bool = False
    keep_s: float | None = None


CASES: dict[str, Case] = {
    **{f"cheap {c} {p}": Case(c, [(Oracle, p, None, 0.0)]) for c in CURVES for p in (0.05, 0.5, 0.9)},
    **{f"wrong curve {p}": Case("steep", [(Oracle, p, 0.8, 0)], seen=(1, 2), real="flat") for p in (0.3, 0.8)},
    **{f"short curve {p}": Case("steep", [(Oracle, p, 0.8, 0)], seen=(1,)) for p in (0.3, 0.8)},
    **{f"costly {c} {p}": Case(c, [(Oracle, p, None, 0.002)]) for c in ("jagged", "flat") for p in (0.3, 0.9)},
    **{f"cheap and costly {p}": Case("flat", [(Oracle, 0.3, 0.5, 0), (Oracle, p, None, 0.001)]) for p in (0.4, 0.9)},
    **{f"own layers {p}": Case("flat", [(Oracle, 0.1, 0.5, 0), (Layers, p, None, 0.003)]) for p in (0.6, 0.97)},
    **{f"trees {t}": Case("flat", [(Branching, 0.7, None, 0), (Oracle, 0.6, 0.3, 0)], trees=t) for t in (True, False)},
    "trees kept": Case("jagged", [(Branching, 0.8, None, 0)], keep_s=0.004),
    "sampled": Case("flat", [(Oracle, 0.6, 0.9, 0), (Oracle, 0.7, 0.5, 0.001)], greedy=False),
    "always": Case("jagged", [(Oracle, 0.5, None, 0), (Branching, 0.5, None, 0)], always=True, n=300),
    "always costly": Case("jagged", [(Oracle, 0.5, None, 0.002)], always=True, n=300),
    "drawn": Case("flat", [(Drawing, 0.8, None, 0.001)], coupled=False, greedy=False),
    "drawn cheap": Case("jagged", [(Drawing, 0.8, None, 0), (Oracle, 0.5, None, 0)], coupled=False, greedy=False),
    "recorded": Case("flat", [(Branching, 0.8, None, 0), (Oracle, 0.5, None, 0.001)], records=True, n=300),
}


def simulate(case: Case, clock: Clock) -> Run:
    """Decode a text as the case says."""
    text, floor, active = a_text(case.n), Floor(), []
    for i, (kind, p, says, level_s) in enumerate(case.of):
        oracle = kind(text, p, says, clock, level_s, floor=floor, rng=np.random.default_rng(i))
        cost = DraftCost.TARGET if kind is Layers else DraftCost.MODEL if level_s else DraftCost.NOTHING
        active.append(ActiveDrafter(f"{kind.__name__} {i}", oracle, DrafterRecord(), cost, case.greedy))
    curve, recorder = CostCurve({n: CURVES[case.curve](n) for n in case.seen}), Recorder()
    policy = policy_of(
        active,
        curve,
        trees=case.trees,
        always=case.always,
        coupled=case.coupled,
        recorder=recorder if case.records else None,
    )
    if case.keep_s is not None:
        observe = curve.observe
        kept = cast(Callable[..., None], lambda n, s, past: observe(n, s, past, case.keep_s if n > 2 else None))
        curve.observe = kept  # type: ignore[method-assign]
    run = decode(policy, text, curve, CURVES[case.real or case.curve], clock)
    assert run.token_ids == text
    run.drafted += [len(one.tokens) for one in recorder.rows]
    return run


def shared(n: int) -> list[int]:
    """Return the nodes that `n` requests of one batch verified in each step."""
    common, lock = CostCurve({rows: CURVES["steep"](rows) for rows in (1, 2, 4, 8)}), Lock()
    curves = [JoinedCurve(common, lock) for _ in range(n)]
    policies = []
    for i, curve in enumerate(curves):
        oracle = Oracle(a_text(9999, i), 0.8, rng=np.random.default_rng(i))
        policies.append((policy_of([ActiveDrafter("one", oracle, DrafterRecord())], curve), oracle))
    drafted, stats = [], DecodeStats()
    for _ in range(400):
        lengths = [len(policy.propose(stats, 0, 15)) for policy, _ in policies]
        drafted += lengths
        rows = sum(lengths) + n
        for i, (policy, oracle) in enumerate(policies):
            curves[i].shared = SharedForward(CURVES["flat"](rows), rows, n)
            curves[i].observe(1 + lengths[i], CURVES["flat"](rows))
            n_right = min(lengths[i], oracle.position % 3)
            came = tuple(oracle.text[oracle.position : oracle.position + n_right + 1])
            policy.learn(stats, Draft.chain([0] * lengths[i]), Verification(tuple(range(n_right)), came), {})
    return drafted


def digest(drafted: list[int]) -> str:
    """Return a summary that shows what changed: steps, nodes, and a hash of all."""
    whole = hashlib.sha256(" ".join(map(str, drafted)).encode()).hexdigest()
    return f"{len(drafted)} steps, {sum(drafted)} nodes, {whole[:16]}"


def check(name: str, drafted: list[int]) -> None:
    """Compare with what was recorded, or record it."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("EDGEDEC_RECORD"):
        RECORDED.write_text(json.dumps(recorded | {name: digest(drafted)}, indent=1) + "\n")
    else:
        assert digest(drafted) == recorded[name]


@pytest.mark.parametrize("name", CASES)
def test_decisions_are_the_recorded_ones(name: str, clock: Clock) -> None:
    """Of one request, step by step."""
    check(name, simulate(CASES[name], clock).drafted)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("n", [1, 3])
def test_decisions_of_shared_forwards_are_the_recorded_ones(n: int) -> None:
    """Of requests that share each forward."""
    check(f"shared {n}", shared(n))


N_TOKENS = 4000


class OwnLayers(Oracle):
    """A drafter in the target's session, which holds the text: there is nothing to read."""

    needs = DrafterNeeds(layers=True)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return the coming tokens, some of them wrong."""
        self.read = self.position
        return super().propose(n_max, deadline_s)


@pytest.mark.parametrize(
    ("cheap", "own", "share", "asked"),
    [
        (0.05, 0.97, 0.3, True),  # tables know nothing: nearly always right for 0.3 of the bytes
        (0.05, 0.67, 0.79, False),  # dear and often wrong: plain decoding
        (0.90, 0.67, 0.79, False),  # what tables know is free
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_auto_asks_the_targets_own_layers_where_they_are_the_fastest(
    device: str, cheap: float, own: float, share: float, asked: bool, clock: Clock
) -> None:
    """In nine steps of ten where they are, in one of a hundred at most where they are not; near the best either way."""
    seconds = modelled(DEVICES[device], 1_117_000_000, 1_777_000_000)
    text, floor, level_s = a_text(N_TOKENS), Floor(), share * seconds(1)
    table = Oracle(text, cheap, floor=floor, clock=clock, rng=np.random.default_rng(3))
    layers = OwnLayers(text, own, floor=floor, clock=clock, level_s=level_s)
    record = DrafterRecord(accepted=[own * 6.0] * 2, price=DraftPrice(level_s))
    members = [ActiveDrafter("suffix", table, DrafterRecord()), ActiveDrafter("skip", layers, record, DraftCost.TARGET)]
    curve = CostCurve({n: seconds(n) for n in (1, 2, 4, 8, 16)})
    run = decode(policy_of(members, curve), text, curve, seconds, clock)
    assert run.token_ids == text
    n_steps = len(run.drafted)
    assert layers.n_asked >= 0.9 * n_steps if asked else layers.n_asked <= 0.01 * n_steps + 1
    best = max(1 / seconds(1), best_fixed(cheap, seconds), best_fixed(own, seconds, level_s))
    assert run.rate >= 0.85 * best

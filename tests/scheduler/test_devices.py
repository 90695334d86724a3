"""What `auto` decides under the modelled curves of devices: it asks the way to draft that is the fastest there."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support.decoding.simulation import Clock, Oracle, a_text, best_fixed, decode, policy_of

from edgedec.cost_curve import CostCurve, DraftPrice
from edgedec.draft import Draft
from edgedec.drafter import DrafterNeeds, Floor
from edgedec.drafter_traits import DraftCost
from edgedec.scheduler.active_drafters import ActiveDrafter
from edgedec.scheduler.drafter_record import DrafterRecord

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from rooflines import DEVICES, modelled

pytestmark = pytest.mark.slow

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

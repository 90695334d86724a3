"""How a trained head is asked: as long as its next token pays, and with what other requests gain."""

import pytest

from edgedec.draft import Draft, DrafterNeeds
from edgedec.memory.ladder import Setting, rungs
from edgedec.model import LoadOptions
from edgedec.scheduler.costly_drafters import plan_draft
from edgedec.scheduler.drafter_factories import HEAD, SUFFIX
from edgedec.scheduler.drafter_record import ActiveDrafter, DecisionLog, DrafterRecord
from edgedec.scheduler.node_choice import PolicyOptions


class Head:
    """A drafter that is only planned for."""

    needs = DrafterNeeds()

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Not called."""
        raise NotImplementedError


def active(rate: float, level_s: float) -> ActiveDrafter:
    """Return a head of which this acceptance and this cost are known."""
    record = DrafterRecord(level_s=level_s, offered=[100.0, 100.0], accepted=[100.0 * rate] * 2)
    return ActiveDrafter("head", Head(), record, costly=True, in_place=True)  # type: ignore[arg-type]


def cost(n_nodes: int) -> float:
    """Return the seconds of a forward: 1, and 0.05 for each node."""
    return 1 + 0.05 * n_nodes


def test_the_chain_ends_where_the_next_token_is_not_expected_to_pay() -> None:
    """A token more must gain, with the chance of its path and its own, what drafting and verifying it takes."""
    plan = plan_draft(active(0.5, 0.05), DecisionLog(), PolicyOptions(8), cost, 8, 1.0, 100)
    assert plan is not None
    gain = max(sum(0.5**i for i in range(n + 1)) / (1 + 0.1 * n) for n in range(1, 9))
    assert plan.least_path == pytest.approx((0.05 + 0.05) * gain / 0.5)


def test_a_head_that_accepts_next_to_nothing_is_tried_only() -> None:
    """Where nothing is gained, a head is asked in trials, whose share of the time is bounded."""
    log, hopeless = DecisionLog(), active(0.01, 0.05)
    assert plan_draft(hopeless, log, PolicyOptions(8), cost, 8, 1.0, 100) is None
    hopeless.record.total_s = 1000.0
    plan = plan_draft(hopeless, log, PolicyOptions(8), cost, 8, 1.0, 100)
    assert plan is not None
    assert plan.is_trial


def test_what_others_gain_counts() -> None:
    """With two more requests in the forward, three tokens a second are plain speed, and a draft still pays."""
    log = DecisionLog(others=2.0)
    assert plan_draft(active(0.6, 0.05), log, PolicyOptions(8), cost, 8, 3.0, 100) is not None
    assert plan_draft(active(0.6, 0.05), DecisionLog(), PolicyOptions(8), cost, 8, 3.0, 100) is None


def test_the_ladder_gives_the_head_up_unless_it_is_pinned(tmp_path: object) -> None:
    """One step leaves the head out, with its option; a head that was asked for by name stays."""
    options = LoadOptions(draft_head=tmp_path)  # type: ignore[arg-type]
    for pinned in (False, True):
        setting = Setting(options, (SUFFIX, HEAD), pinned)
        for rung in rungs(setting, "cpu"):
            setting = rung(setting)
            assert (HEAD in setting.drafters) == (setting.options.draft_head is not None)
        assert (HEAD in setting.drafters) == pinned
        assert ("draft head left out" in setting.given_up.values()) == (not pinned)

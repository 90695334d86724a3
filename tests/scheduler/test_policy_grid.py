"""The scheduler keeps its gain on recorded drafts (benchmarks/studies/policy.py)."""

import json
import sys
from pathlib import Path

import pytest

from edgedec.scheduler.policy import Policy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "studies"))

import policy

ROWS = ("avx2 smollm2-135m both 0.0 1", "zen5 smollm2-135m head 0.7 1", "zen5 smollm2-135m lookup 0.0 8")


@pytest.mark.slow
def test_what_recorded_drafts_gain_is_kept() -> None:
    """At least 97 % of the recorded gain, and no text slower in its first 64 tokens than was recorded."""
    recorded = json.loads((policy.RESULTS / "policy.json").read_text(encoding="utf-8"))
    cases = dict(policy.cases(policy.RESULTS))
    for name in ROWS:
        gain, worst = policy.judged(cases[name], Policy)
        assert gain >= 0.97 * recorded[name][0]
        assert worst >= recorded[name][1] - 0.02

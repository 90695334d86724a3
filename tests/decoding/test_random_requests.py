"""Random requests, with drafts and without: benchmarks/texts/random_same_text.py does thousands of them."""

import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

import edgedec.decoding.step as steps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "texts"))
    import random_same_text

    return random_same_text


def test_drafts_change_nothing_that_a_caller_sees(harness: ModuleType, tmp_path: Path) -> None:
    """In 8 drawn configurations of the cpu runtime, no request differs, and drafts are accepted."""
    from drawn_requests import Files, drawn

    files, outcomes = Files(tmp_path), []
    for number in range(8):
        config = drawn(random.Random(f"test:{number}"), real=False, only_cpu=True)
        outcomes.append(harness.compared(number, config, files))
    assert [outcome.different for outcome in outcomes] == [{}] * len(outcomes)
    assert sum(outcome.n_requests for outcome in outcomes) > 40
    assert sum(outcome.n_accepted for outcome in outcomes) > 200


def test_a_draft_that_chooses_a_token_is_found_and_can_be_replayed(
    harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a verification that takes the first drafted token as it is, the run differs, and says which request."""
    from edgedec.draft import Draft, Verification
    from edgedec.verification.coupled import ChooseToken, verify_coupled

    def lax(draft: Draft, choose: ChooseToken) -> Verification:
        return Verification((), (int(draft.tokens[0]),)) if len(draft) else verify_coupled(draft, choose)

    monkeypatch.setattr(steps, "verify_coupled", lax)
    monkeypatch.setattr(harness, "has_real", lambda: False)
    counts = harness.run(1000, 0, 1, tmp_path, only=3)
    assert counts["different"] > 0
    assert counts["differing"] == [3]
    assert "replay: --seed 0 --only 3" in capsys.readouterr().err

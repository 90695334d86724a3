"""The conformance suite for drafters and its command line: the example passes, each kind of fault fails its check."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
from support.decoding.stub_drafter import StubDrafter
from support.models.tiny_models import tiny_llama
from support.processes.installed import with_plugin

from edgedec import plugins
from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, DrafterFactory, DrafterNeeds
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.model_card import Capabilities
from edgedec.testing import check_drafter, raise_failures
from edgedec.testing.__main__ import main
from edgedec.testing.drafter import DRAFTER_CHECKS
from edgedec.testing.drafting import DrafterSubject
from edgedec.testing.results import run_checks
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "drafter-plugin"
DRAFTER = {check.__name__: check for check in DRAFTER_CHECKS}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("conformance") / "tiny.gguf", n_embd=32, n_head=2, n_head_kv=1, n_ff=48)


@pytest.fixture
def load(path: Path) -> Callable[[], Model]:
    """Load it on the cpu runtime."""
    return lambda: Cpu().load(path, LoadOptions(n_ctx=128, n_threads=1))


@pytest.fixture
def lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrafterFactory:
    """The example drafter."""
    monkeypatch.syspath_prepend(EXAMPLE)
    with_plugin(monkeypatch, tmp_path, plugins.DRAFTERS, "lookup", "edgedec_lookup:Lookup")
    found: DrafterFactory = plugins.load_plugin(plugins.DRAFTERS, "lookup")
    return found


def test_the_example_drafter_passes_every_check(load: Callable[[], Model], lookup: DrafterFactory) -> None:
    """And its module is short enough to be a tutorial."""
    results = check_drafter(lookup, load)
    assert [(result.name, result.status) for result in results] == [(name, "passed") for name in DRAFTER]
    assert len((EXAMPLE / "edgedec_lookup.py").read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.parametrize("name", ["common", "recycling", "stand", "suffix", "trigram"])
def test_drafters_that_look_up_pass_every_check(load: Callable[[], Model], name: str) -> None:
    """Those that keep nothing of a model."""
    raise_failures(check_drafter(plugins.load_plugin(plugins.DRAFTERS, name), load))


class Base(StubDrafter):
    """A drafter that repeats the last token, and the faults below."""

    p_accept: ClassVar[float] = 0.5

    def __init__(self, context: DraftContext) -> None:
        self.target = context.target
        self.greedy = context.sampling.greedy
        self.ids: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self.ids = list(token_ids)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Propose the last token again and again."""
        return Draft.chain(self.ids[-1:] * n_max, self.p_accept)

    def learn(self, verification: Verification, hidden: Mapping[int, Any]) -> None:
        """Go on."""
        self.ids.extend(verification.token_ids)

    def memory_bytes(self) -> int:
        """Next to nothing."""
        return 100


def variant(**attributes: Any) -> DrafterFactory:
    """Return the drafter with other attributes."""
    return cast(DrafterFactory, type("Variant", (Base,), attributes))


def spoil_the_cache(self: Any, n_max: int, deadline_s: float) -> Draft:
    """Put other tokens into the target's cache."""
    if len(self.ids) > 1:
        self.target.forward(np.full(len(self.ids) - 1, 9, np.int32), n_past=0)
    return Draft.chain([])


def _refuses_plain_steps(self: Any, verification: Verification, hidden: Mapping[int, Any]) -> None:
    self.ids.extend(verification.token_ids)
    if not self.drafted and len(self.ids) > 12:
        raise ValueError("no draft to accept")


def _late(self: Any, n_max: int, deadline_s: float) -> Draft:
    time.sleep(0.0 if self.slept else 0.4)
    self.slept = True
    return Draft.chain([])


def _notes_drafts(self: Any, n_max: int, deadline_s: float) -> Draft:
    self.drafted = True
    return Draft.chain([])


def _spoils_samples(self: Any, n_max: int, deadline_s: float) -> Draft:
    return Draft.chain([]) if self.greedy else spoil_the_cache(self, n_max, deadline_s)


def _extends(self: Any, token_ids: Sequence[int]) -> None:
    self.ids.extend(token_ids)


def _proposes_the_first(self: Any, n_max: int, deadline_s: float) -> Draft:
    return Draft.chain(self.ids[:1])


def _proposes_the_last(self: Any, n_max: int, deadline_s: float) -> Draft:
    return Draft.chain([self.ids[-1]])


DRAFTER_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a tap that no layer has": ("needs_are_sane", {"needs": DrafterNeeds(taps=(2,))}),
    "too many nodes": ("drafts_are_valid", {"propose": lambda self, n_max, _: Draft.chain([1] * (n_max + 1))}),
    "an estimate above 1": ("drafts_are_valid", {"p_accept": 1.5}),
    "tokens of the wrong type": (
        "drafts_are_valid",
        {"propose": lambda *_: Draft.chain(cast(Any, np.ones(1, np.int32)))},
    ),
    "a history taken for granted": ("empty_histories_are_fine", {"propose": _proposes_the_last}),
    "late": ("deadlines_are_kept", {"slept": False, "propose": _late}),
    "a history that stays": ("begin_starts_over", {"begin": _extends, "propose": _proposes_the_first}),
    "a size that is no number": ("memory_stays_in_budget", {"memory_bytes": lambda self: 0.5}),
    "more than its budget": ("memory_stays_in_budget", {"memory_bytes": lambda self: 10**9 * (len(self.ids) > 20)}),
    "plain steps refused": (
        "every_step_is_accepted",
        {"drafted": False, "propose": _notes_drafts, "learn": _refuses_plain_steps},
    ),
    "a spoilt cache": ("greedy_text_is_plain_text", {"propose": spoil_the_cache}),
    "a cache spoilt when sampling": ("sampled_text_is_plain_text", {"propose": _spoils_samples}),
}


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_fault_of_a_drafter_fails_its_check(load: Callable[[], Model], fault: str) -> None:
    """The named check passes on the sound drafter, and fails with the fault, telling what was found."""
    name, attributes = DRAFTER_FAULTS[fault]
    for factory, status in ((Base, "passed"), (variant(**attributes), "failed")):
        (result,) = run_checks([DRAFTER[name]], DrafterSubject(factory, load, 12, 10**6), None)
        assert (result.name, result.status) == (name, status), result.detail
        assert bool(result.detail) == (status == "failed")


def test_every_check_of_a_drafter_has_a_fault_that_fails_it() -> None:
    """A check that nothing fails would be no check."""
    assert {name for name, _ in DRAFTER_FAULTS.values()} == set(DRAFTER)


def test_what_the_model_cannot_do_for_a_drafter_is_skipped(
    load: Callable[[], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that needs taps is not to blame for a model without; nor for one without batch invariance."""
    tapped = variant(needs=DrafterNeeds(taps=(0,)))
    assert {result.status for result in check_drafter(tapped, load, n_tokens=6)} == {"passed"}

    def without_capabilities() -> Model:
        model = load()
        monkeypatch.setattr(model, "capabilities", Capabilities())
        return model

    results = check_drafter(tapped, without_capabilities, n_tokens=6)
    assert {result.status for result in results} == {"skipped"}
    assert "needs 'taps'" in results[0].detail
    monkeypatch.setattr(CpuModel, "batch_invariant", 1)
    results = check_drafter(Base, load, n_tokens=6)
    skipped = [result.name for result in results if result.status == "skipped"]
    assert skipped == ["greedy_text_is_plain_text", "sampled_text_is_plain_text"]


def test_the_example_drafter_passes_on_llamacpp(path: Path, lookup: DrafterFactory) -> None:
    """On the production runtime nothing fails either."""
    results = check_drafter(lookup, lambda: LlamaCpp().load(path, LoadOptions(n_ctx=128, n_threads=1)), n_tokens=12)
    assert [result for result in results if result.status == "failed"] == []


def test_the_command_line_prints_a_line_a_check(
    path: Path, lookup: DrafterFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 0 where everything holds."""
    assert main(["lookup", str(path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["ok"] * len(DRAFTER)


def test_the_command_line_ends_with_the_errors_status(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """54 for a failed check, which is printed; a name or a file that is not there has its own."""
    with_plugin(monkeypatch, tmp_path, plugins.DRAFTERS, "faulty", f"{__name__}:FAULTY")
    assert main(["faulty", str(path), "--runtime", "reference"]) == 54
    printed = capsys.readouterr()
    assert "FAIL  empty_histories_are_fine: IndexError" in printed.out
    assert "1 conformance checks failed" in printed.err
    assert main(["nameless", str(path)]) == 31
    assert main(["faulty", str(path), "--runtime", "nameless"]) == 31
    assert main(["faulty", str(tmp_path / "absent.gguf")]) == 11
    assert "Error: " in capsys.readouterr().err


FAULTY = variant(propose=_proposes_the_last)

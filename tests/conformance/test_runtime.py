"""The conformance suite for runtimes: the reference passes it, and each kind of fault fails its check."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.memory_reading import probe_of
from support.conformance.runtime import RUNTIME_CHECKS, check_runtime
from support.conformance.subject import Subject
from support.models.tiny_models import tiny_llama

from edgedec.errors import CancelledError, ConformanceError, ModelFormatError
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, Model
from edgedec.model_card import Capabilities
from edgedec.testing import CheckResult, raise_failures
from edgedec.testing.results import run_checks
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference import model as reference
from edgedec_runtimes.reference import network
from edgedec_runtimes.reference.model import ReferenceSession
from edgedec_runtimes.reference.network import KVCache
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.reference.tokenizer import ReferenceTokenizer
from edgedec_runtimes.shared import requests
from edgedec_runtimes.shared.library_model import Stop
from edgedec_runtimes.shared.session_state import CheckedItem, SessionState

RUNTIME = {check.__name__: check for check in RUNTIME_CHECKS}
EVERYTHING = Capabilities(
    trees=True,
    fork=True,
    layers=True,
    taps=True,
    hidden_input=True,
    vector_rows=True,
    max_rows=256,
    prefill_chunk=1,
)
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("conformance") / "tiny.gguf", n_embd=32, n_ff=48)


@pytest.fixture
def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Model]:
    """Load it on the reference runtime, which takes its time from the 64th token on: to be cancelled in."""
    monkeypatch.setattr(reference, "evaluate", _slow(network.evaluate, 64))
    return lambda: Reference().load(path, LoadOptions(n_ctx=128))


@pytest.mark.slow
def test_the_reference_passes_every_check(load: Callable[[], Model], path: Path) -> None:
    """Nothing fails, and only what it can't be asked is skipped; its memory is counted in another process."""
    told: list[CheckResult] = []
    probe = probe_of("reference", path)
    results = check_runtime(load, on_check=told.append, memory_probe=probe)
    raise_failures(results)
    assert [result.name for result in results if result.status == "skipped"] == ["undeclared_capabilities_raise"]
    assert told == results
    assert [result.name for result in results] == list(RUNTIME)
    assert all(result.holds.endswith(".") for result in results)


@pytest.mark.slow
def test_the_command_line_prints_a_line_a_check(path: Path) -> None:
    """A check of a runtime by its name, with the memory of a process of its own."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "conformance"), "reference", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "ok    memory_is_as_planned" in lines
    assert "skip  undeclared_capabilities_raise: the model declares every capability" in lines
    assert [line.split()[1].removesuffix(":") for line in lines] == list(RUNTIME)


@pytest.mark.slow
def test_llamacpp_passes_what_it_declares(path: Path) -> None:
    """The production runtime fails nothing on the tiny model."""
    raise_failures(check_runtime(lambda: LlamaCpp().load(path, LoadOptions(n_ctx=128, n_parallel=4, n_threads=1))))


def patched(target: object, name: str, make: Callable[[Any], Any]) -> Patch:
    """Return a patch that puts `make(original)` in the place of an attribute."""
    return lambda monkeypatch: monkeypatch.setattr(target, name, make(getattr(target, name)))


def _with_logits(change: Callable[[int, CheckedItem], float]) -> Callable[[Any], Any]:
    """Add to every logit of a forward what `change` says of its number and its item."""
    counter = iter(range(10**6))

    def make(original: Any) -> Any:
        def run(self: Any, item: CheckedItem, on_progress: Any) -> Forward:
            forward: Forward = original(self, item, on_progress)
            return replace(forward, logits=forward.logits + np.float32(change(next(counter), item)))

        return run

    return make


def _nothing(_: Any) -> Any:
    return lambda *arguments: None


def changed(**values: Callable[[Any], Any]) -> Patch:
    """Return a patch of loaded models: each named attribute becomes what its function makes of it."""

    def make(original: Any) -> Any:
        def load(self: Reference, path: Path, options: LoadOptions) -> Any:
            model = original(self, path, options)
            for name, change in values.items():
                setattr(model, name, change(getattr(model, name)))
            return model

        return load

    return patched(Reference, "load", make)


def _shouting(original: Any) -> Any:
    return lambda self, token_ids: original(self, token_ids).upper()


def _doubles(original: Any) -> Any:
    return lambda *arguments: Forward(original(*arguments).logits.astype(np.float64))


def _clipped(original: Any) -> Any:
    return lambda tokens, shape: original(tokens.clip(0, 259), shape)


def _last_is_first(original: Any) -> Any:
    return lambda rows, n: original("all", n)[:1] if isinstance(rows, str) and rows == "last" else original(rows, n)


def _chained(_: Any) -> Any:
    return lambda parents, n: None if parents is None else np.arange(-1, n - 1)


def _stale(original: Any) -> Any:
    """Let slots that are not visible leak into the state."""

    def evaluate(weights: Any, cache: KVCache, state: Any, row: network.Row, *others: Any) -> network.RowOutput:
        output: network.RowOutput = original(weights, cache, state, row, *others)
        return replace(output, state=output.state + cache.keys[0, len(row.visible) :].sum(dtype=np.float32) / 1000)

    return evaluate


def _tap_too_early(original: Any) -> Any:
    def evaluate(weights: Any, cache: KVCache, state: Any, row: network.Row, *others: Any) -> network.RowOutput:
        output: network.RowOutput = original(weights, cache, state, row, *others)
        return replace(output, tapped=dict.fromkeys(output.tapped, state))

    return evaluate


def _shared_fork(self: ReferenceSession) -> ReferenceSession:
    twin: ReferenceSession = self.model.session(self.n_ctx)
    twin.cache, twin.state.n_cached = self.cache, self.n_cached
    return twin


def _trusting_load(original: Any) -> Any:
    def load(self: ReferenceSession, data: bytes, n_tokens: int) -> None:
        try:
            original(self, data, n_tokens)
        except ModelFormatError:
            self.state.n_cached = n_tokens

    return load


def _miscounting_branch(original: Any) -> Any:
    def advance(self: SessionState, n: int) -> None:
        original(self, n)
        if self.tree is not None:
            self.n_cached += 1

    return advance


def _mixed_items(original: Any) -> Any:
    def forward(self: Any, items: Sequence[ForwardItem]) -> list[Forward]:
        forwards: list[Forward] = original(self, items)
        total = sum(float(forward.logits[0, 0]) for forward in forwards)
        return [replace(forward, logits=forward.logits + np.float32(total / 100)) for forward in forwards]

    return forward


def _slow(original: Any, n_quick: int = 0) -> Any:
    def evaluate(weights: Any, cache: KVCache, state: Any, row: network.Row, *others: Any) -> Any:
        if len(row.visible) > n_quick:
            time.sleep(0.003)
        return original(weights, cache, state, row, *others)

    return evaluate


def _ignored_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceSession, "cancel", lambda self: None)
    monkeypatch.setattr(reference, "evaluate", _slow(network.evaluate))


def _lossy_cancel(_: Any) -> Any:
    def check(self: Stop) -> None:
        if self.flag.value:
            for item in self.running:
                item.session.state.n_cached += 1  # a row that was not evaluated
            raise CancelledError("cancelled")

    return check


def _sticky_cancel(_: Any) -> Any:
    def cancel(self: Stop, session: Any) -> None:
        self.flag.value = 1

    return cancel


def declares(capabilities: Capabilities) -> Patch:
    """Return a patch of what the model declares."""
    return changed(capabilities=lambda _: capabilities)


MODEL, SESSION = reference.ReferenceModel, ReferenceSession
RUNTIME_FAULTS: dict[str, tuple[str, Patch]] = {
    "an empty fingerprint": ("card_is_sane", changed(card=lambda card: replace(card, fingerprint=""))),
    "text in capitals": ("tokenizer_is_sane", patched(ReferenceTokenizer, "decode", _shouting)),
    "NaN": ("logits_are_finite", patched(MODEL, "_run", _with_logits(lambda i, checked: np.nan))),
    "float64": ("logits_are_finite", patched(MODEL, "_run", _doubles)),
    "the wrong row": ("rows_agree", patched(requests, "_wanted", _last_is_first)),
    "more rows than declared": ("max_rows_are_returned", declares(replace(EVERYTHING, max_rows=32))),
    "logits that drift": ("repeats_are_equal", patched(MODEL, "_run", _with_logits(lambda i, checked: i * 1e-3))),
    "stale slots": ("going_back_forgets", patched(reference, "evaluate", _stale)),
    "bad tokens let through": ("errors_leave_the_session_usable", patched(requests, "_tokens", _clipped)),
    "an n_past let through": ("errors_leave_the_session_usable", patched(SessionState, "check_past", _nothing)),
    "a false claim": (
        "batch_invariance_holds",
        patched(MODEL, "_run", _with_logits(lambda i, checked: 1e-4 * (checked.n_rows > 3))),
    ),
    "a claim that is false in a long context": (
        "exact_rows_hold",
        patched(MODEL, "_run", _with_logits(lambda i, checked: 1e-4 * (checked.n_rows > 3 and checked.n_past > 90))),
    ),
    "trees taken for chains": ("trees_equal_their_chains", patched(requests, "_parents", _chained)),
    "a path that is not compacted": ("kept_paths_go_on_as_chains", patched(KVCache, "move", _nothing)),
    "branches counted as cached": (
        "branches_must_be_settled",
        patched(SessionState, "advance", _miscounting_branch),
    ),
    "a fork on the same memory": ("forks_share_and_diverge", patched(SESSION, "fork", lambda _: _shared_fork)),
    "items that touch": ("sessions_share_a_forward", patched(MODEL, "forward", _mixed_items)),
    "layers ignored": ("layer_subsets_skip", patched(requests, "_layers", _nothing)),
    "holes read": ("layer_subsets_skip", patched(SessionState, "check_written", _nothing)),
    "a tap before its layer": ("hidden_states_resume", patched(reference, "evaluate", _tap_too_early)),
    "undeclared abilities": ("undeclared_capabilities_raise", declares(Capabilities(prefill_chunk=1))),
    "any bytes loaded": ("saved_sessions_load", patched(SESSION, "load", _trusting_load)),
    "cancel ignored": ("cancel_stops_a_forward", _ignored_cancel),
    "cancel miscounted": ("cancel_stops_a_forward", patched(Stop, "check", _lossy_cancel)),
    "cancel remembered": ("cancel_alone_is_nothing", patched(Stop, "cancel", _sticky_cancel)),
    "use after close": ("closing_is_final", patched(SessionState, "check_open", _nothing)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
def test_a_fault_of_a_runtime_fails_its_check(
    load: Callable[[], Model], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The named check passes on the sound runtime, and fails with the fault, telling what was found."""
    name, patch = RUNTIME_FAULTS[fault]
    (sound,) = run_checks([RUNTIME[name]], Subject(load, 128, 0.06, None), None)
    assert sound.status == "passed" or name == "undeclared_capabilities_raise"
    patch(monkeypatch)
    (result,) = run_checks([RUNTIME[name]], Subject(load, 128, 0.06, None), None)
    assert (result.status, result.name) == ("failed", name)
    assert result.detail


def test_every_check_of_a_runtime_has_a_fault_that_fails_it() -> None:
    """A check that nothing fails would be no check."""
    assert {name for name, _ in RUNTIME_FAULTS.values()} | {"memory_is_as_planned"} == set(RUNTIME)


@pytest.mark.parametrize(
    ("printed", "status", "detail"),
    [
        ('{"planned_bytes": 100000000, "resident_bytes": 110000000}', "passed", ""),
        ('{"planned_bytes": 100000000, "resident_bytes": 120000000}', "failed", "memory() says 100.0 MB"),
        ('{"planned_bytes": 960000000, "resident_bytes": 1000000000}', "passed", ""),
        ('{"planned_bytes": 100000000, "resident_bytes": null}', "skipped", "does not tell"),
        ("{}", "failed", "expected the line of to_json"),
        ("", "failed", "expected the line of to_json"),
    ],
)
def test_memory_is_compared_with_what_a_probe_prints(
    load: Callable[[], Model], printed: str, status: str, detail: str
) -> None:
    """5 % or 16 MB, whichever is more; a probe that tells nothing fails."""
    subject = Subject(load, 128, 0.06, [sys.executable, "-c", f"print({printed!r})"])
    (result,) = run_checks([RUNTIME["memory_is_as_planned"]], subject, None)
    assert result.status == status
    assert detail in result.detail


def test_a_failed_check_does_not_spoil_the_next(load: Callable[[], Model]) -> None:
    """After a failure the model is loaded again, and what closing raises is a failure of its own."""
    loads: list[Model] = []

    def counted() -> Model:
        loads.append(load())
        return loads[-1]

    def breaks(subject: Subject) -> None:
        """It never holds."""
        subject.session()
        raise ValueError("broken")

    def breaks_later(subject: Subject) -> None:
        """It holds until the end."""
        subject.adopt(None)  # type: ignore[arg-type] # has no close()

    results = run_checks([breaks, RUNTIME["card_is_sane"], breaks_later], Subject(counted, 128, 0.06, None), None)
    assert [result.status for result in results] == ["failed", "passed", "failed"]
    assert results[0] == CheckResult("breaks", "It never holds.", "failed", "ValueError: broken")
    assert "closing after the check: AttributeError" in results[2].detail
    assert len(loads) == 2
    with pytest.raises(ConformanceError, match=r"2 conformance checks failed:\n  breaks: ValueError: broken\n"):
        raise_failures(results)

"""The cpu runtime keeps the contract of edgedec.model, refuses what it does not run, and survives misuse."""

import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.memory_reading import probe_of
from support.conformance.runtime import check_runtime
from support.models.code_paths import CODE_PATHS, each_architecture
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, Tiny, write_tiny
from support.models.tiny_runs import bits

from edgedec.errors import (
    CancelledError,
    CapabilityError,
    ContextFullError,
    ModelFormatError,
    RequestError,
    SessionError,
)
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup
from edgedec.progress import Progress
from edgedec.testing import raise_failures
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(0).integers(0, 260, 300).astype(np.int32)
CHUNK = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with F32 weights."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", Tiny(n_layer=4, n_ctx_train=8192))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    """The tiny llama, on two threads."""
    with load(path) as model:
        yield model


def load(path: Path, **options: Any) -> Model:
    """Load a model for several sessions."""
    return Cpu().load(path, LoadOptions(**({"n_ctx": 128, "n_parallel": 4, "n_threads": 2} | options)))


def conform(path: Path, *, is_measured: bool = True, **options: Any) -> None:
    """Run the conformance suite, with the memory of a process of its own where it is measured."""
    probe = probe_of("cpu", path)
    results = check_runtime(lambda: load(path, **options), memory_probe=probe if is_measured else None)
    raise_failures(results)
    skipped = {result.name for result in results if result.status == "skipped"}
    skipped -= {"cancel_stops_a_forward"}  # where forwards end too soon to be cancelled
    with load(path, **options) as model:
        undeclared = set() if not model.capabilities.hidden_input else {"undeclared_capabilities_raise"}
    assert skipped == undeclared | (set() if is_measured else {"memory_is_as_planned"})


def test_other_arithmetic_is_another_fingerprint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored under kernels with another order of sums is not taken."""
    with load(path) as before, load(path) as again:
        assert before.card.fingerprint == again.card.fingerprint
        monkeypatch.setattr("edgedec_runtimes.cpu.runtime.ARITHMETIC", "0")
        with load(path) as other:
            assert other.card.fingerprint != before.card.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", each_architecture())
def test_tiny_models_conform(tmp_path: Path, name: str) -> None:
    """Every check passes; nothing is skipped but what there is nothing to ask of.

    The memory of a process is measured with the members of CODE_PATHS.
    """
    tiny = replace(ARCHITECTURES[name], types=TILE_TYPES)
    conform(write_tiny(tmp_path / "m.gguf", tiny), is_measured=name in CODE_PATHS)


@pytest.mark.slow
def test_int8_keys_and_values_conform(path: Path) -> None:
    """The same with keys and values as int8."""
    conform(path, is_measured=False, kv_type="q8_0")


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_conforms(smollm_path: Path) -> None:
    """Every check passes for SmolLM2 135M."""
    conform(smollm_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_layer_subsets_are_the_references(path: Path, model: Model, seed: int) -> None:
    """Any subset of half-layers gives what the reference runtime computes, in steps and at once."""
    masks = np.random.default_rng(seed).random((2, 4)) < 0.6
    layers = LayerSet(attn=masks[0], mlp=masks[1])
    with Reference().load(path, LoadOptions(n_ctx=128)) as reference:
        expected = reference.session(64).forward(TOKENS[:20], n_past=0, layers=layers, rows="all").logits.copy()
    session = model.session(64)
    found = session.forward(TOKENS[:20], n_past=0, layers=layers, rows="all").logits.copy()
    assert float(np.abs(found - expected).max()) < 1e-3 * float(expected.std())
    for i in range(20):
        step = session.forward(TOKENS[i : i + 1], n_past=i, layers=layers).logits
        np.testing.assert_array_equal(bits(step), bits(found[i : i + 1]))


def test_keys_that_were_not_written_are_not_read(model: Model) -> None:
    """A layer that was left out is refused at those positions, left out again it is not, nor behind a rollback."""
    session = model.session(64)
    session.forward(TOKENS[:5], n_past=0)
    session.forward(TOKENS[5:9], n_past=5, layers=LayerSet.of(4, [0, 1, 3]))
    with pytest.raises(SessionError, match="layer 2 has no keys and values at position 5"):
        session.forward(TOKENS[9:10], n_past=9)
    session.forward(TOKENS[9:10], n_past=9, layers=LayerSet.of(4, [0, 1]))
    found = bits(session.forward(TOKENS[5:8], n_past=5).logits)
    np.testing.assert_array_equal(found, bits(model.session(64).forward(TOKENS[:8], n_past=0).logits))


def test_a_saved_session_goes_on_elsewhere(model: Model) -> None:
    """Restored into a longer session that held other tokens, it gives the bits of the one it was saved from."""
    session, other = model.session(100), model.session(300)
    session.forward(TOKENS[:90], n_past=0)
    other.forward(TOKENS[100:250], n_past=0)
    other.load(session.save(), 90)
    assert other.n_cached == 90
    expected = bits(session.forward(TOKENS[90:95], n_past=90, rows="all").logits)
    np.testing.assert_array_equal(bits(other.forward(TOKENS[90:95], n_past=90, rows="all").logits), expected)


def test_what_is_no_saved_session_is_refused(path: Path, model: Model, tmp_path: Path) -> None:
    """Too short, of another length, of another model, or longer than the session: the session is as it was."""
    session = model.session(64)
    session.forward(TOKENS[:20], n_past=0)
    data = session.save()
    expected = bits(session.forward(TOKENS[20:21], n_past=20).logits)
    attempts = [(data[:-1], 20), (data + b"x", 20), (data, 19), (data, 65), (b"", 0), (data, -1)]
    with load(write_tiny(tmp_path / "other.gguf", Tiny(n_layer=4, seed=1))) as other:
        foreign = other.session(64)
        foreign.forward(TOKENS[:20], n_past=0)
        attempts.append((foreign.save(), 20))
    with load(path, kv_type="q8_0") as narrow:
        foreign = narrow.session(64)
        foreign.forward(TOKENS[:20], n_past=0)
        attempts.append((foreign.save(), 20))
    for wrong, n_tokens in attempts:
        with pytest.raises(ModelFormatError):
            session.load(wrong, n_tokens)
        assert session.n_cached == 21
    np.testing.assert_array_equal(bits(session.forward(TOKENS[20:21], n_past=20).logits), expected)


def test_a_long_prefill_is_cancelled_from_another_thread(model: Model) -> None:
    """It ends soon, what is cached ends with a whole chunk, and the session goes on from there."""
    session, started, cancelled = model.session(8192), threading.Event(), threading.Event()
    text = np.resize(TOKENS, 8000)
    caught: list[BaseException] = []

    def note(progress: Progress) -> None:
        started.set()
        if progress.done > len(text) - 2 * CHUNK:  # a thread that was late has time until here
            assert cancelled.wait(60)

    def prefill() -> None:
        try:
            session.forward(text, n_past=0, on_progress=note)
        except CancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=prefill)
    thread.start()
    assert started.wait(60)
    session.cancel()
    cancelled.set()
    thread.join(60)
    assert len(caught) == 1
    n = session.n_cached
    assert n % CHUNK == 0
    assert CHUNK <= n < len(text)
    found = bits(session.forward(text[n : n + 3], n_past=n).logits)
    np.testing.assert_array_equal(found, bits(model.session(8192).forward(text[: n + 3], n_past=0).logits))


def test_any_session_of_a_forward_cancels_it(model: Model) -> None:
    """The second session's cancel() stops the forward of both."""
    first, second, text = model.session(1024), model.session(1024), np.resize(TOKENS, 1000)
    timer = threading.Timer(0.0, lambda: None)

    def cancel(_: object) -> None:
        nonlocal timer
        timer = threading.Timer(0.0, second.cancel)
        timer.start()
        timer.join()

    item = ForwardItem(second, 0, (RowGroup(text),))
    with pytest.raises(CancelledError):
        model.forward_with_progress([ForwardItem(first, 0, (RowGroup(text),)), item], cancel)  # type: ignore[attr-defined]
    assert (first.n_cached, second.n_cached) == (CHUNK, 0)
    second.forward(text[:3], n_past=0)


def test_cancel_without_a_forward_is_nothing(model: Model) -> None:
    """The next forward runs."""
    session = model.session(64)
    session.cancel()
    assert session.forward(TOKENS[:5], n_past=0).logits.shape == (1, 260)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tokens": TOKENS[:65], "n_past": 0}, ContextFullError),
        ({"tokens": TOKENS[:60], "n_past": 5}, ContextFullError),
        ({"tokens": TOKENS[:1], "n_past": 6}, SessionError),
        ({"tokens": TOKENS[:1], "n_past": -1}, RequestError),
        ({"tokens": np.array([260], np.int32), "n_past": 5}, RequestError),
        ({"tokens": np.array([-1], np.int32), "n_past": 5}, RequestError),
        ({"tokens": TOKENS[:0], "n_past": 5}, RequestError),
        ({"tokens": TOKENS[:2], "n_past": 5, "parents": np.array([0, -1], np.int32)}, RequestError),
        ({"tokens": TOKENS[:2], "n_past": 5, "parents": np.array([-1, 1], np.int32)}, RequestError),
        ({"tokens": TOKENS[:2], "n_past": 5, "rows": np.array([2], np.int32)}, RequestError),
        ({"tokens": TOKENS[:2], "n_past": 5, "taps": (4,)}, RequestError),
        ({"tokens": TOKENS[:2], "n_past": 5, "layers": LayerSet.of(3, [0])}, RequestError),
    ],
)
def test_a_wrong_request_changes_nothing(model: Model, arguments: dict[str, Any], error: type[Exception]) -> None:
    """It is refused before anything is evaluated or dropped."""
    session = model.session(64)
    session.forward(TOKENS[:5], n_past=0)
    with pytest.raises(error):
        session.forward(**arguments)
    assert session.n_cached == 5
    expected = bits(model.session(64).forward(TOKENS[:6], n_past=0).logits)
    np.testing.assert_array_equal(bits(session.forward(TOKENS[5:6], n_past=5).logits), expected)


def test_too_many_rows_are_refused(model: Model) -> None:
    """256 rows of logits, or of a tree, are the most; a session stands once in a forward."""
    session = model.session(512)
    with pytest.raises(CapabilityError, match="257 rows"):
        session.forward(TOKENS[:257], n_past=0, rows="all")
    with pytest.raises(CapabilityError, match="256 rows"):
        session.forward(TOKENS[:257], n_past=0, parents=np.arange(-1, 256, dtype=np.int32))
    halves = [ForwardItem(s, 0, (RowGroup(TOKENS[:129]),), rows="all") for s in (session, model.session(512))]
    with pytest.raises(CapabilityError, match="258 rows"):
        model.forward(halves)
    with pytest.raises(RequestError, match="twice"):
        model.forward([halves[0], halves[0]])
    assert session.n_cached == 0


@pytest.mark.parametrize("n_ctx", [0, -1, 2**24 + 1])
def test_sessions_have_a_length(model: Model, n_ctx: int) -> None:
    """From 1 to 16 million tokens."""
    with pytest.raises(RequestError, match="n_ctx"):
        model.session(n_ctx)


def test_a_closed_session_or_model_is_refused(path: Path) -> None:
    """Everything but closing again raises SessionError."""
    model = load(path)
    kept, closed = model.session(64), model.session(64)
    data = kept.save()
    closed.close()
    closed.close()
    for session in (closed, kept):
        uses: list[Callable[[], object]] = [
            lambda session=session: session.forward(TOKENS[:1], n_past=0),  # type: ignore[misc]
            lambda session=session: session.keep(TOKENS[:1]),  # type: ignore[misc]
            session.fork,
            session.save,
            lambda session=session: session.load(data, 0),  # type: ignore[misc]
        ]
        if session is kept:
            model.close()
            model.close()
            uses += [lambda: model.session(64), lambda: model.instruction_set]  # type: ignore[attr-defined]
        for use in uses:
            with pytest.raises(SessionError):
                use()
        assert session.n_cached == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_process_loads_its_own(path: Path, model: Model) -> None:
    """In a child the parent's model is refused, another one loads and gives the same bits; the parent goes on."""
    expected = bits(model.session(64).forward(TOKENS[:20], n_past=0).logits)

    def use() -> bool:
        try:
            model.session(64)
        except SessionError:
            with load(path) as own:
                found = bits(own.session(64).forward(TOKENS[:20], n_past=0).logits)
                return bool((found == expected).all())
        return False

    assert in_child(use) == b"True"
    np.testing.assert_array_equal(bits(model.session(64).forward(TOKENS[:20], n_past=0).logits), expected)


def in_child(act: Callable[[], object]) -> bytes:
    """Return what `act` returns in a forked process, as text; b"" where that dies or hangs."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() with threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, str(act()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    ended, _, _ = select.select([read_end], [], [], 30)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = os.read(read_end, 100)
    os.close(read_end)
    return said


def test_a_load_reports_its_begin_and_its_end(path: Path, tmp_path: Path) -> None:
    """Also where the tiles exist already, and nothing takes long."""
    for phases in (["load", "tiles"], ["load"]):
        reports: list[Progress] = []
        load(path, cache_dir=tmp_path, on_progress=reports.append).close()
        assert (reports[0], reports[-1]) == tuple(Progress("load", n, 100, "%", path.name) for n in (0, 100))
        assert list(dict.fromkeys(report.phase for report in reports)) == phases

"""Weights that are read in each forward: the same bits, never more in memory than allowed, errors and no signals."""

import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.code_paths import each_architecture
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny
from support.models.tiny_runs import bits, one_by_one

from edgedec.errors import CancelledError, RequestError, SessionError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Span
from edgedec.progress import CancelToken, Progress
from edgedec_runtimes.cpu import weights
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles import build as tile_build
from edgedec_runtimes.cpu.tiles.read_rates import Pace, read_rate, scattered_rate
from edgedec_runtimes.cpu.tiles.streaming import OUTPUT_ROWS, QKV, ExpertSlots, StreamPlan, WeightPart, spread
from edgedec_runtimes.llamacpp.loading import checked_options
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(0).integers(0, 260, 700).astype(np.int32)
MB = 10**6


@dataclass(frozen=True, slots=True)
class Streamed:
    """A model file, and what is allowed to stay in memory of it: some parts, not all."""

    path: Path
    cache_dir: Path
    resident_bytes: int

    def options(self, **options: Any) -> LoadOptions:
        """Return options that stream."""
        chosen: dict[str, Any] = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 2, "cache_dir": self.cache_dir}
        return LoadOptions(**(chosen | {"resident_bytes": self.resident_bytes} | options))

    def load(self, **options: Any) -> CpuModel:
        """Load it, streaming unless told otherwise."""
        model = Cpu().load(self.path, self.options(**options))
        assert isinstance(model, CpuModel)
        return model

    def plan(self) -> StreamPlan:
        """Return which parts stay."""
        gguf = read_gguf(self.path)
        network, options = read_network(gguf), self.options()
        plan = weights.stream_plan(weights.tile_job(gguf, network, options), network, options.resident_bytes)
        assert plan is not None
        return plan

    def tile_file(self) -> Path:
        (path,) = self.cache_dir.glob("tiles/*.tiles")
        return path


def make(folder: Path, tiny: Tiny) -> Streamed:
    """Write a model of six layers, of which half a layer and more must be read each time."""
    path = write_tiny(folder / "m.gguf", replace(tiny, n_layer=6, n_ctx_train=8192))
    gguf = read_gguf(path)
    return Streamed(path, folder / "cache", weights.tile_job(gguf, read_network(gguf), LoadOptions()).n_bytes * 3 // 5)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Streamed:
    """A tiny llama with F32 weights."""
    return make(tmp_path_factory.mktemp("streamed"), Tiny())


@pytest.fixture
def model(streamed: Streamed) -> Iterator[CpuModel]:
    """That one, streaming on two threads."""
    with streamed.load() as model:
        yield model


@pytest.fixture(scope="module")
def whole(streamed: Streamed) -> Iterator[Model]:
    with streamed.load(resident_bytes=None) as model:
        yield model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", each_architecture())
def test_the_same_bits(tmp_path: Path, architecture: str) -> None:
    """A prefill of several chunks, steps, a tree with its path kept and states after layers equal those in memory.

    One thread evaluates what lies in memory, two evaluate what is streamed.
    """
    case = make(tmp_path, ARCHITECTURES[architecture])
    found = []
    for resident_bytes in (None, case.resident_bytes):
        with case.load(resident_bytes=resident_bytes, n_threads=1 if resident_bytes is None else 2) as model:
            session = model.session(1024)
            results = [bits(session.forward(TOKENS[:300], n_past=0).logits)]
            results.append(one_by_one(session, TOKENS[300:308]))
            tree = session.forward(
                TOKENS[:5], n_past=308, parents=np.array([-1, 0, 0, 1, 2], np.int32), rows="all", taps=(0, 3)
            )
            results += [bits(tree.logits), bits(tree.hidden[0]), bits(tree.hidden[3])]
            session.keep(np.array([0, 2, 4], np.int32))
            results.append(bits(session.forward(TOKENS[:1], n_past=311).logits))
            found.append(results)
            assert (model.streamed_bytes() > 0) is (resident_bytes is not None)
    for expected, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_several_sessions_and_skipped_layers(model: CpuModel, whole: Model) -> None:
    """Two sessions in a forward, one of which skips layers, and steps with sets of layers in turn are equal."""
    found = []
    for each in (whole, model):
        first, second = each.session(64), each.session(64)
        subset = LayerSet.of(6, [0, 2, 5])
        items = [
            ForwardItem(first, 0, (RowGroup(TOKENS[:7]),)),
            ForwardItem(second, 0, (RowGroup(TOKENS[7:12], span=Span(layers=subset)),)),
        ]
        logits = [bits(forward.logits) for forward in each.forward(items)]
        for i in range(6):
            layers = (None, subset, LayerSet.of(6, []))[i % 3]
            logits.append(bits(first.forward(TOKENS[i : i + 1], n_past=7, layers=layers).logits))
        found.append(logits)
    for expected, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_what_is_read(streamed: Streamed, model: CpuModel) -> None:
    """Each part once a chunk of a prefill, at most a ring ahead; the head once, at the end of the prefill.

    The chunks before the end need no more of the last layer than its keys and values.
    """
    plan, session = streamed.plan(), model.session(1024)
    last = max(part.layer for part in plan.parts)
    read = [part for part in plan.parts if not part.stays]
    at_end = sum(
        part.n_bytes for part in read if part.stage == OUTPUT_ROWS or (part.layer == last and part.stage != QKV)
    )
    session.forward(TOKENS[:600], n_past=0)
    n_chunks = 3
    expected = n_chunks * (plan.missing_bytes - at_end) + at_end
    assert expected <= model.streamed_bytes() <= expected + plan.ring_bytes
    for i in range(10):
        session.forward(TOKENS[600 + i : 601 + i], n_past=600 + i)
    expected += 10 * plan.missing_bytes
    # The prefill's last chunk was the first to need the head: what was read ahead of it by then was of no use.
    assert expected <= model.streamed_bytes() <= expected + 3 * plan.ring_bytes


def test_skipped_layers_are_not_read(streamed: Streamed, model: CpuModel) -> None:
    """Steps through one attention and one feed-forward block read no other, and without logits no head."""
    plan, session = streamed.plan(), model.session(64)
    layers = LayerSet(np.arange(6) == 1, np.arange(6) == 4)
    kept = {(1, 0), (1, 1), (4, 2), (4, 3)}
    needed = sum(part.n_bytes for part in plan.parts if (part.layer, part.stage) in kept and not part.stays)
    session.forward(TOKENS[:1], n_past=0, layers=layers, rows=np.empty(0, np.int32))
    before = model.streamed_bytes()
    for _ in range(20):
        session.forward(TOKENS[:1], n_past=0, layers=layers, rows=np.empty(0, np.int32))
    assert model.streamed_bytes() - before <= 20 * needed + plan.ring_bytes


def test_the_plan(streamed: Streamed, model: CpuModel) -> None:
    """It keeps to what is allowed, no byte is missing from it, and load's memory is what was planned."""
    plan = streamed.plan()
    assert plan.resident_bytes <= streamed.resident_bytes
    assert any(part.stays for part in plan.parts)
    assert plan.missing_bytes + sum(part.n_bytes for part in plan.parts if part.stays) == sum(
        part.n_bytes for part in plan.parts
    )
    assert plan.seconds_per_token(Pace(plan.missing_bytes / 2, math.inf)) == 2.0
    (planned,) = (term for term in Cpu().plan(streamed.path, streamed.options()) if "weights" in term.name)
    (held,) = (term for term in model.memory(1024, 16) if "weights" in term.name)
    assert planned == held
    assert (held.name, held.n_bytes) == ("weights (streamed)", plan.resident_bytes)
    assert held.detail.startswith(f"{plan.missing_bytes / MB:.1f} MB more are read for each token: ")
    assert held.detail.endswith("B/s from the disk, measured on the tiles")


def test_what_a_token_is_expected_to_take() -> None:
    """Parts are read beside all products, experts beside gates and ups; the longer of the two counts."""
    parts = (WeightPart(QKV, 0, 0, 0, 0, 300, stays=True), WeightPart(QKV, 1, 0, 0, 300, 100))
    experts = ExpertSlots(n=30, slot_bytes=10, n_expert=40, token_bytes=80, read_bytes=5, down_bytes=30, n_missing=6)
    assert experts.missing_bytes == 20
    dense, mixture = StreamPlan(parts, 300), StreamPlan(parts[:1], 0, experts)
    for disk, memory, of_dense, of_mixture in (
        (10, math.inf, 10.0, 2.0),
        (10, 100, 10.0, 3 + 2 + 0.3),  # the disk takes longer
        (math.inf, 100, 4.0, 3 + 0.5 + 0.3),  # computing takes longer
        (40, 100, 4.0, 3 + 0.5 + 0.3),
        (20, 100, 5.0, 3 + 1 + 0.3),
    ):
        assert dense.seconds_per_token(Pace(disk, memory)) == pytest.approx(of_dense, rel=1e-12)
        assert mixture.seconds_per_token(Pace(disk, memory)) == pytest.approx(of_mixture, rel=1e-12)
    both = StreamPlan(parts, 300, experts).seconds_per_token(Pace(10, 100))
    assert both == pytest.approx(10 + 2 + 0.3, rel=1e-12)


def test_enough_for_all_streams_nothing(streamed: Streamed) -> None:
    """An allowance of what the tiles take loads them as without one."""
    options = streamed.options(resident_bytes=50 * MB)
    assert "weights (tiles)" in [term.name for term in Cpu().plan(streamed.path, options)]
    with Cpu().load(streamed.path, options) as model:
        assert isinstance(model, CpuModel)
        model.session(64).forward(TOKENS[:2], n_past=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resident_bytes": 0}, "resident_bytes is 0; it must be from 1"),
        (
            {"resident_bytes": 1 * MB},
            r"resident_bytes is 1\.0 MB; what this model's weights pass through takes 1\.6 MB",
        ),
        ({"runtime_options": {"tile_cache": False}}, "there is no tile file to read the rest from"),
    ],
)
def test_what_cannot_be_honoured_is_refused(streamed: Streamed, options: dict[str, Any], words: str) -> None:
    """Planning and loading say alike what is missing."""
    for act in (Cpu().plan, Cpu().load):
        with pytest.raises(RequestError, match=words):
            act(streamed.path, streamed.options(**options))


def test_no_disk_for_tiles(streamed: Streamed, tmp_path: Path) -> None:
    """Where the tiles can't be written, they are not made in memory, which would be more than allowed."""
    (tmp_path / "tiles").write_bytes(b"in the way")
    with pytest.raises(RequestError, match="its folder can't be written"):
        streamed.load(cache_dir=tmp_path)


def test_other_runtimes_refuse(streamed: Streamed) -> None:
    """The reference and llamacpp say that they keep all weights."""
    for act in (lambda options: Reference().plan(streamed.path, options), checked_options):
        with pytest.raises(RequestError, match="leave resident_bytes out"):
            act(LoadOptions(resident_bytes=50 * MB))


@pytest.mark.slow
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(0, 2000))
def test_what_stays_fills_the_budget(sizes: list[int], budget: int) -> None:
    """Never more than the budget, and nothing is left out that would still fit."""
    stays = spread(sizes, budget)
    used = sum(size for size, chosen in zip(sizes, stays, strict=True) if chosen)
    assert used <= budget
    assert all(chosen or used + size > budget for size, chosen in zip(sizes, stays, strict=True))


@pytest.mark.slow
def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    """The forward fails, the session keeps what it had, and goes on with the same bits once the file is whole again."""
    case = make(tmp_path, Tiny())
    with case.load(resident_bytes=None) as model:
        expected = one_by_one(model.session(64), TOKENS[:6])
    with case.load() as model:
        session = model.session(64)
        one_by_one(session, TOKENS[:5])
        data = case.tile_file().read_bytes()
        os.truncate(case.tile_file(), 10_000)
        for _ in range(2):
            # A ring was read ahead while the file was whole.
            with pytest.raises(StorageError, match=r"ends at 10000 bytes, \d+ were expected; check the disk"):
                session.forward(TOKENS[5:6], n_past=5)
            assert session.n_cached == 5
        with case.tile_file().open("r+b") as file:
            file.write(data)
        np.testing.assert_array_equal(bits(session.forward(TOKENS[5:6], n_past=5).logits), expected[5:])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """The system's reason comes through; a folder stands for a failing disk."""
    case = make(tmp_path, Tiny())
    with case.load() as model:
        open_fds = {int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
        (fd,) = (fd for fd, target in open_fds.items() if target == str(case.tile_file()))
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, fd)
        os.close(folder)
        with pytest.raises(StorageError, match="reading the weights failed: Is a directory"):
            model.session(64).forward(TOKENS[:5], n_past=0)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["no way around the cache", "deleted"])
def test_the_file_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Through the system's cache where there is no direct reading; and by who had it open when it was deleted."""
    case = make(tmp_path, Tiny())
    with case.load(resident_bytes=None) as model:
        expected = one_by_one(model.session(64), TOKENS[:4])
    if change == "no way around the cache":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with case.load() as model:
        if change == "deleted":
            case.tile_file().unlink()
        np.testing.assert_array_equal(one_by_one(model.session(64), TOKENS[:4]), expected)


def test_cancelled_and_gone_on(model: CpuModel, whole: Model) -> None:
    """A cancelled prefill ends with a whole chunk, and goes on from there with the same bits."""
    session, text = model.session(8192), np.resize(TOKENS, 8000)

    def cancel(progress: Progress) -> None:
        timers.append(threading.Timer(0.0, session.cancel))
        timers[-1].start()
        if progress.done > len(text) - 512:  # threads that were late have time until here
            for timer in timers:
                timer.join()

    timers: list[threading.Timer] = []
    with pytest.raises(CancelledError):
        session.forward(text, n_past=0, on_progress=cancel)
    for timer in timers:
        timer.join()
    n = session.n_cached
    assert n % 256 == 0
    assert n > 0
    found = bits(session.forward(text[n : n + 3], n_past=n).logits)
    np.testing.assert_array_equal(found, bits(whole.session(8192).forward(text[: n + 3], n_past=0).logits))


def test_cancelled_while_loading(streamed: Streamed) -> None:
    """What stays is read part by part, with a look at the cancellation between."""
    cancel = CancelToken()
    with pytest.raises(CancelledError):
        streamed.load(cancel=cancel, on_progress=lambda progress: cancel.cancel())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc/self/task")
def test_closing_while_it_reads_ahead(streamed: Streamed) -> None:
    """After a step the next one's weights are on their way; closing waits for the thread and leaves no file open."""

    def held() -> list[int]:
        return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]

    streamed.load().close()
    before = held()
    for _ in range(10):
        model = streamed.load()
        model.session(64).forward(TOKENS[:1], n_past=0)
        model.close()
        with pytest.raises(SessionError, match="closed"):
            model.streamed_bytes()
    until = time.monotonic() + 60
    while any(now > then for now, then in zip(held(), before, strict=True)):  # a thread that ended may still be listed
        assert time.monotonic() < until, (before, held())
        time.sleep(0.01)


def test_models_stream_at_the_same_time(streamed: Streamed, model: CpuModel, whole: Model) -> None:
    """Two models on threads of their own, each with its ring, don't mix."""
    expected = one_by_one(whole.session(64), TOKENS[:12])
    found: list[Any] = []
    with streamed.load() as other:
        threads = [
            threading.Thread(target=lambda m=each: found.append(one_by_one(m.session(64), TOKENS[:12])))
            for each in (model, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in found:
        np.testing.assert_array_equal(each, expected)
    assert len(found) == 2


@pytest.mark.slow
def test_tiles_made_in_pieces_are_the_same(streamed: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are made and written a tile at a time give the same file."""
    streamed.load().close()
    monkeypatch.setattr(tile_build, "_PIECE_BYTES", 1)
    streamed.load(cache_dir=tmp_path).close()
    (path,) = tmp_path.glob("tiles/*.tiles")
    assert path.read_bytes() == streamed.tile_file().read_bytes()


def test_the_rate_of_a_file(tmp_path: Path) -> None:
    """It is positive for any file that has a byte, and a file that is gone is an error."""
    for n_bytes in (1, 4097, 5 << 20):
        path = tmp_path / f"{n_bytes}"
        path.write_bytes(bytes(n_bytes))
        assert read_rate(path) > 0
        assert scattered_rate(path, 4096, 9, most_s=0.01) > 0
    for rate in (read_rate, partial(scattered_rate, piece_bytes=4096, n_pieces=9)):
        with pytest.raises(StorageError, match="No such file"):
            rate(tmp_path / "none")

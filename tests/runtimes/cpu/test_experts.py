"""Mixtures of experts on the cpu runtime: which rows share an expert's weights, what is counted, and streaming."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import RequestError, StorageError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.stats import DecodeStats
from edgedec_runtimes.cpu.expert_counts import ExpertReads
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.session import CpuSession
from edgedec_runtimes.cpu.tiles.cache import Tiles
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.cpu.tiles.streaming import ExpertSlots, StreamPlan, plan_streaming
from edgedec_runtimes.cpu.weights import tile_job

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(3).integers(0, 260, 256).astype(np.int32)


def loaded(path: Path, max_rows: int = 16) -> CpuModel:
    model = Cpu().load(path, LoadOptions(n_ctx=512, n_threads=2, max_rows=max_rows))
    assert isinstance(model, CpuModel)
    return model


def test_experts_are_counted_by_rows(tmp_path: Path) -> None:
    """One row goes through n_expert_used experts; equal rows share them; many rows go through nearly all."""
    tiny = ARCHITECTURES["qwen3moe"]
    with loaded(write_tiny(tmp_path / "m.gguf", tiny)) as model:
        session = model.session(512)
        assert model.experts_touched() == {}
        session.forward(TOKENS[:1], n_past=0)
        assert model.experts_touched() == {1: tiny.n_expert_used}
        # Three branches with the same token at the same position are the same rows.
        session.forward(np.repeat(TOKENS[1:2], 3), n_past=1, parents=np.full(3, -1, np.int32), rows="all")
        assert model.experts_touched() == {1: tiny.n_expert_used, 3: tiny.n_expert_used}
        session.forward(TOKENS[:16], n_past=0, rows="all")
        touched = model.experts_touched()
        assert tiny.n_expert_used < touched[16] <= tiny.n_expert


def test_the_explanation_has_the_experts(tmp_path: Path) -> None:
    """A text's statistics say them where there are experts, and nothing else."""
    for name, n_sentences in (("qwen3moe", 1), ("qwen3", 0)):
        with loaded(write_tiny(tmp_path / f"{name}.gguf", ARCHITECTURES[name])) as model:
            session = model.session(64)
            assert isinstance(session, CpuSession)
            session.forward(TOKENS[:1], n_past=0)
            stats = DecodeStats()
            with session.generating(1, stats=stats):
                assert not stats.explanation
            assert len(stats.explanation) == n_sentences
            assert all("went through, since the model was loaded: 1: 4.0" in text for text in stats.explanation)
            session.close()
            with session.generating(1, stats=stats):
                pass
            assert len(stats.explanation) == n_sentences


@pytest.mark.parametrize("n_rows", [1, 7, 64, 65, 256])
def test_all_rows_may_choose_the_same_experts(tmp_path: Path, n_rows: int) -> None:
    """Groups of one expert's rows are cut at 64; a tree of equal rows has equal logits, those of a single step."""
    tiny = replace(ARCHITECTURES["granitemoe-shared"], types=("Q4_K", "Q6_K", "Q8_0"))
    with loaded(write_tiny(tmp_path / "m.gguf", tiny), max_rows=256) as model:
        session = model.session(512)
        expected = session.forward(TOKENS[:1], n_past=0).logits.copy()
        rows = np.repeat(TOKENS[:1], n_rows), np.full(n_rows, -1, np.int32)
        found = session.forward(rows[0], n_past=0, parents=rows[1], rows="all").logits
        np.testing.assert_array_equal(found, np.repeat(expected, n_rows, axis=0))


def streamed_options(folder: Path, resident_bytes: int | None = None) -> LoadOptions:
    """Return options with a tile cache, and with a limit for weights in memory."""
    options = LoadOptions(n_ctx=512, n_threads=2, cache_dir=folder / "cache")
    return replace(options, resident_bytes=resident_bytes)


def streaming_plans(path: Path, folder: Path) -> list[StreamPlan]:
    """Return the plans for all experts but some, for the fewest, and for the fewest with parts that are streamed."""
    network = read_network(read_gguf(path))
    job = tile_job(read_gguf(path), network, streamed_options(folder))
    plans: dict[tuple[int, bool], StreamPlan] = {}
    for resident_bytes in range(job.n_bytes - 1, 0, -(job.n_bytes // 200)):
        try:
            plan = plan_streaming(network, job.header.places(), resident_bytes)
        except RequestError:
            break
        assert plan.resident_bytes <= resident_bytes
        assert plan.experts is not None
        plans[plan.experts.n, plan.ring_bytes > 0] = plan
    found = sorted(plans)
    assert found[0] == (network.n_expert_used, False)
    assert found[1] == (network.n_expert_used, True)
    return [plans[key] for key in (found[0], found[1], found[-1])]


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "granitemoe", "lfm2moe"])
def test_streamed_experts_have_the_same_bits(tmp_path: Path, name: str) -> None:
    """With some experts in memory, and in waves of the fewest; a prompt, single steps and a tree."""
    tiny = replace(ARCHITECTURES[name], n_layer=4, n_ff_expert=512)
    path = write_tiny(tmp_path / "m.gguf", replace(tiny, types=("Q4_K", "Q6_K", "Q8_0")))
    parents = np.array([-1, 0, 0, 1, -1, 4], np.int32)

    def outcome(options: LoadOptions) -> tuple[list[NDArray[np.float32]], int, StreamedTiles | Tiles]:
        with Cpu().load(path, options) as model:
            assert isinstance(model, CpuModel)
            session = model.session(512)
            found = [session.forward(TOKENS[:70], n_past=0, rows="all").logits.copy()]
            found += [session.forward(TOKENS[i : i + 1], n_past=i).logits.copy() for i in range(70, 76)]
            found.append(session.forward(TOKENS[:6], n_past=76, parents=parents, rows="all").logits.copy())
            return found, model.streamed_bytes(), model.tiles

    expected, n_read, _ = outcome(streamed_options(tmp_path))
    assert n_read == 0
    for plan in streaming_plans(path, tmp_path):
        found, n_read, tiles = outcome(streamed_options(tmp_path, plan.resident_bytes + 3 * 8192))
        assert isinstance(tiles, StreamedTiles)
        assert tiles.plan.experts is not None
        assert n_read > 0
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def held_experts(folder: Path, n: int) -> tuple[Path, LoadOptions, int, ExpertSlots]:
    """Return a mixture, options that keep n times the experts of a layer's token in memory, and their number."""
    path = write_tiny(folder / "m.gguf", replace(ARCHITECTURES["qwen3moe"], types=("Q8_0",), n_ff_expert=512))
    few, _, _ = streaming_plans(path, folder)
    assert few.experts is not None
    n_slots = n * read_network(read_gguf(path)).n_expert_used
    n_bytes = few.resident_bytes + (n_slots - few.experts.n) * few.experts.slot_bytes + 20_000
    return path, streamed_options(folder, n_bytes), n_slots, few.experts


def test_a_token_reads_only_its_experts(tmp_path: Path) -> None:
    """Not more than they take, and nothing when the same token comes again."""
    path, options, n_slots, experts = held_experts(tmp_path, ARCHITECTURES["qwen3moe"].n_layer)
    with Cpu().load(path, options) as model:
        assert isinstance(model, CpuModel)
        session = model.session(512)
        for n_present in (0, n_slots):
            session.forward(TOKENS[:1], n_past=0)
            assert model.streamed_bytes() == experts.token_bytes
            assert model.expert_reads() == ExpertReads(n_slots + n_present, n_present)


def test_favourites_stay_in_memory(tmp_path: Path) -> None:
    """Experts that many tokens chose outlast those of a few later ones, which were used last."""
    path, options, _, _ = held_experts(tmp_path, 3)  # two layers of one token, and those that come and go
    with Cpu().load(path, options) as model:
        assert isinstance(model, CpuModel)
        session = model.session(512)
        for _ in range(20):
            session.forward(TOKENS[:1], n_past=0)
        for i in range(1, 6):
            session.forward(TOKENS[i : i + 1], n_past=0)
        before = model.expert_reads()
        session.forward(TOKENS[:1], n_past=0)
        after = model.expert_reads()
        assert after.present - before.present == after.n_chosen - before.n_chosen


def test_a_disk_that_fails_is_an_error_and_no_wrong_text(tmp_path: Path) -> None:
    """A tile file that was cut short raises StorageError in each forward that needs what is gone."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["qwen3moe"], types=("Q8_0",), n_ff_expert=512))
    few, _, _ = streaming_plans(path, tmp_path)
    with Cpu().load(path, streamed_options(tmp_path, few.resident_bytes + 20_000)) as model:
        session = model.session(512)
        session.forward(TOKENS[:2], n_past=0)
        (tiles,) = (tmp_path / "cache" / "tiles").glob("*.tiles")
        whole = tiles.read_bytes()
        os.truncate(tiles, 4096)
        for _ in range(2):
            with pytest.raises(StorageError, match="were expected"):
                session.forward(TOKENS[:20], n_past=0)
        tiles.write_bytes(whole)
        found = session.forward(TOKENS[:20], n_past=0).logits.copy()
    with Cpu().load(path, streamed_options(tmp_path)) as model:
        np.testing.assert_array_equal(found, model.session(512).forward(TOKENS[:20], n_past=0).logits)

"""Adapters on the cpu runtime: logits as of merged weights; no bit depends on splits, threads or neighbours."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_adapters import merged, tiny_adapter
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.errors import ModelFormatError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow
IDS = np.arange(10, 50, dtype=np.int32)
DENSE = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "in_proj", "out_proj", "ssm_in", "ssm_out"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    *("inp_gate", "proj", "ssm_alpha", "ssm_beta"),
)
SETS = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, an adapter of F32 matrices with rank 4, and one of F16 matrices with rank 19."""
    found = tmp_path_factory.mktemp("adapters")
    tiny_llama(found / "base.gguf")
    tiny_adapter(found / "a.gguf", found / "base.gguf", seed=1)
    tiny_adapter(found / "b.gguf", found / "base.gguf", seed=2, rank=19, dtype=np.float16)
    return found


def loaded(folder: Path, n_threads: int = 2) -> Model:
    adapters = ((folder / "a.gguf", 1.0), (folder / "b.gguf", 1.0))
    return Cpu().load(folder / "base.gguf", LoadOptions(n_ctx=128, n_threads=n_threads, adapters=adapters))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    """The model with both adapters on two threads."""
    with loaded(folder) as found:
        yield found


def opened(model: Model, scales: tuple[float, ...]) -> Session:
    """Return a session with these scales."""
    session = model.session(128)
    session.scales = scales
    return session


def logits(session: Session, ids: NDArray[np.int32] = IDS) -> NDArray[np.float32]:
    """Return the logits of all rows of a text, read in one forward."""
    return session.forward(ids, n_past=0, rows="all").logits.copy()


@pytest.mark.parametrize("scales", SETS)
def test_the_logits_are_those_of_merged_weights(folder: Path, model: Model, scales: tuple[float, float]) -> None:
    """With each set of adapters they are those that the reference runtime computes of float weights merged by numpy."""
    adapters = [(folder / name, scale) for name, scale in zip(("a.gguf", "b.gguf"), scales, strict=True)]
    path = merged(folder / f"merged {scales}.gguf", folder / "base.gguf", adapters)
    with Reference().load(path, LoadOptions(n_ctx=64, kv_type="f16")) as reference:
        expected = logits(reference.session(64), IDS[:12])
    np.testing.assert_allclose(logits(opened(model, scales), IDS[:12]), expected, rtol=0, atol=4e-3)


@pytest.mark.parametrize("name", ["phi3", "gemma4", "lfm2", "qwen35", "granitehybrid", "qwen2moe", "nanbeige"])
def test_an_adapter_of_every_dense_matrix(name: str, tmp_path: Path) -> None:
    """Fused matrices, mixers, what layers get of a token, routers, shared experts, loops: as merged weights."""
    base = write_tiny(tmp_path / "base.gguf", ARCHITECTURES[name])
    adapter = tiny_adapter(tmp_path / "a.gguf", base, matrices=DENSE, rank=2, alpha=1.0)
    options = LoadOptions(n_ctx=64, adapters=((adapter, 1.0),))
    with Cpu().load(merged(tmp_path / "m.gguf", base, [(adapter, 0.25)]), LoadOptions(n_ctx=64)) as other:
        expected = logits(other.session(64), IDS[:9])
    with Cpu().load(base, options) as found:
        plain, adapted = (logits(opened(found, (scale,)), IDS[:9]) for scale in (0.0, 0.25))
    assert np.abs(adapted - plain).max() > 0.5
    np.testing.assert_allclose(adapted, expected, rtol=0, atol=0.02)


def test_an_adapter_adds_to_quantized_products(tmp_path: Path) -> None:
    """On Q8_0 weights, the logits are nearer to those of merged float weights than 1 / 20 of the adapter's change."""
    base = write_tiny(tmp_path / "base.gguf", Tiny(types=("Q8_0",)))
    adapter = tiny_adapter(tmp_path / "a.gguf", base, seed=3)
    with Cpu().load(merged(tmp_path / "m.gguf", base, [(adapter, 0.5)]), LoadOptions(n_ctx=64)) as other:
        expected = logits(other.session(64), IDS[:8])
    with Cpu().load(base, LoadOptions(n_ctx=64, adapters=((adapter, 1.0),))) as found:
        plain, adapted = (logits(opened(found, (scale,)), IDS[:8]) for scale in (0.0, 0.5))
    assert 20 * np.abs(adapted - expected).max() < np.abs(plain - expected).max()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_no_bit_depends_on_threads(folder: Path, model: Model, n_threads: int) -> None:
    with loaded(folder, n_threads) as other:
        for scales in SETS:
            np.testing.assert_array_equal(logits(opened(other, scales)), logits(opened(model, scales)))


def test_no_bit_depends_on_where_the_weights_are(tmp_path: Path) -> None:
    """With weights that each forward reads from the disk, the logits are those of weights in memory."""
    base = write_tiny(tmp_path / "base.gguf", Tiny(types=("Q8_0",), n_layer=4))
    adapter, found = tiny_adapter(tmp_path / "a.gguf", base), []
    options = LoadOptions(n_ctx=64, cache_dir=tmp_path / "cache", adapters=((adapter, 1.0),))
    weights = next(term.n_bytes for term in Cpu().plan(base, options) if term.name.startswith("weights"))
    for resident_bytes in (None, weights - 1_000_000):
        with Cpu().load(base, replace(options, resident_bytes=resident_bytes)) as streamed:
            found.append(logits(opened(streamed, (1.0,))))
            assert isinstance(streamed, CpuModel)
            assert (streamed.streamed_bytes() > 0) == (resident_bytes is not None)
    np.testing.assert_array_equal(found[0], found[1])


def test_the_plan_has_a_line_for_adapters(folder: Path, model: Model) -> None:
    """It is the same before and after the load, and at least what the matrices take; without adapters there is none."""
    options = LoadOptions(n_ctx=128, n_threads=2, adapters=((folder / "a.gguf", 1.0), (folder / "b.gguf", 1.0)))
    plans = Cpu().plan(folder / "base.gguf", options), model.memory(128, 16)
    before, after = ([term for term in plan if term.name == "adapters"] for plan in plans)
    assert before == after
    assert isinstance(model, CpuModel)
    tiles = sum(map(len, model.adapters.tiles))
    assert tiles <= before[0].n_bytes < tiles + 1_000_000
    assert all(term.name != "adapters" for term in Cpu().plan(folder / "base.gguf", replace(options, adapters=())))


def test_no_bit_depends_on_how_a_text_is_cut(model: Model) -> None:
    """Rows one by one, in pieces of 1 to 13, and in a tree have the bits of one forward."""
    whole = logits(opened(model, (1.0, 0.5)))
    session, n_past = opened(model, (1.0, 0.5)), 0
    for n in (1, 2, 3, 5, 8, 13, 7, 1):
        found = session.forward(IDS[n_past : n_past + n], n_past=n_past, rows="all").logits
        np.testing.assert_array_equal(found, whole[n_past : n_past + n])
        n_past += n
    tokens, parents = np.array([IDS[10], 7, IDS[11]], np.int32), np.array([-1, -1, 0], np.int32)
    found = session.forward(tokens, n_past=10, parents=parents, rows="all").logits
    np.testing.assert_array_equal(found[[0, 2]], whole[10:12])


def test_no_bit_depends_on_neighbours(model: Model) -> None:
    """Sessions with four sets of adapters in one forward each have the bits of a forward of their own."""
    expected = [logits(opened(model, scales)) for scales in SETS]
    sessions = [opened(model, scales) for scales in SETS]
    for begin, end in ((0, 30), (30, 31), (31, 40)):
        items = [ForwardItem(session, begin, (RowGroup(IDS[begin:end]),), rows="all") for session in sessions]
        for forward, whole in zip(model.forward(items), expected, strict=True):
            np.testing.assert_array_equal(forward.logits, whole[begin:end])


def test_a_fork_has_the_adapters_of_its_session(model: Model) -> None:
    whole, session = logits(opened(model, (1.0, 0.5))), opened(model, (1.0, 0.5))
    session.forward(IDS[:20], n_past=0)
    fork = session.fork()
    assert fork.scales == (1.0, 0.5)
    np.testing.assert_array_equal(fork.forward(IDS[20:], n_past=20, rows="all").logits, whole[20:])


def test_other_scales_empty_a_session(model: Model) -> None:
    """After adapt() a session holds no token; going on from one is refused, and a new text has the new bits."""
    session = opened(model, (1.0, 0.0))
    session.forward(IDS, n_past=0)
    session.scales = (0.0, 0.5)
    assert session.n_cached == 0
    np.testing.assert_array_equal(logits(session), logits(opened(model, (0.0, 0.5))))
    with pytest.raises(RequestError, match=r"there are 1 scales of 2 adapters"):
        session.scales = (1.0,)


def test_a_saved_state_belongs_to_its_adapters(model: Model) -> None:
    """A session with the scales that it was saved with goes on from a saved state; any other refuses it."""
    for scales in SETS:
        session = opened(model, scales)
        session.forward(IDS[:20], n_past=0)
        saved = session.save()
        for others in SETS:
            other = opened(model, others)
            if others != scales:
                with pytest.raises(ModelFormatError, match="evaluate the tokens again"):
                    other.load(saved, 20)
                continue
            other.load(saved, 20)
            found = other.forward(IDS[20:], n_past=20, rows="all").logits
            np.testing.assert_array_equal(found, logits(opened(model, scales))[20:])


def test_the_fingerprint_names_the_content_of_adapters(folder: Path, model: Model, tmp_path: Path) -> None:
    """A copy of an adapter is the same one, wherever it lies; the same name with other content is another one."""
    cards: list[Any] = []
    for seed in (1, 4):
        path = tiny_adapter(tmp_path / "a.gguf", folder / "base.gguf", seed=seed)
        options = LoadOptions(n_ctx=128, adapters=((path, 1.0), (folder / "b.gguf", 0.5)))
        with Cpu().load(folder / "base.gguf", options) as other:
            cards.append(other.card)
    assert cards[0].fingerprint == model.card.fingerprint != cards[1].fingerprint
    assert cards[0].adapters == (str(tmp_path / "a.gguf"), str(folder / "b.gguf"))

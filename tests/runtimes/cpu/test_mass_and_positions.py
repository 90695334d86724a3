"""What a forward tells of attention and where its rows turn to: the mass that rows weigh, and positions of rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, WINDOWED_EXAONE4, write_tiny

from edgedec.errors import CapabilityError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session, Span
from edgedec.model_card import Capabilities
from edgedec.runtime import Runtime
from edgedec.sessions.batching import Batcher
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow


TOKENS = np.random.default_rng(4).integers(0, 260, 330).astype(np.int32)
WEIGHTS = np.array([0.25, 0, 1, 0.5], np.float32)
LONG = np.linspace(0.1, 1, 100, dtype=np.float32)
NO_ROWS = np.empty(0, np.int32)
Mass = NDArray[np.float32]


def mass(session: Session, tokens: NDArray[np.int32], weights: NDArray[np.float32], n_past: int = 0) -> Mass:
    """Return the mass of all layers after some tokens behind those that the session holds."""
    layers = tuple(range(session.model.card.n_layer))
    found = evaluated(session, n_past, RowGroup(tokens), rows=NO_ROWS, mass=dict.fromkeys(layers, weights)).mass
    assert found is not None, "it was asked for"
    return found


def loaded(path: Path, runtime: Runtime | None = None, **options: int | str) -> Model:
    """Return a model, on the cpu runtime if no other one is given."""
    given: dict[str, object] = {"n_ctx": 384, "n_threads": 1, **options}
    return (runtime or Cpu()).load(path, LoadOptions(**given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with two layers."""
    return tiny_llama(tmp_path_factory.mktemp("rows") / "m.gguf", n_embd=128, n_ctx_train=512)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4", "gpt-oss", "lfm2", "exaone4", "qwen35moe"])
def test_the_mass_is_the_reference_s(tmp_path: Path, name: str) -> None:
    """Soft caps, windows, sinks, keys of other layers, gates, and layers without attention, whose mass is 0."""
    tiny = WINDOWED_EXAONE4 if name == "exaone4" else ARCHITECTURES[name]
    file = write_tiny(tmp_path / "m.gguf", replace(tiny, types=("F32",), dealt=True))
    with loaded(file) as ours, loaded(file, Reference()) as reference:
        found, expected = (mass(model.session(64), TOKENS[:48] % 200, WEIGHTS) for model in (ours, reference))
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.any(axis=2), expected.any(axis=2))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5)


def test_the_mass_of_a_head_is_what_its_rows_weigh(path: Path) -> None:
    """Also with keys of 4 bits; nothing is added behind the last row, or for rows whose number is 0."""
    for kv_type in ("f16", "q8_0", "q4_0"):
        with loaded(path, kv_type=kv_type) as model:
            found = mass(model.session(384), TOKENS, WEIGHTS)
        np.testing.assert_allclose(found.sum(axis=2), WEIGHTS.sum(), rtol=1e-5)
        assert (found >= 0).all()


def test_the_mass_has_the_same_bits_however_rows_are_cut(path: Path) -> None:
    """In one item of two native forwards, behind cached tokens, on three threads, joined with another session."""
    with loaded(path) as model:
        whole = mass(model.session(384), TOKENS, LONG)
        session = model.session(384)
        session.forward(TOKENS[:230], n_past=0, rows=NO_ROWS)
        assert mass(session, TOKENS[230:], LONG, 230)[..., :330].tobytes() == whole.tobytes()
        first, second = model.session(384), model.session(384)
        items = [
            ForwardItem(first, 0, (RowGroup(TOKENS[:150]),)),
            ForwardItem(second, 0, (RowGroup(TOKENS),), mass=dict.fromkeys((0, 1), LONG)),
        ]
        assert model.forward(items)[1].mass.tobytes() == whole.tobytes()  # type: ignore[union-attr]
        batched = Batcher(model).session(384)
        with batched.generating(330):
            assert mass(batched, TOKENS, LONG).tobytes() == whole.tobytes()
    with loaded(path, n_threads=3) as model:
        assert mass(model.session(384), TOKENS, LONG).tobytes() == whole.tobytes()


def test_asking_for_the_mass_changes_no_logit(path: Path) -> None:
    """The logits of a forward that also returns the mass, and of the step after it."""
    with loaded(path) as model:
        plain, asked = model.session(384), model.session(384)
        rows = [plain.forward(TOKENS, n_past=0).logits.copy(), plain.forward(TOKENS[:1], n_past=330).logits.copy()]
        assert (
            evaluated(asked, 0, RowGroup(TOKENS), mass=dict.fromkeys((1,), LONG)).logits.tobytes() == rows[0].tobytes()
        )
        found = asked.forward(TOKENS[:1], n_past=330)
        assert found.logits.tobytes() == rows[1].tobytes()
        assert found.mass is None


def test_layers_that_did_not_run_have_no_mass(path: Path) -> None:
    """Of a forward through the first layer."""
    with loaded(path) as model:
        group, both = RowGroup(TOKENS[:40], span=Span(leave=1)), dict.fromkeys((1, 0), WEIGHTS)
        found = evaluated(model.session(64), 0, group, rows=NO_ROWS, mass=both)
        whole = mass(model.session(64), TOKENS[:40], WEIGHTS)
    assert found.mass is not None
    assert not found.mass[0].any()
    assert found.mass[1].tobytes() == whole[0].tobytes()


def test_requests_of_the_mass_that_are_refused(path: Path) -> None:
    """Layers that are not there, too many rows or none, no numbers, trees; and a runtime that can't return it."""
    with loaded(path) as model:
        session = model.session(64)
        parents = np.array([-1, 0, 0], np.int32)
        for wanted, tree in (
            (((2,), WEIGHTS), None),
            (((-1,), WEIGHTS), None),
            (((0,), LONG), None),
            (((0,), WEIGHTS[:0]), None),
            (((0,), np.array([np.nan], np.float32)), None),
            (((0,), WEIGHTS[:1]), parents),
        ):
            with pytest.raises(RequestError):
                evaluated(session, 0, RowGroup(TOKENS[:3], sees=tree), mass=dict.fromkeys(*wanted))
        assert session.n_cached == 0
    with pytest.raises(CapabilityError, match="attention_mass"):
        model.capabilities.__class__().require("attention_mass", "other")


N_CTX = 384
IDS = np.random.default_rng(4).integers(0, 190, 300).astype(np.int32)
APART = np.sort(np.random.default_rng(5).choice(900, 300, replace=False)).astype(np.int32)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """That model, for three sessions."""
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=1, n_parallel=3)) as loaded_model:
        yield loaded_model


def read(model: Model, positions: NDArray[np.int32] | None, n: int = 300) -> Mass:
    """Return the last logits of a forward of the first tokens."""
    return evaluated(model.session(N_CTX), 0, RowGroup(IDS[:n], positions=positions)).logits.copy()


def test_positions_of_the_slots_are_the_default(model: Model) -> None:
    """Bit by bit; other positions change the logits, all of them shifted by one number hardly do."""
    plain = read(model, None)
    np.testing.assert_array_equal(read(model, np.arange(300, dtype=np.int32)), plain)
    np.testing.assert_allclose(read(model, np.arange(300, dtype=np.int32) + 40), plain, atol=2e-2)
    assert np.abs(read(model, APART) - plain).max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen35"])
def test_positions_are_the_reference_s(tmp_path: Path, name: str) -> None:
    """With windows, whose rows are those of the slots; with layers that have no positions."""
    file = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=("F32",), dealt=True))
    options = LoadOptions(n_ctx=64, n_threads=1)
    with Cpu().load(file, options) as ours, Reference().load(file, options) as reference:
        found, expected = (read(each, APART[:40], 40) for each in (ours, reference))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_a_text_goes_on_behind_its_farthest_position(model: Model) -> None:
    """In steps, drafts, trees and forks; in pieces, joined with another session; and after going back."""
    session, expected = model.session(N_CTX), model.session(N_CTX)
    behind = np.arange(1, 9, dtype=np.int32) + APART[299]
    evaluated(expected, 0, RowGroup(IDS, positions=APART))
    wanted = evaluated(expected, 300, RowGroup(IDS[:8], positions=behind), rows="all").logits.copy()
    batched = Batcher(model).session(N_CTX)
    evaluated(batched, 0, RowGroup(IDS, positions=APART))
    np.testing.assert_array_equal(batched.forward(IDS[:8], n_past=300, rows="all").logits, wanted)
    items = [
        ForwardItem(session, 0, (RowGroup(IDS, positions=APART),)),
        ForwardItem(model.session(N_CTX), 0, (RowGroup(IDS[:9]),)),
    ]
    model.forward(items)
    twin = session.fork()
    for i in range(8):
        np.testing.assert_array_equal(session.forward(IDS[i : i + 1], n_past=300 + i).logits[0], wanted[i])
    tree = twin.forward(IDS[[5, 0, 1]], n_past=300, parents=np.array([-1, -1, 1], np.int32), rows="all").logits
    np.testing.assert_array_equal(tree[1:], wanted[:2])
    twin.keep(np.array([1, 2], np.int32))
    np.testing.assert_array_equal(twin.forward(IDS[2:8], n_past=302, rows="all").logits, wanted[2:])
    evaluated(session, 200, RowGroup(IDS[200:300], positions=APART[200:]))
    np.testing.assert_array_equal(session.forward(IDS[:8], n_past=300, rows="all").logits, wanted)
    np.testing.assert_array_equal(session.forward(IDS, n_past=0).logits, read(model, None))


def test_positions_that_are_refused(model: Model) -> None:
    """Too few, too far or negative ones, trees; a session with such rows is not saved."""
    session = model.session(N_CTX)
    wrong_ones: list[NDArray[Any]] = [APART[:2], APART[:3] - 9999, APART[:3] + (1 << 24), APART[:3].astype(np.float32)]
    for wrong in wrong_ones:
        with pytest.raises(RequestError, match="positions"):
            evaluated(session, 0, RowGroup(IDS[:3], positions=wrong))
    with pytest.raises(RequestError, match="positions"):
        evaluated(session, 0, RowGroup(IDS[:3], sees=np.array([-1, 0, 0], np.int32), positions=APART[:3]))
    with pytest.raises(CapabilityError, match="positions"):
        Capabilities().require("positions", "other")
    evaluated(session, 0, RowGroup(IDS[:3], positions=APART[:3]))
    with pytest.raises(SessionError, match="positions of its own"):
        session.save()

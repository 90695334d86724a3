"""The mass of attention is the reference's, sums to what rows weigh, and does not depend on how the rows are cut."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, WINDOWED_EXAONE4, write_tiny

from edgedec.errors import CapabilityError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session, Span
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
    return tiny_llama(tmp_path_factory.mktemp("mass") / "m.gguf", n_embd=128, n_ctx_train=512)


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


def test_malformed_requests_are_refused(path: Path) -> None:
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

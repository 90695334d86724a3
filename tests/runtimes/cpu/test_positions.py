"""Rows with positions of their own: where they turn to is apart from the slots that they lie in and see."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import CapabilityError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup
from edgedec.model_card import Capabilities
from edgedec.sessions.batching import Batcher
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

N_CTX = 384
TOKENS = np.random.default_rng(4).integers(0, 190, 300).astype(np.int32)
APART = np.sort(np.random.default_rng(5).choice(900, 300, replace=False)).astype(np.int32)
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model with two layers."""
    path = tiny_llama(tmp_path_factory.mktemp("positions") / "m.gguf", n_embd=128, n_ctx_train=512)
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=1, n_parallel=3)) as loaded:
        yield loaded


def read(model: Model, positions: NDArray[np.int32] | None, n: int = 300) -> Floats:
    """Return the last logits of a forward of the first tokens."""
    return evaluated(model.session(N_CTX), 0, RowGroup(TOKENS[:n], positions=positions)).logits.copy()


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
    evaluated(expected, 0, RowGroup(TOKENS, positions=APART))
    wanted = evaluated(expected, 300, RowGroup(TOKENS[:8], positions=behind), rows="all").logits.copy()
    batched = Batcher(model).session(N_CTX)
    evaluated(batched, 0, RowGroup(TOKENS, positions=APART))
    np.testing.assert_array_equal(batched.forward(TOKENS[:8], n_past=300, rows="all").logits, wanted)
    items = [
        ForwardItem(session, 0, (RowGroup(TOKENS, positions=APART),)),
        ForwardItem(model.session(N_CTX), 0, (RowGroup(TOKENS[:9]),)),
    ]
    model.forward(items)
    twin = session.fork()
    for i in range(8):
        np.testing.assert_array_equal(session.forward(TOKENS[i : i + 1], n_past=300 + i).logits[0], wanted[i])
    tree = twin.forward(TOKENS[[5, 0, 1]], n_past=300, parents=np.array([-1, -1, 1], np.int32), rows="all").logits
    np.testing.assert_array_equal(tree[1:], wanted[:2])
    twin.keep(np.array([1, 2], np.int32))
    np.testing.assert_array_equal(twin.forward(TOKENS[2:8], n_past=302, rows="all").logits, wanted[2:])
    evaluated(session, 200, RowGroup(TOKENS[200:300], positions=APART[200:]))
    np.testing.assert_array_equal(session.forward(TOKENS[:8], n_past=300, rows="all").logits, wanted)
    np.testing.assert_array_equal(session.forward(TOKENS, n_past=0).logits, read(model, None))


def test_what_is_refused(model: Model) -> None:
    """Too few, too far or negative ones, trees; a session with such rows is not saved."""
    session = model.session(N_CTX)
    wrong_ones: list[NDArray[Any]] = [APART[:2], APART[:3] - 9999, APART[:3] + (1 << 24), APART[:3].astype(np.float32)]
    for wrong in wrong_ones:
        with pytest.raises(RequestError, match="positions"):
            evaluated(session, 0, RowGroup(TOKENS[:3], positions=wrong))
    with pytest.raises(RequestError, match="positions"):
        evaluated(session, 0, RowGroup(TOKENS[:3], sees=np.array([-1, 0, 0], np.int32), positions=APART[:3]))
    with pytest.raises(CapabilityError, match="positions"):
        Capabilities().require("positions", "other")
    evaluated(session, 0, RowGroup(TOKENS[:3], positions=APART[:3]))
    with pytest.raises(SessionError, match="positions of its own"):
        session.save()

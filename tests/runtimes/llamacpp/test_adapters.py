"""Adapters on llama.cpp: the logits of our own kernels, and sessions with different adapters in one context."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.errors import ModelFormatError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytestmark = pytest.mark.slow
IDS = np.arange(10, 40, dtype=np.int32)
SETS = ((0.0, 0.0), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama and two adapters of it."""
    found = tmp_path_factory.mktemp("adapters")
    tiny_llama(found / "base.gguf")
    for seed, name in enumerate(("a", "b"), 1):
        tiny_adapter(found / f"{name}.gguf", found / "base.gguf", seed=seed, alpha=2.0)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    """The model with both adapters, for four sessions."""
    adapters = ((folder / "a.gguf", 1.0), (folder / "b.gguf", 1.0))
    options = LoadOptions(n_ctx=64, n_parallel=4, n_threads=1, adapters=adapters)
    with LlamaCpp().load(folder / "base.gguf", options) as found:
        yield found


def opened(model: Model, scales: tuple[float, ...]) -> Session:
    """Return a session with these scales."""
    session = model.session(64)
    session.scales = scales
    return session


def last(session: Session, n: int = 30) -> NDArray[np.float32]:
    """Return the logits behind the first `n` tokens, read at once."""
    found: NDArray[np.float32] = session.forward(IDS[:n], n_past=0).logits[0].copy()
    return found


def test_our_kernels_have_the_logits_of_llama_cpp(folder: Path, model: Model) -> None:
    """Every set of adapters, on the same files: the two differ far less than one set does from another."""
    adapters = ((folder / "a.gguf", 1.0), (folder / "b.gguf", 1.0))
    theirs = []
    for scales in SETS:
        session = opened(model, scales)
        theirs.append(last(session))
        session.close()
    with Cpu().load(folder / "base.gguf", LoadOptions(n_ctx=64, adapters=adapters)) as own:
        for scales, expected in zip(SETS, theirs, strict=True):
            np.testing.assert_allclose(last(opened(own, scales)), expected, rtol=0, atol=0.05)
    assert min(np.abs(a - b).max() for i, a in enumerate(theirs) for b in theirs[:i]) > 0.5


def test_sessions_of_one_context(model: Model) -> None:
    """Four sets in one forward: each has the logits of its set alone; forks have those of their session."""
    expected = []
    for scales in SETS:
        session = opened(model, scales)
        expected.append(last(session))
        session.close()
    sessions = [opened(model, scales) for scales in SETS]
    model.forward([ForwardItem(session, 0, (RowGroup(IDS[:29]),)) for session in sessions])
    for forward, alone in zip(
        model.forward([ForwardItem(session, 29, (RowGroup(IDS[29:]),)) for session in sessions]), expected, strict=True
    ):
        np.testing.assert_allclose(forward.logits[0], alone, rtol=0, atol=0.02)
    sessions[3].forward(IDS[29:], n_past=29)
    fork = sessions[3].fork()
    last(sessions[0])
    assert fork.scales == SETS[3]
    np.testing.assert_allclose(fork.forward(IDS[29:], n_past=29).logits[0], expected[3], rtol=0, atol=0.02)
    for session in (*sessions, fork):
        session.close()


def test_a_saved_state_belongs_to_its_adapters(model: Model) -> None:
    """Other scales refuse it; without adapters it is as it always was."""
    for scales in SETS:
        session = opened(model, scales)
        session.forward(IDS, n_past=0)
        saved = session.save()
        assert saved.startswith(b"edgedec: adapters ") == any(scales)
        session.load(saved, 30)
        assert session.n_cached == 30
        session.scales = other = SETS[SETS.index(scales) - 1]
        assert session.n_cached == 0
        with pytest.raises(ModelFormatError):
            session.load(saved, 30)
        np.testing.assert_array_equal(last(session), last(session))
        assert session.scales == other
        session.close()


def test_texts_with_and_without_drafts(folder: Path) -> None:
    """One after another on one session: the same set has the same text, with drafts as without."""
    wish: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_end": True}
    small: dict[str, Any] = {"n_ctx": 64, "n_threads": 1}
    found = []
    for draft in ("off", "suffix"):
        lora: list[Any] = [folder / "a.gguf", (folder / "b.gguf", 0.5)]
        with edgedec.load(folder / "base.gguf", runtime="llamacpp", draft=draft, lora=lora, **small) as engine:
            texts = [engine.generate("one, two, one", lora=scales, **wish).token_ids for scales in (*SETS, *SETS)]
            assert engine.generate("one, two, one", **wish).token_ids == texts[3]
        assert texts[:4] == texts[4:]
        found.append(texts)
    assert found[0] == found[1]
    assert len(set(found[0])) == len(SETS)


def test_what_llama_cpp_does_not_take(folder: Path) -> None:
    """Folders of PEFT, and adapters that our checks refuse."""
    for path, message in ((folder, "takes adapters that are GGUFs"), (folder / "base.gguf", "expected a LoRA adapter")):
        with pytest.raises((RequestError, ModelFormatError), match=message):
            LlamaCpp().load(folder / "base.gguf", LoadOptions(n_ctx=64, adapters=((path, 1.0),)))

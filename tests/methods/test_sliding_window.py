"""A context that slides: every row sees the window that its place in the text gives it, whatever was cached before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.stopped import Stopped
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import CapabilityError, ContextFullError, PromptTooLongError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Model, RowGroup, Span
from edgedec_methods.sliding_window import N_SINKS, SlidingSession
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

N_CTX = 64
STRIDE = (N_CTX - N_SINKS) // 2
Ids = NDArray[np.int32]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama's file."""
    return tiny_llama(tmp_path_factory.mktemp("sliding") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """It on the cpu runtime."""
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as loaded:
        yield loaded


def seen_by(text: list[int]) -> list[int]:
    """Return the tokens that the last row of a text sees, counted out one stride after the other."""
    begin = 0
    while len(text) - begin + (N_SINKS if begin else 0) > N_CTX:
        begin = begin + STRIDE if begin else N_SINKS + STRIDE
    return text if begin == 0 else [*text[:N_SINKS], *text[begin:]]


def expected(model: Model, text: list[int]) -> NDArray[np.float32]:
    """Return the row of logits after a text, from a session of its own that holds only the window."""
    session = model.session(N_CTX)
    try:
        row: NDArray[np.float32] = session.forward(np.array(seen_by(text), np.int32), n_past=0).logits[0].copy()
        return row
    finally:
        session.close()


def ids(rng: np.random.Generator, n: int) -> Ids:
    """Return some tokens."""
    return rng.integers(1, 250, n).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_row_has_the_bits_of_its_own_window(model: Model, seed: int) -> None:
    """Prompts, steps, drafts, trees and rollbacks in any order."""
    rng = np.random.default_rng(seed)
    session = SlidingSession(model.session(N_CTX))
    text: list[int] = []
    n_moves = 0
    for _ in range(60):
        n_past = len(text) if rng.random() < 0.7 else int(rng.integers(0, len(text) + 1))
        kind = rng.choice(["step", "prompt", "chain", "tree"])
        n = {"step": 1, "prompt": int(rng.integers(1, 200)), "chain": int(rng.integers(2, 90)), "tree": 4}[str(kind)]
        tokens = ids(rng, n)
        before = text[:n_past]
        if kind == "tree":
            parents = np.array([-1, 0, 0, 2], np.int32)
            if session.room(n_past + 1) < 3:  # the window moves within it
                continue
            forward = session.forward(tokens, n_past=n_past, parents=parents, rows="all")
            paths = [[0], [0, 1], [0, 2], [0, 2, 3]]
            for row, path in enumerate(paths):
                np.testing.assert_array_equal(
                    forward.logits[row], expected(model, before + [int(tokens[i]) for i in path])
                )
            session.keep(np.array([0, 2, 3], np.int32))
            text = before + [int(tokens[i]) for i in (0, 2, 3)]
        elif kind == "chain":
            forward = session.forward(tokens, n_past=n_past, rows="all")
            text = before + tokens.tolist()
            for row in sorted({0, n // 2, n - 1}):
                np.testing.assert_array_equal(forward.logits[row], expected(model, text[: n_past + row + 1]))
        else:
            forward = session.forward(tokens, n_past=n_past)
            text = before + tokens.tolist()
            np.testing.assert_array_equal(forward.logits[0], expected(model, text))
        n_moves += len(text) > N_CTX
        assert session.n_cached == len(text)
    assert n_moves > 10
    session.close()


def test_a_tree_in_which_the_window_moves_is_refused(model: Model) -> None:
    """Nothing is evaluated, and a smaller one is taken."""
    rng = np.random.default_rng(1)
    session = SlidingSession(model.session(N_CTX))
    text = ids(rng, N_CTX - 2)
    session.forward(text, n_past=0)
    assert session.room(N_CTX - 1) == 1
    tree, parents = ids(rng, 4), np.array([-1, 0, 0, 2], np.int32)
    with pytest.raises(ContextFullError, match="room"):
        session.forward(tree, n_past=len(text), parents=parents, rows="all")
    assert session.n_cached == len(text)
    row = session.forward(tree[:2], n_past=len(text), rows="all").logits[1]
    np.testing.assert_array_equal(row, expected(model, [*text.tolist(), *tree[:2].tolist()]))


@pytest.mark.parametrize("n_times", [1, 2, 3, 4])
@pytest.mark.parametrize("n_known", [3, 40, 64, 90])
def test_what_is_stopped_in_the_middle_is_made_up_for(model: Model, n_known: int, n_times: int) -> None:
    """After Ctrl-C in a prompt or while the window moves the session says what it has, and goes on to the same bits."""
    inner: Any = Stopped(model.session(N_CTX))
    session, text = SlidingSession(inner), ids(np.random.default_rng(2), 3 * N_CTX)
    session.forward(text[:n_known], n_past=0)
    inner.n_times = n_times
    for _ in range(n_times):
        n_past = min(session.n_cached, n_known)
        with pytest.raises(KeyboardInterrupt):
            session.forward(text[n_past:], n_past=n_past)
    n_past = min(session.n_cached, len(text) - 1)
    row = session.forward(text[n_past:], n_past=n_past).logits[0]
    np.testing.assert_array_equal(row, expected(model, text.tolist()))


def test_what_it_can_not_do_is_refused(model: Model, path: Path) -> None:
    """Forks, saves, hidden states, positions, a past that is not there, small contexts, runtimes that need chunks."""
    session = SlidingSession(model.session(N_CTX))
    for refused in (session.fork, session.save, lambda: session.load(b"", 3)):
        with pytest.raises(CapabilityError):
            refused()
    for groups in ((), (RowGroup(vectors=np.zeros((1, 4), np.float32), span=Span(enter=1)),)):
        with pytest.raises(CapabilityError):
            evaluated(session, 0, *groups)
    with pytest.raises(CapabilityError, match="one behind the other"):
        evaluated(session, 0, RowGroup(np.ones(1, np.int32), positions=np.ones(1, np.int32)))
    with pytest.raises(SessionError):
        session.forward(np.ones(1, np.int32), n_past=1)
    with pytest.raises(RequestError, match="at least 64"):
        SlidingSession(model.session(63))
    with Reference().load(path, LoadOptions(n_ctx=N_CTX)) as chunked:
        if chunked.capabilities.prefill_chunk != 1:
            with pytest.raises(CapabilityError, match="slide"):
                SlidingSession(chunked.session(N_CTX))


PROMPT = list(range(5, 95)) + list(range(5, 60))
WAYS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3})


def texts(path: Path, **options: Any) -> list[tuple[int, ...]]:
    """Return what is generated greedily and with a seed, after a prompt of more than twice the context."""
    with edgedec.load(
        path, runtime="cpu", n_ctx=N_CTX, lossy=Lossy(slide=True), n_threads=1, offline=True, **options
    ) as engine:
        found = [engine.generate(PROMPT, max_tokens=150, ignore_end=True, **way) for way in WAYS]
        assert engine.n_ctx == N_CTX
        assert not any("longer than" in note for note in found[0].stats.notes)  # that is the window's, not the text's
        assert all(len(generation.token_ids) == 150 for generation in found)
        assert options["draft"] in ("off", "auto") or any(generation.stats.n_drafts for generation in found)
        again = engine.generate([*PROMPT, *found[0].token_ids[:70]], max_tokens=80, ignore_end=True, temperature=0)
        assert again.token_ids == found[0].token_ids[70:]
        engine.forget()
        short = engine.generate(PROMPT[:20], max_tokens=70, ignore_end=True, temperature=0)
        return [*(generation.token_ids for generation in found), short.token_ids]


@pytest.mark.slow
def test_a_text_of_many_windows_is_the_same_however_it_is_drafted(path: Path) -> None:
    """Greedy and with a seed; what is cached of the conversation before changes nothing either."""
    plain = texts(path, draft="off")
    for draft, n_max in (("suffix", 3), ("suffix", 15), ("recycling", 7), ("suffix+recycling", 12), ("auto", 15)):
        assert texts(path, draft=draft, n_draft_max=n_max) == plain
    assert texts(path, draft="suffix", n_draft_max=5, n_parallel=2) == plain


def test_without_it_the_text_ends_with_the_context(path: Path) -> None:
    """And a long prompt is refused, with a word of what would help."""
    with edgedec.load(path, runtime="cpu", n_ctx=N_CTX, n_threads=1, draft="off", offline=True) as engine:
        assert len(engine.generate(PROMPT[:20], max_tokens=150, ignore_end=True).token_ids) == N_CTX - 20
        with pytest.raises(PromptTooLongError, match=r"\(slide\)"):
            engine.generate(PROMPT)

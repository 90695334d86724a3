"""Slots that are dropped or chosen again: the text is that of a slow form, which rebuilds a KV cache from its bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import CapabilityError, ContextFullError, OptionError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup
from edgedec_methods.dropped_slots import LEAST, POOL, RECENT, SINKS, WINDOW, SparseSession
from edgedec_methods.recycled_attention import RecycledAttention
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.session import CpuSession

pytestmark = pytest.mark.slow

N_CTX, N_HEAD, N_HEAD_KV, AHEAD, EVERY = 1024, 4, 2, 8, 32
RNG = np.random.default_rng(5)
PROMPT = [1, *RNG.integers(5, 260, 399).tolist()]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 90, "ignore_end": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 90, "ignore_end": True}
NO_ROWS = np.empty(0, np.int32)
Halves = NDArray[np.float16]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tiny model."""
    return tiny_llama(tmp_path_factory.mktemp("drop") / "tiny.gguf", seed=1, n_layer=3, n_ctx_train=N_CTX)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """It on the cpu runtime."""
    with Cpu().load(path, LoadOptions(n_threads=1, n_ctx=N_CTX)) as loaded:
        yield loaded


def slots_of(session: CpuSession, n_layer: int) -> Halves:
    """Return what a session holds, as f16[n, n_layer, n_head_kv, keys and values, head_dim]."""
    _, halves = session._arrays(session.n_cached)
    return halves.view(np.float16).reshape(session.n_cached, n_layer, N_HEAD_KV, 2, -1)


def refill(session: CpuSession, slots: Halves) -> None:
    """Let a session hold these slots and nothing else."""
    n, n_layer = slots.shape[:2]
    head = session.mark.ljust(64, b"\0") + struct.pack("<I", n) + b"\1" * (n * n_layer)
    session.load(head + slots.tobytes(), n)


def slow_text(model: Model, prompt: list[int], share: float, every: int, n: int) -> list[int]:
    """Return a greedy text, by a loop over single rows that holds all keys and values as an array."""
    n_layer, ids = model.card.n_layer, list(prompt)
    session = model.session(N_CTX)
    assert isinstance(session, CpuSession), "it is the cpu runtime"
    logits = session.forward(np.array(ids, np.int32), n_past=0).logits[0].copy()
    place, n_kept, whole = 0, 0, slots_of(session, n_layer)
    first = len(prompt) + AHEAD
    for _ in range(n):
        ids.append(int(logits.argmax()))
        at = len(ids) - 1
        if at >= first and (at == first or (every and (at - first) % every == 0)):
            if place:
                whole = np.concatenate([whole, slots_of(session, n_layer)[n_kept:]])
            else:
                whole = slots_of(session, n_layer)
            begin = at - (RECENT if place else WINDOW)
            refill(session, whole[:begin])
            rows, mass_of = RowGroup(np.array(ids[begin:at], np.int32)), np.ones(at - begin, np.float32)
            item = ForwardItem(session, begin, (rows,), NO_ROWS, mass=dict.fromkeys(range(n_layer), mass_of))
            mass = session.evaluate(item).mass
            assert mass is not None, "it was asked for"
            whole, place, n_kept = slots_of(session, n_layer), at, max(-int(-share * at // 1), LEAST)
            part = np.empty((n_kept, *whole.shape[1:]), np.float16)
            for layer in range(n_layer):
                for head in range(N_HEAD_KV):
                    worth = sum(mass[layer, q] for q in range(N_HEAD) if q // (N_HEAD // N_HEAD_KV) == head)
                    best = [max(worth[max(i - POOL // 2, 0) : i + POOL // 2 + 1]) for i in range(at)]
                    stays = [i < SINKS or i >= at - WINDOW for i in range(at)]
                    chosen = sorted(range(at), key=lambda i: (not stays[i], -best[i], i))[:n_kept]
                    for to, slot in enumerate(sorted(chosen)):
                        part[to, layer, head] = whole[slot, layer, head]
            refill(session, part)
        n_past = n_kept + at - place if place else at
        group = RowGroup(np.array(ids[-1:], np.int32), positions=np.array([at], np.int32) if place else None)
        logits = session.evaluate(ForwardItem(session, n_past, (group,))).logits[0].copy()
    session.close()
    return ids[len(prompt) :]


def loaded(path: Path, method: str, share: float = 0.1, **options: Any) -> edgedec.Engine:
    """Load the model with a method."""
    of_method = {"share": share} | ({"every": EVERY} if method == "recycled_attention" else {})
    given: dict[str, Any] = {"runtime": "cpu", "n_ctx": N_CTX, "n_threads": 1, "offline": True} | options
    return edgedec.load(path, lossy=Lossy(methods={method: of_method}), **given)


@pytest.mark.parametrize(("method", "every"), [("dropped_slots", 0), ("recycled_attention", EVERY)])
def test_the_text_is_that_of_the_slow_form(path: Path, model: Model, method: str, every: int) -> None:
    """Cold, again, as the next turn, with drafts, and where a stop string takes the text back over a place."""
    second = [*PROMPT, *RNG.integers(5, 260, 60).tolist()]
    repeated = [*PROMPT[:60] * 7, *PROMPT[:20]]
    texts = [slow_text(model, prompt, 0.1, every, 90) for prompt in (PROMPT, second, repeated)]
    with loaded(path, method, draft="off") as engine:
        found = engine.generate(PROMPT, **GREEDY)
        assert found.token_ids == tuple(texts[0])
        assert "lossy: each head saw 256 of the first " in found.stats.notes[0]
        again = engine.generate(PROMPT, **GREEDY)
        assert (again.token_ids, again.stats.n_reused_tokens) == (found.token_ids, len(PROMPT) - 1)
        assert engine.generate(second, **GREEDY).token_ids == tuple(texts[1])
        drawn = engine.generate(repeated, **DRAWN).token_ids
        turn = [*PROMPT, *texts[0], *second[:9]]
        expected = engine.generate(turn, **GREEDY).token_ids
        engine.generate(PROMPT, **GREEDY)
        assert engine.generate(turn, **GREEDY).token_ids == expected
    with loaded(path, method, draft="suffix") as engine:
        found = engine.generate(repeated, **GREEDY)
        assert found.token_ids == tuple(texts[2])
        drafted = engine.generate(repeated, **DRAWN)
        assert drafted.token_ids == drawn
        assert found.stats.n_draft_tokens + drafted.stats.n_draft_tokens > 0


def test_going_back_over_places_keeps_the_bits(model: Model) -> None:
    """Rows in any pieces, behind any cut of the text, have the logits of single rows in their order."""
    ids = np.array([*PROMPT, *RNG.integers(5, 260, 120).tolist()], np.int32)
    session = SparseSession(model.session(N_CTX), 0.1, AHEAD, EVERY)
    with session.generating(len(PROMPT)):
        session.forward(ids[: len(PROMPT)], n_past=0)
        rows = [session.forward(ids[i : i + 1], n_past=i).logits[0].copy() for i in range(len(PROMPT), len(ids))]
        for n_past, n in ((515, 5), (402, 60), (450, 70), (409, 111), (405, 4), (408, 112), (440, 33), (441, 79)):
            found = session.forward(ids[n_past : n_past + n], n_past=n_past, rows="all").logits
            np.testing.assert_array_equal(found, rows[n_past - len(PROMPT) :][:n])
        session.forward(ids[409:410], n_past=409)
        with pytest.raises(SessionError):
            session.forward(ids[440:441], n_past=440)
        session.forward(ids[410:], n_past=410)
        parents = np.array([-1, 0, 0], np.int32)
        tree = session.forward(ids[[468, 400, 469]], n_past=468, parents=parents, rows="all").logits.copy()
        session.keep(np.array([0, 2], np.int32))
        np.testing.assert_array_equal(tree[[0, 2]], rows[68:70])
        assert (session.n_cached, session.room(471)) == (470, 1)
        for n_past in (470, session.n_ctx - 2):  # a place, or the end of the context, is within these rows
            with pytest.raises(ContextFullError):
                session.forward(ids[470:473], n_past=n_past, parents=parents)
        assert session.n_ctx == 698  # so a text's slots, a tenth of them, and 256 are within 1,024
        np.testing.assert_array_equal(session.forward(ids[470:520], n_past=470, rows="all").logits, rows[70:])
    assert session.n_cached == len(PROMPT) + AHEAD
    exact = model.session(N_CTX)
    expected = exact.forward(ids[:450], n_past=0, rows="last").logits.copy()
    np.testing.assert_array_equal(session.forward(ids[408:450], n_past=408).logits, expected)
    session.cancel()
    session.close()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "gear"])
def test_gathered_slots_are_those_of_the_text(tmp_path: Path, kv_type: str) -> None:
    """All slots in order, in two pieces, are a fork; a text of other slots is one of these tokens' keys and values."""
    path = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["llama"])
    ids = RNG.integers(5, 260, 200).astype(np.int32)
    with Cpu().load(path, LoadOptions(n_ctx=256, n_threads=1, kv_type=kv_type)) as loaded_model:
        session, other = loaded_model.session(256), loaded_model.session(256)
        assert isinstance(session, CpuSession), "it is the cpu runtime"
        assert isinstance(other, CpuSession), "it is the cpu runtime"
        session.forward(ids[:190], n_past=0)
        shape = loaded_model.card.n_layer, session.gathered_heads
        places = np.arange(190, dtype=np.int32)
        for begin, end in ((0, 70), (70, 190)):
            other.gather(session, np.broadcast_to(places[begin:end], (*shape, end - begin)), begin)
        expected = session.fork().forward(ids[190:], n_past=190, rows="all").logits.copy()
        np.testing.assert_array_equal(other.forward(ids[190:], n_past=190, rows="all").logits, expected)
        for slots, error in ((places[None, None], RequestError), (np.full((*shape, 1), 190, np.int32), SessionError)):
            with pytest.raises(error):
                other.gather(session, slots, 0)
        with pytest.raises(SessionError):
            other.gather(session, np.zeros((*shape, 1), np.int32), 201)


def test_what_can_t_be_read_in_part(path: Path, tmp_path: Path) -> None:
    """Options out of range, layers that see windows or lie without their bias, and requests that share forwards."""
    for share, every in ((0.0, 64), (1.5, 64), (None, 64), (0.5, 7)):
        with pytest.raises(OptionError):
            RecycledAttention(share, every)
    for name, kv_type in (("gemma3", "f16"), ("qwen2", "q8_0"), ("mamba2", "f16")):
        small = write_tiny(tmp_path / f"{name}.gguf", ARCHITECTURES[name])
        with pytest.raises(CapabilityError), loaded(small, "dropped_slots", n_ctx=64, kv_type=kv_type):
            raise AssertionError("it was loaded")
    with pytest.raises(CapabilityError), loaded(path, "dropped_slots", n_parallel=2):
        raise AssertionError("it was loaded")
    with loaded(path, "dropped_slots", share=1.0, draft="off") as engine:
        found = engine.generate(PROMPT[:270], **GREEDY)
    with edgedec.load(path, runtime="cpu", n_ctx=N_CTX, n_threads=1, draft="off", offline=True) as plain:
        assert (plain.generate(PROMPT[:270], **GREEDY).token_ids, found.stats.notes) == (found.token_ids, [])

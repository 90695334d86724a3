"""A draft head on the cpu runtime: its scores are those of plain formulas, what it holds, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.heads.followed import (
    NORMED,
    TRAINED_FLOATS,
    TRAINED_INTEGERS,
    chain,
    drafted_together,
    head_of,
    read,
    scores,
    trained,
)
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_heads import write_head
from support.models.random_blocks import random_blocks
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.cost_curve import SharedForward
from edgedec.errors import RequestError, SessionError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.head_state import ChainRules, DraftCall
from edgedec.load_options import LoadOptions
from edgedec.model import RowGroup, Session, Span
from edgedec_export.block_types import quantize_q4_0
from edgedec_methods.sliding_window import SlidingSession
from edgedec_runtimes.cpu.draft_head.memory import require_runnable
from edgedec_runtimes.cpu.draft_head.weights import CpuDraftHead, borrowed_rows, stored
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.listing import list_tiles, remove_tiles_of
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit
from edgedec_runtimes.weights.levels import dequantize

pytestmark = pytest.mark.slow

N_DRAFT = 4


def oracle(folder: Path, taps: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """Return the logits of the plain head after TEXT[: n + 1], whose matrices are rounded as the runtime rounds."""
    gguf = read_gguf(folder / "m.gguf")
    head = fit(load_head(folder / "head"), gguf).head
    tensors = {n: stored(n, tensor) if len(tensor.shape) == 2 else tensor for n, tensor in head.tensors.items()}
    rows = borrowed_rows(gguf, np.arange(N_VOCAB, dtype=np.int32), "token_embd.weight").floats()
    output = (
        tensors["output"] if "output" in tensors else stored("output", borrowed_rows(gguf, head.d2t), borrowed=True)
    )
    embedding = tensors["embedding"].floats() if "embedding" in tensors else rows
    plain = ReferenceHead(Head(head.card, tensors, head.d2t), embedding.__getitem__, output.floats())
    plain.absorb(taps)
    return plain.draft(TEXT[: n + 1].tolist(), N_DRAFT)[1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_0"])
def test_rows_are_rounded_to_q4_0(kind: str) -> None:
    """Rows of floats and larger blocks are rounded hardly worse than by the exporter; the file's own blocks stay."""
    data = np.frombuffer(random_blocks(kind, 21, 512, np.random.default_rng(5)), np.uint8)
    source = HeadTensor((21, 512), GGMLType[kind], data)
    found, exact = stored("q", source, borrowed=True), source.floats()
    best = dequantize(GGMLType.Q4_0, quantize_q4_0(exact).reshape(21, -1)).reshape(21, 512)
    assert found.type is GGMLType.Q4_0
    assert np.square(found.floats() - exact).sum() <= 1.001 * np.square(best - exact).sum()
    assert stored("q", source).type is (GGMLType.Q4_0 if kind in ("F32", "F16", "BF16") else source.type)
    assert stored("fc", source, borrowed=True).type is GGMLType.Q8_0


KINDS = {
    "plain": (FLOATS, TRAINED_FLOATS),
    "normed residual": (FLOATS, replace(TRAINED_FLOATS, norm_before_residual=True, speculators=True)),
    "norm over all taps": (FLOATS, replace(TRAINED_FLOATS, fc_norm="joined", speculators=True)),
    "norm over each tap": (FLOATS, replace(TRAINED_FLOATS, fc_norm="each", speculators=True)),
    "normed feedback": (FLOATS, replace(TRAINED_FLOATS, feeds_back_normed=True, speculators=True)),
    "own matrices": (FLOATS, replace(TRAINED_FLOATS, own_embedding=True, own_output=True)),
    "integers": (INTEGERS, TRAINED_INTEGERS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_formulas(kind: str, tmp_path: Path) -> None:
    """Of a chain, within 2 % of the numpy head's largest with floats but for q, k and v, within 3 % with 8 bits."""
    (tiny, head), n = KINDS[kind], 30
    with trained(tmp_path, tiny, head) as model:
        session = model.session(200)
        hidden = session.forward(TEXT[:n], n_past=0, taps=tuple(tap - 1 for tap in head.taps)).hidden
        taps = np.concatenate([hidden[tap - 1] for tap in head.taps], axis=1)
        rows, expected = scores(session, n, N_DRAFT), oracle(tmp_path, taps, n)
    assert np.abs(rows - expected).max() < (0.03 if tiny is INTEGERS else 0.02) * np.abs(expected).max()


def test_borrowed_rows_are_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start reads the stored rows: it reads no row of the target's output matrix, and drafts the same bits.

    Another target's rows are others, a damaged file is made again, and the rows go with the model's tiles.
    """
    write_head(tmp_path / "head", TRAINED_INTEGERS)
    cache, path = tmp_path / "cache", write_tiny(tmp_path / "m.gguf", INTEGERS)
    n_read = 0

    def counted(*given: Any) -> HeadTensor:
        nonlocal n_read
        n_read += 1
        return borrowed_rows(*given)

    monkeypatch.setattr("edgedec_runtimes.cpu.runtime.borrowed_rows", counted)

    def start(model_path: Path = path) -> bytes:
        options = LoadOptions(n_ctx=256, draft_head=tmp_path / "head", cache_dir=cache)
        with Cpu().load(model_path, options) as model:
            session = model.session(200)
            read(session, 0, 30)
            return scores(session, 30).tobytes()

    first = start()
    assert first == start()
    assert n_read == 1
    rows = [entry for entry in list_tiles(cache) if " head " in entry.layout]
    assert [entry.models for entry in rows] == [(path,)]
    rows[0].path.write_bytes(rows[0].path.read_bytes()[:-1])
    assert first == start()
    assert n_read == 2
    assert first != start(write_tiny(tmp_path / "other.gguf", replace(INTEGERS, seed=7)))
    assert n_read == 3
    remove_tiles_of(cache, path)
    assert [entry.models[0].name for entry in list_tiles(cache) if " head " in entry.layout] == ["other.gguf"]


def test_a_chain_is_the_best_tokens_until_its_path_is_unlikely(tmp_path: Path) -> None:
    """The chain has the head's probabilities and second bests, and ends with the node below least_path."""
    with trained(tmp_path) as model:
        session = model.session(200)
        read(session, 0, 20)
        best = chain(session, 20, ChainRules(N_DRAFT))
        rows = scores(session, 20, N_DRAFT).astype(np.float64)
        ids = head_of(session).token_ids
        short = chain(session, 20, ChainRules(N_DRAFT, least_path=best.p[0] * best.p[1] * 1.01))
        shorter = chain(session, 20, ChainRules(N_DRAFT, best.p[0] / 3, (0.0,), (1.0, 0.25)))
    order = [np.argsort(-row, kind="stable") for row in rows]
    p = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows]
    assert best.tokens == tuple(int(ids[first]) for first, *_ in order)
    assert best.second_tokens == tuple(int(ids[second]) for _, second, *_ in order)
    assert np.allclose(best.p, [row.max() for row in p], rtol=1e-5)
    assert np.allclose(best.second_p, [np.sort(row)[-2] for row in p], rtol=1e-5)
    assert short.tokens == best.tokens[:2]
    assert shorter.tokens == best.tokens[:1]


def test_many_texts_are_drafted_in_several_forwards(tmp_path: Path) -> None:
    """Texts with more rows together than one forward takes are drafted all the same."""
    with trained(tmp_path) as model:
        sessions = [(model.session(100), 30) for _ in range(10)]
        for session, n in sessions:
            read(session, 0, n)
        rows = scores(*sessions[0])
        expected = chain(*sessions[0], ChainRules(N_DRAFT))
        assert drafted_together(sessions, ChainRules(N_DRAFT)) == [expected] * 10
        assert all(np.array_equal(scores(*one), rows) for one in sessions)


def call_of(session: Session) -> DraftCall:
    """Return the call of a session's head for a chain behind the first 20 tokens."""
    calls: list[DraftCall] = []

    def joined(call: DraftCall) -> SharedForward:
        calls.append(call)
        return SharedForward()

    head_of(session).seen_by(joined=joined).chain(20, int(TEXT[20]), ChainRules(3))
    return calls[0]


def test_a_call_with_a_session_that_is_closed_or_named_twice_is_refused(tmp_path: Path) -> None:
    """Nothing breaks: the session drafts afterwards what it drafted before."""
    with trained(tmp_path) as model:
        session, closed = model.session(100), model.session(100)
        read(session, 0, 20)
        expected = chain(session, 20, ChainRules(3))
        others = [call_of(session), call_of(closed)]
        closed.close()
        for other in others:
            with pytest.raises(SessionError):
                call_of(session).answer([other])
        assert chain(session, 20, ChainRules(3)) == expected


def test_going_back_into_the_text_needs_one_new_token(tmp_path: Path) -> None:
    """After a step back nothing is drafted before a token was evaluated there; then the head goes on."""
    with trained(tmp_path) as model:
        session = model.session(200)
        read(session, 0, 50)
        assert head_of(session).begin(30, int(TEXT[30])) is None
        read(session, 0, 50)
        read(session, 30, 31)
        assert len(scores(session, 31, N_DRAFT)) == N_DRAFT
        states = session.forward(TEXT[31:32], n_past=31, taps=(2,)).hidden[2].copy()
        evaluated(session, 31, RowGroup(vectors=states, span=Span(enter=3)))  # rows without tokens have no taps
        assert head_of(session).begin(32, int(TEXT[32])) is None
        read(session, 32, 34)
        assert len(scores(session, 34, N_DRAFT)) == N_DRAFT


def test_a_context_that_slides_is_followed(tmp_path: Path) -> None:
    """The head reads the window's tokens again when the window moves, and drafts on."""
    with trained(tmp_path) as model:
        session = SlidingSession(model.session(64))
        read(session, 0, 60)
        assert len(scores(session, 60, N_DRAFT)) == N_DRAFT
        read(session, 60, 80)
        moved = scores(session, 80, 1)
        window = np.concatenate([TEXT[:4], TEXT[34:80]])
        inner = model.session(64)
        inner.forward(window, n_past=0)
        row = head_of(inner).begin(len(window), int(TEXT[80]))
        assert row is not None
        # the pair of the last token before the gap was made with the token that followed it in the text
        assert np.abs(moved[0] - row).max() < 0.05 * np.abs(row).max()


@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 4, 6)])
def test_layers_that_share_keys_leave_out_no_state(tmp_path: Path, taps: tuple[int, ...]) -> None:
    """The head sees the same states of every row, whether it taps layers in front of those that share or behind."""
    with trained(tmp_path, ARCHITECTURES["gemma4"], replace(TRAINED_INTEGERS, taps=taps)) as model:
        steps, whole, asked = (model.session(200) for _ in range(3))
        for n in range(70):
            read(steps, n, n + 1)
        last = whole.forward(TEXT[:70], n_past=0).logits.copy()
        every = asked.forward(TEXT[:70], n_past=0, rows="all").logits[-1:].copy()
        np.testing.assert_array_equal(last, every)
        rows = [scores(session, 70, 1) for session in (steps, whole, asked)]
        np.testing.assert_array_equal(rows[0], rows[1])
        np.testing.assert_array_equal(rows[0], rows[2])


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    """The plan has the head's weights, keys and values, and taps, and the loaded model says the same."""
    names = {"draft head", "KV cache of the draft head", "taps of the draft head"}
    options = LoadOptions(n_ctx=256, draft_head=tmp_path / "head")
    with trained(tmp_path) as model:
        planned = {term.name: term.n_bytes for term in Cpu().plan(tmp_path / "m.gguf", options) if term.name in names}
        held = {term.name: term.n_bytes for term in model.memory(256, options.max_rows) if term.name in names}
    assert planned == held
    assert set(planned) == names
    assert planned["KV cache of the draft head"] == 256 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "head_dim is 24, expected a multiple of 16"),
        ({"n_embd": 40}, "n_embd is 40, expected a multiple of 16"),
        ({"rms_epsilon": 1e-60}, "rms_epsilon is 1e-60, expected a positive number"),
        ({"rope_base": 1e60}, "rope_base is 1e\\+60, expected a positive number"),
        ({"n_ff": 2**21}, "n_ff is 2097152, expected at most 1048576"),
        ({"taps": tuple(range(17))}, "it has 17 taps, expected at most 16"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    write_head(tmp_path / "head", TRAINED_FLOATS)
    head = load_head(tmp_path / "head")
    require_runnable(head)
    with pytest.raises(UnsupportedModelError, match=message):
        require_runnable(replace(head, card=replace(head.card, **changes)))  # type: ignore[arg-type]


def test_a_head_whose_outputs_are_fed_back_normed_needs_their_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native library refuses a head without it; found by fuzzing, as the norm was read where none was."""
    given = CpuDraftHead._set_vector

    def set_all_but_one(self: CpuDraftHead, name: str, values: NDArray[np.float32]) -> None:
        if name != "output_norm":
            given(self, name, values)

    monkeypatch.setattr(CpuDraftHead, "_set_vector", set_all_but_one)
    message = "fed back normed, and it has no output norm"
    with pytest.raises(SessionError, match=message), trained(tmp_path, INTEGERS, NORMED):
        pass
    with trained(tmp_path, INTEGERS, TRAINED_INTEGERS):  # others need none
        pass


def test_a_head_of_other_sizes_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Planning and loading refuse it alike."""
    short = replace(TRAINED_FLOATS, head_dim=8)
    with pytest.raises(UnsupportedModelError, match="head_dim is 8"), trained(tmp_path, head=short):
        pass
    options = LoadOptions(n_ctx=64, draft_head=tmp_path / "head")
    with pytest.raises(UnsupportedModelError, match="head_dim is 8"):
        Cpu().plan(tmp_path / "m.gguf", options)


@pytest.mark.parametrize(
    ("runtime", "why"), [(Reference(), "keeps no head's keys and values"), (LlamaCpp(), "end the process")]
)
def test_other_runtimes_refuse_a_head(runtime: Reference | LlamaCpp, why: str, tmp_path: Path) -> None:
    """A runtime that can't follow a text with a head says so, and why, before anything is loaded."""
    path = write_tiny(tmp_path / "m.gguf", Tiny())
    with pytest.raises(RequestError, match=f"{why}.*; use the cpu runtime"):
        runtime.load(path, LoadOptions(n_ctx=64, draft_head=tmp_path))

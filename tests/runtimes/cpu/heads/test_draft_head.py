"""A draft head on the cpu runtime: its scores are those of plain formulas, and its state goes with the session."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_heads import TinyHead, write_head
from support.heads.together import drafted_together
from support.models.random_blocks import random_blocks
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.cost_curve import SharedForward
from edgedec.errors import ModelFormatError, RequestError, SessionError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.head_state import ChainRules, DraftCall, HeadState
from edgedec.load_options import LoadOptions
from edgedec.model import Model, RowGroup, Session, Span
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

# Most rows of these are no whole blocks of 32, so they stay floats.
FLOATS = Tiny(n_layer=4, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
INTEGERS = Tiny(n_layer=4, tied=True, types=("Q8_0",))
OF_FLOATS = TinyHead(
    n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
OF_INTEGERS = TinyHead(
    n_embd=256, n_embd_target=256, n_ff=128, n_head=4, n_head_kv=2, head_dim=64, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 90, dtype=np.int32)
NORMED = replace(OF_INTEGERS, fc_norm="each", feeds_back_normed=True, speculators=True)
N_DRAFT = 4


@contextmanager
def loaded(folder: Path, tiny: Tiny = FLOATS, head: TinyHead = OF_FLOATS) -> Iterator[Model]:
    """Load a tiny model that a tiny head follows."""
    write_head(folder / "head", head)
    path = write_tiny(folder / "m.gguf", tiny)
    with Cpu().load(path, LoadOptions(n_ctx=256, draft_head=folder / "head")) as model:
        yield model


def head_of(session: Session) -> HeadState:
    """Return the head that follows a session."""
    assert session.draft_head is not None
    return session.draft_head


def read(session: Session, tokens: NDArray[np.int32], n_past: int = 0) -> None:
    """Evaluate tokens of the text."""
    session.forward(tokens, n_past=n_past)


def scores(session: Session, n: int, n_drafted: int = N_DRAFT) -> list[NDArray[np.float32]]:
    """Return the scores after TEXT[: n + 1], of which the session holds n tokens, and after each drafted token."""
    head = head_of(session)
    row = head.begin(n, int(TEXT[n]))
    found = []
    for _ in range(n_drafted):
        assert row is not None
        found.append(row.copy())
        row = head.next(int(head.token_ids[row.argmax()]))
    return found


def fresh(model: Model, n: int) -> list[NDArray[np.float32]]:
    """Return the scores of a new session that read TEXT[:n] at once."""
    session = model.session(200)
    read(session, TEXT[:n])
    return scores(session, n)


def same(found: list[NDArray[np.float32]], expected: list[NDArray[np.float32]]) -> bool:
    """Return whether scores have the same bits."""
    return np.array_equal(np.stack(found), np.stack(expected))


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
    "plain": OF_FLOATS,
    "normed residual": replace(OF_FLOATS, norm_before_residual=True, speculators=True),
    "norm over all taps": replace(OF_FLOATS, fc_norm="joined", speculators=True),
    "norm over each tap": replace(OF_FLOATS, fc_norm="each", speculators=True),
    "normed feedback": replace(OF_FLOATS, feeds_back_normed=True, speculators=True),
    "own matrices": replace(OF_FLOATS, own_embedding=True, own_output=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_formulas(kind: str, tmp_path: Path) -> None:
    """With floats but for q, k and v, the scores of a chain are within 2 % of the numpy head's largest."""
    head, n = KINDS[kind], 30
    with loaded(tmp_path, head=head) as model:
        session = model.session(200)
        hidden = session.forward(TEXT[:n], n_past=0, taps=tuple(tap - 1 for tap in head.taps)).hidden
        taps = np.concatenate([hidden[tap - 1] for tap in head.taps], axis=1)
        found, expected = np.stack(scores(session, n)), oracle(tmp_path, taps, n)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_rounded_weights_give_about_the_same_scores(tmp_path: Path) -> None:
    """With weights and activations of 8 bits the scores are within 3 % of the largest."""
    n = 30
    with loaded(tmp_path, INTEGERS, OF_INTEGERS) as model:
        session = model.session(200)
        hidden = session.forward(TEXT[:n], n_past=0, taps=(1, 2, 3)).hidden
        taps = np.concatenate([hidden[tap] for tap in (1, 2, 3)], axis=1)
        found, expected = np.stack(scores(session, n)), oracle(tmp_path, taps, n)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


def test_borrowed_rows_are_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start reads the stored rows: it reads no row of the target's output matrix, and drafts the same bits.

    Another target's rows are others, a damaged file is made again, and the rows go with the model's tiles.
    """
    write_head(tmp_path / "head", OF_INTEGERS)
    cache, path = tmp_path / "cache", write_tiny(tmp_path / "m.gguf", INTEGERS)
    n_read = 0

    def counted(*given: Any) -> HeadTensor:
        nonlocal n_read
        n_read += 1
        return borrowed_rows(*given)

    monkeypatch.setattr("edgedec_runtimes.cpu.runtime.borrowed_rows", counted)

    def start(model_path: Path = path) -> list[NDArray[np.float32]]:
        options = LoadOptions(n_ctx=256, draft_head=tmp_path / "head", cache_dir=cache)
        with Cpu().load(model_path, options) as model:
            session = model.session(200)
            read(session, TEXT[:30])
            return scores(session, 30)

    first = start()
    assert same(first, start())
    assert n_read == 1
    rows = [entry for entry in list_tiles(cache) if " head " in entry.layout]
    assert [entry.models for entry in rows] == [(path,)]
    rows[0].path.write_bytes(rows[0].path.read_bytes()[:-1])
    assert same(first, start())
    assert n_read == 2
    assert not same(first, start(write_tiny(tmp_path / "other.gguf", replace(INTEGERS, seed=7))))
    assert n_read == 3
    remove_tiles_of(cache, path)
    assert [entry.models[0].name for entry in list_tiles(cache) if " head " in entry.layout] == ["other.gguf"]


def test_a_chain_is_the_best_tokens_until_its_path_is_unlikely(tmp_path: Path) -> None:
    """The chain has the head's probabilities and second bests, and ends with the node below least_path."""
    with loaded(tmp_path) as model:
        session = model.session(200)
        read(session, TEXT[:20])
        chain = head_of(session).chain(20, int(TEXT[20]), ChainRules(N_DRAFT))
        rows = [row.astype(np.float64) for row in scores(session, 20)]
        ids = head_of(session).token_ids
        short = head_of(session).chain(
            20, int(TEXT[20]), ChainRules(N_DRAFT, least_path=chain.p[0] * chain.p[1] * 1.01)
        )
        corrected = ChainRules(N_DRAFT, chain.p[0] / 3, (0.0,), (1.0, 0.25))
        shorter = head_of(session).chain(20, int(TEXT[20]), corrected)
    order = [np.argsort(-row, kind="stable") for row in rows]
    p = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows]
    assert chain.tokens == tuple(int(ids[best[0]]) for best in order)
    assert chain.second_tokens == tuple(int(ids[best[1]]) for best in order)
    assert np.allclose(chain.p, [row.max() for row in p], rtol=1e-5)
    assert np.allclose(chain.second_p, [np.sort(row)[-2] for row in p], rtol=1e-5)
    assert short.tokens == chain.tokens[:2]
    assert shorter.tokens == chain.tokens[:1]


@pytest.mark.parametrize("kinds", [(FLOATS, OF_FLOATS), (INTEGERS, OF_INTEGERS), (INTEGERS, NORMED)])
def test_texts_are_drafted_together_as_alone(kinds: tuple[Tiny, TinyHead], tmp_path: Path) -> None:
    """Texts of different lengths, with few, many and no rows to read first: each gets the bits that it gets alone.

    A session of a text that the head does not know gets an empty chain, and each chain ends by its own probabilities.
    """
    lengths = [3, 20, 41, 70, 89, 20]
    with loaded(tmp_path, *kinds) as model:
        groups = []
        for _ in range(2):
            sessions = [model.session(200) for _ in (*lengths, 0)]
            for session, n in zip(sessions, lengths, strict=False):
                read(session, TEXT[: n - 1])
                read(session, TEXT[n - 1 : n], n - 1)
            groups.append(list(zip(sessions, [*lengths, 30], strict=True)))
        for rules in (ChainRules(6), ChainRules(6), ChainRules(6, least_path=0.05)):  # the second time nothing is new
            alone = [head_of(session).chain(n, int(TEXT[n]), rules) for session, n in groups[0]]
            assert drafted_together(groups[1], TEXT, rules) == alone
            assert alone[-1].tokens == ()
            assert alone[0].tokens
        assert len({len(chain.tokens) for chain in alone}) > 2  # chains that ended while others went on
        for session, n in groups[1][:-1]:  # and the states go on from there
            read(session, TEXT[n : n + 1], n)
            assert same(scores(session, n + 1), fresh(model, n + 1)) if n < 89 else True


def test_many_texts_are_drafted_in_several_forwards(tmp_path: Path) -> None:
    """Texts with more rows together than one forward takes are drafted all the same."""
    with loaded(tmp_path) as model:
        sessions = [(model.session(100), 30) for _ in range(10)]
        for session, n in sessions:
            read(session, TEXT[:n])
        rows = [row.copy() for row in scores(*sessions[0])]
        expected = head_of(sessions[0][0]).chain(30, int(TEXT[30]), ChainRules(N_DRAFT))
        assert drafted_together(sessions, TEXT, ChainRules(N_DRAFT)) == [expected] * 10
        assert all(same(scores(*one), rows) for one in sessions)


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
    with loaded(tmp_path) as model:
        session, closed = model.session(100), model.session(100)
        read(session, TEXT[:20])
        expected = head_of(session).chain(20, int(TEXT[20]), ChainRules(3))
        others = [call_of(session), call_of(closed)]
        closed.close()
        for other in others:
            with pytest.raises(SessionError):
                call_of(session).answer([other])
        assert head_of(session).chain(20, int(TEXT[20]), ChainRules(3)) == expected


def test_how_a_text_was_read_changes_nothing(tmp_path: Path) -> None:
    """A text read at once, token by token, and in pieces with rejected drafts between them, gives the same scores."""
    n = 70
    with loaded(tmp_path) as model:
        expected = fresh(model, n)
        slow, drafting, tree = (model.session(200) for _ in range(3))
        for i in range(n):
            read(slow, TEXT[i : i + 1], i)
        assert same(scores(slow, n), expected)
        read(drafting, TEXT[:5])
        for i in range(5, n, 3):  # row 0 stands, two drafted tokens are right, two are not
            head_of(drafting).chain(i, int(TEXT[i]), ChainRules(N_DRAFT))
            wrong = (TEXT[i + 3 : i + 5] + 1) % N_VOCAB
            drafting.forward(np.concatenate([TEXT[i : i + 3], wrong]), n_past=i, rows="all")
        assert same(scores(drafting, n), expected)
        read(tree, TEXT[:5])
        for i in range(5, n, 2):  # of two branches the second one is right
            tokens = np.array([TEXT[i], (TEXT[i + 1] + 1) % N_VOCAB, TEXT[i + 1]], np.int32)
            tree.forward(tokens, n_past=i, parents=np.array([-1, 0, 0], np.int32), rows="all")
            tree.keep(np.array([0, 2], np.int32))
        read(tree, TEXT[n - 1 : n], n - 1)
        assert same(scores(tree, n), expected)


def test_forks_and_saved_states_carry_the_head(tmp_path: Path) -> None:
    """A fork, and a session restored from bytes, draft what the first session drafts; so they do after more text."""
    with loaded(tmp_path) as model:
        session, other = model.session(200), model.session(200)
        read(session, TEXT[:40])
        fork, data = session.fork(), session.save()
        other.load(data, 40)
        expected = fresh(model, 40)
        for one in (session, fork, other):
            assert same(scores(one, 40), expected)
            read(one, TEXT[40:60], 40)
            assert same(scores(one, 60), fresh(model, 60))


def test_a_state_without_the_head_begins_anew(tmp_path: Path) -> None:
    """Saved with a head, a text is restored without one, and the other way round: drafts then begin with new text."""
    with loaded(tmp_path) as model, Cpu().load(tmp_path / "m.gguf", LoadOptions(n_ctx=256)) as plain:
        with_head, without = model.session(200), plain.session(200)
        read(with_head, TEXT[:40])
        read(without, TEXT[:40])
        plain.session(200).load(with_head.save(), 40)
        restored = model.session(200)
        restored.load(without.save(), 40)
        assert head_of(restored).begin(40, int(TEXT[40])) is None
        assert head_of(restored).chain(40, int(TEXT[40]), ChainRules(2)).tokens == ()
        read(restored, TEXT[40:42], 40)
        assert len(scores(restored, 42)) == N_DRAFT
        for damaged in (without.save()[:-1], without.save() + b"x"):
            with pytest.raises(ModelFormatError):
                restored.load(damaged, 40)


def test_going_back_into_the_text_needs_one_new_token(tmp_path: Path) -> None:
    """After a step back nothing is drafted before a token was evaluated there; then the head goes on."""
    with loaded(tmp_path) as model:
        session = model.session(200)
        read(session, TEXT[:50])
        assert head_of(session).begin(30, int(TEXT[30])) is None
        read(session, TEXT[:50])
        read(session, TEXT[30:31], 30)
        assert len(scores(session, 31)) == N_DRAFT
        states = session.forward(TEXT[31:32], n_past=31, taps=(2,)).hidden[2].copy()
        evaluated(session, 31, RowGroup(vectors=states, span=Span(enter=3)))  # rows without tokens have no taps
        assert head_of(session).begin(32, int(TEXT[32])) is None
        read(session, TEXT[32:34], 32)
        assert len(scores(session, 34)) == N_DRAFT


def test_a_context_that_slides_is_followed(tmp_path: Path) -> None:
    """The head reads the window's tokens again when the window moves, and drafts on."""
    with loaded(tmp_path) as model:
        session = SlidingSession(model.session(64))
        read(session, TEXT[:60])
        assert len(scores(session, 60)) == N_DRAFT
        read(session, TEXT[60:80], 60)
        found = scores(session, 80)
        window = np.concatenate([TEXT[:4], TEXT[34:80]])
        inner = model.session(64)
        read(inner, window)
        row = head_of(inner).begin(len(window), int(TEXT[80]))
        assert row is not None
        # the pair of the last token before the gap was made with the token that followed it in the text
        assert np.abs(found[0] - row).max() < 0.05 * np.abs(row).max()


def test_a_head_rests_when_told_to(tmp_path: Path) -> None:
    """A head at rest drafts nothing, and the session goes on."""
    with loaded(tmp_path) as model:
        session = model.session(200)
        read(session, TEXT[:20])
        head_of(session).rest()
        read(session, TEXT[20:30], 20)
        assert head_of(session).chain(30, int(TEXT[30]), ChainRules(3)).tokens == ()
        assert head_of(session).begin(30, int(TEXT[30])) is None
        assert head_of(session).read_s == 0.0


def test_a_closed_session_drafts_nothing(tmp_path: Path) -> None:
    """Drafting on a closed session is refused."""
    with loaded(tmp_path) as model:
        session = model.session(200)
        head = head_of(session)
        session.close()
        with pytest.raises(SessionError):
            head.chain(1, 1, ChainRules(2))


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    """The plan has the head's weights, keys and values, and taps, and the loaded model says the same."""
    names = {"draft head", "KV cache of the draft head", "taps of the draft head"}
    options = LoadOptions(n_ctx=256, draft_head=tmp_path / "head")
    with loaded(tmp_path) as model:
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
    """Each by name."""
    write_head(tmp_path / "head", OF_FLOATS)
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
    with (
        pytest.raises(SessionError, match="fed back normed, and it has no output norm"),
        loaded(tmp_path, INTEGERS, NORMED),
    ):
        pass
    with loaded(tmp_path, INTEGERS, OF_INTEGERS):  # others need none
        pass


def test_a_head_of_other_sizes_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Planning and loading refuse it alike."""
    with (
        pytest.raises(UnsupportedModelError, match="head_dim is 8"),
        loaded(tmp_path, head=replace(OF_FLOATS, head_dim=8)),
    ):
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

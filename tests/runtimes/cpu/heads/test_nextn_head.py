"""A nextn layer on the cpu runtime: its scores are those of plain formulas, and its state goes with the session."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.tiny_nextn import OWN, PlainNextn, nextn_metadata, nextn_tensors, write_nextn
from support.heads.together import drafted_together
from support.models.gguf_writer import write_gguf
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import ARCHITECTURES, Tiny, tiny_metadata, write_tiny

from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.head_state import ChainRules, HeadState
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads import nextn
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow

# Rows that are no whole blocks of 32 stay floats.
FLOATS = Tiny("qwen3", n_layer=3, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
INTEGERS = Tiny("qwen3", n_layer=2, tied=True, types=("Q8_0",), seed=1)
EXPERTS = Tiny(
    "qwen3moe", n_layer=2, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_expert=8, n_expert_used=3, n_ff_expert=32
)
LLAMA = Tiny("llama", n_layer=2, n_embd=48, n_head=3, n_head_kv=1, head_dim=32, n_ff=64, tied=True, biases=True)
HYBRID = replace(ARCHITECTURES["qwen35"], types=("Q8_0",))
MODELS = {"floats": FLOATS, "integers": INTEGERS, "experts": EXPERTS, "states": HYBRID}
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 90, dtype=np.int32)
N_DRAFT = 4


@contextmanager
def loaded(folder: Path, tiny: Tiny = FLOATS, own: tuple[str, ...] = OWN[:1], **options: Any) -> Iterator[Model]:
    """Load a tiny model that its nextn layer follows."""
    path = write_nextn(folder / "m.gguf", tiny, own)
    with Cpu().load(path, LoadOptions(n_ctx=256, draft_head=path, **options)) as model:
        yield model


def head_of(session: Session) -> HeadState:
    """Return the head that follows a session."""
    assert session.draft_head is not None
    return session.draft_head


def read(session: Session, tokens: NDArray[np.int32], n_past: int = 0) -> None:
    """Evaluate tokens of the text."""
    session.forward(tokens, n_past=n_past)


def scores(session: Session, n: int, n_drafted: int = N_DRAFT) -> NDArray[np.float32]:
    """Return the scores after TEXT[: n + 1], of which the session holds n tokens, and after each drafted token."""
    head = head_of(session)
    row = head.begin(n, int(TEXT[n]))
    found = []
    for _ in range(n_drafted):
        assert row is not None
        found.append(row.copy())
        row = head.next(int(head.token_ids[row.argmax()]))
    return np.stack(found)


def fresh(model: Model, n: int) -> NDArray[np.float32]:
    """Return the scores of a new session that read TEXT[:n] at once."""
    session = model.session(200)
    read(session, TEXT[:n])
    return scores(session, n)


KINDS = {
    "qwen3": (FLOATS, OWN[:1]),
    "the model's norm": (FLOATS, ()),
    "matrices of its own": (FLOATS, OWN),
    "experts": (EXPERTS, OWN[:1]),
    "biases, tied": (LLAMA, OWN[:1]),
    "qwen35": (ARCHITECTURES["qwen35"], OWN[:1]),
    "qwen35moe": (ARCHITECTURES["qwen35moe"], OWN[:1]),
    "qwen3next": (ARCHITECTURES["qwen3next"], ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_plain_formulas(kind: str, tmp_path: Path) -> None:
    """Of float weights but for the matrix that joins pairs, scores are within 3 % of the largest score."""
    tiny, own = KINDS[kind]
    n = 30
    with loaded(tmp_path, tiny, own) as model:
        session = model.session(200)
        last = tiny.n_layer - 1
        states = session.forward(TEXT[:n], n_past=0, taps=(last,)).hidden[last].copy()
        found = scores(session, n)
    drafted = [int(row.argmax()) for row in found[:-1]]
    expected = PlainNextn(tmp_path, tiny, own).scores(states, TEXT[: n + 1].tolist(), drafted)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_how_a_text_was_read_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """A text read at once, token by token, and in pieces with rejected drafts between them, gives the same bits."""
    n = 70
    with loaded(tmp_path, tiny) as model:
        expected = fresh(model, n)
        slow, drafting, tree = (model.session(200) for _ in range(3))
        for i in range(n):
            read(slow, TEXT[i : i + 1], i)
        assert np.array_equal(scores(slow, n), expected)
        read(drafting, TEXT[:5])
        for i in range(5, n, 3):  # row 0 stands, two drafted tokens are right, two are not
            head_of(drafting).chain(i, int(TEXT[i]), ChainRules(N_DRAFT))
            wrong = (TEXT[i + 3 : i + 5] + 1) % N_VOCAB
            drafting.forward(np.concatenate([TEXT[i : i + 3], wrong]), n_past=i, rows="all")
        assert np.array_equal(scores(drafting, n), expected)
        read(tree, TEXT[:5])
        for i in range(5, n, 2):  # of two branches the second one is right
            tokens = np.array([TEXT[i], (TEXT[i + 1] + 1) % N_VOCAB, TEXT[i + 1]], np.int32)
            tree.forward(tokens, n_past=i, parents=np.array([-1, 0, 0], np.int32), rows="all")
            tree.keep(np.array([0, 2], np.int32))
        read(tree, TEXT[n - 1 : n], n - 1)
        assert np.array_equal(scores(tree, n), expected)


@pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)
def test_texts_are_drafted_together_as_alone(tiny: Tiny, tmp_path: Path) -> None:
    """Texts of different lengths, with few and many rows to read first, get the chains that they get alone."""
    lengths, rules = [3, 20, 41, 70, 89, 20], ChainRules(6)
    with loaded(tmp_path, tiny) as model:
        groups = []
        for _ in range(2):
            sessions = [(model.session(200), n) for n in lengths]
            for session, n in sessions:
                read(session, TEXT[: n - 1])
                read(session, TEXT[n - 1 : n], n - 1)
            groups.append(sessions)
        alone = [head_of(session).chain(n, int(TEXT[n]), rules) for session, n in groups[0]]
        assert drafted_together(groups[1], TEXT, rules) == alone
        assert all(len(chain.tokens) == 6 for chain in alone)


def test_branches_are_scored_as_chains(tmp_path: Path) -> None:
    """A node of a tree has the bits that it has in a chain of the tokens above it."""
    with loaded(tmp_path) as model:
        session = model.session(200)
        read(session, TEXT[:40])
        head = head_of(session)
        assert head.begin(40, int(TEXT[40])) is not None
        first = head.branches([5, 9], [-1, -1], 2)
        assert first is not None
        first = first.copy()
        second = head.branches([5, 9, 7, 8], [-1, -1, 0, 1], 2)
        assert second is not None
        found = {(5,): first[0], (9,): first[1], (5, 7): second[0].copy(), (9, 8): second[1].copy()}
        for path, row in found.items():
            chain = head.begin(40, int(TEXT[40]))
            for token in path:
                chain = head.next(token)
            assert chain is not None
            assert np.array_equal(chain, row)


@pytest.mark.parametrize("tiny", [FLOATS, HYBRID], ids=["floats", "states"])
def test_forks_and_saved_states_carry_the_head(tiny: Tiny, tmp_path: Path) -> None:
    """A fork, and a session restored from bytes, draft what the first session drafts; so they do after more text."""
    with loaded(tmp_path, tiny) as model:
        session, other = model.session(200), model.session(200)
        read(session, TEXT[:40])
        fork, data = session.fork(), session.save()
        other.load(data, 40)
        expected = fresh(model, 40)
        for one in (session, fork, other):
            assert np.array_equal(scores(one, 40), expected)
            read(one, TEXT[40:60], 40)
            assert np.array_equal(scores(one, 60), fresh(model, 60))


@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_change_no_bit(n_threads: int, tmp_path: Path) -> None:
    """One thread, two and three give the same scores."""
    with loaded(tmp_path, INTEGERS, n_threads=2) as model:
        expected = fresh(model, 60)
    with loaded(tmp_path, INTEGERS, n_threads=n_threads) as model:
        assert np.array_equal(fresh(model, 60), expected)


def test_a_large_vocabulary_is_drafted_by_its_first_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are the first ones of those over all tokens, with and without an output matrix of its own."""
    n = 30
    for own in (OWN[:1], OWN):
        with loaded(tmp_path, FLOATS, own) as model:
            expected = fresh(model, n)[0]
        with monkeypatch.context() as patched:
            patched.setattr(nextn, "n_listed", lambda gguf, n_vocab: 96)
            with loaded(tmp_path, FLOATS, own) as model:
                session = model.session(200)
                read(session, TEXT[:n])
                assert head_of(session).token_ids.tolist() == list(range(96))
                assert np.array_equal(scores(session, n)[0], expected[:96])


def test_no_second_copy_of_the_models_matrices_is_held(tmp_path: Path) -> None:
    """The head holds the layer and the matrix that joins pairs; a copy of output rows is held where weights stream."""
    path = write_nextn(tmp_path / "m.gguf", INTEGERS)
    tensors = read_gguf(path).tensors
    own = sum(t.n_bytes for name, t in tensors.items() if name.startswith("blk.2.") and len(t.shape) == 2)
    names = ("draft head", "KV cache of the draft head", "taps of the draft head", "activations of the draft head")
    for resident in (None, layer_bytes(path).total // 2):
        options = LoadOptions(
            n_ctx=256, draft_head=path, resident_bytes=resident, cache_dir=tmp_path / "cache", n_threads=1
        )
        planned = {term.name: term.n_bytes for term in Cpu().plan(path, options) if term.name in names}
        with Cpu().load(path, options) as model:
            held = {term.name: term.n_bytes for term in model.memory(256, options.max_rows) if term.name in names}
            session = model.session(200)
            read(session, TEXT[:30])
            row = scores(session, 30)[0]
        assert planned == held
        assert planned["KV cache of the draft head"] == 256 * 2 * 2 * 64 * 2
        copied = N_VOCAB * 256 * 18 // 32 if resident else 0
        assert own / 2 < planned["draft head"] - copied < 1.1 * own
        assert np.isfinite(row).all()


def test_the_file_of_a_layer_alone_is_a_head(tmp_path: Path) -> None:
    """It drafts what the layer in the model's file drafts, and does not fit a model of another depth."""
    model_path = write_nextn(tmp_path / "m.gguf", FLOATS)
    alone = write_nextn(tmp_path / "nextn.gguf", FLOATS, alone=True)
    of_model = {name: tensor for name, tensor in nextn_tensors(FLOATS).items() if not name.startswith("blk.3.")}
    plain = write_gguf(tmp_path / "plain.gguf", tiny_metadata(FLOATS), of_model)
    found = []
    for path, head in ((model_path, model_path), (model_path, alone), (plain, alone), (plain, model_path)):
        with Cpu().load(path, LoadOptions(n_ctx=256, draft_head=head)) as model:
            found.append(fresh(model, 40))
    assert all(np.array_equal(rows, found[0]) for rows in found[1:])
    deeper = write_tiny(tmp_path / "deeper.gguf", replace(FLOATS, n_layer=4))
    with pytest.raises(UnsupportedModelError, match="it reads what leaves layer 3, but the model has 4 layers"):
        fit(load_head(alone), read_gguf(deeper))


@pytest.mark.parametrize("change", ["absent", "a row more", "no number"])
def test_damaged_tensors_are_refused_by_name(change: str, tmp_path: Path) -> None:
    """Every tensor of the layer that is absent, has another shape or is no number, is named before anything drafts."""
    tensors, prefix = nextn_tensors(FLOATS), "blk.3."
    own = {"joint": "nextn.eh_proj", "input_norm": "nextn.enorm", "hidden_norm": "nextn.hnorm"}
    parts = {short: part for part, short in own.items()} | {"nextn.shared_head_norm": "output_norm"}
    for name in [name for name in tensors if name.startswith(prefix)]:
        changed: dict[str, Any] = dict(tensors)
        short, tensor = name.removeprefix(prefix).removesuffix(".weight"), changed.pop(name)
        is_vector = len(tensor.shape) == 1
        if change == "a row more":
            changed[name] = np.zeros((tensor.shape[-1] + 1, *tensor.shape[:-1]), np.float32)
        if change == "no number":
            if not (is_vector or short in parts):
                continue
            changed[name] = np.full(tensor.shape[::-1], np.nan, np.float32)
        if change == "absent" and short in ("nextn.shared_head_norm", "attn_q_norm", "attn_k_norm"):
            continue  # the model's own norm stands in place of the first, and the others may be absent
        path = write_gguf(tmp_path / "m.gguf", nextn_metadata(FLOATS), changed)
        with pytest.raises(EdgedecError) as caught:
            Cpu().load(path, LoadOptions(n_ctx=64, draft_head=path))
        assert parts.get(short, short) in str(caught.value) or short in str(caught.value)


def test_the_price_counts_what_a_drafted_token_reads(tmp_path: Path) -> None:
    """A token reads the layer, the matrix that joins pairs and the output matrix; of experts, those it goes through."""
    with loaded(tmp_path, INTEGERS) as model:
        session = model.session(64)
        tensors = read_gguf(tmp_path / "m.gguf").tensors
        of_layer = {name: t for name, t in tensors.items() if name.startswith("blk.2.") and len(t.shape) == 2}
        joint = of_layer.pop("blk.2.nextn.eh_proj.weight")
        n_bytes = sum(t.n_bytes for t in of_layer.values()) + joint.n_elements * 34 // 32
        expected = (n_bytes + tensors["token_embd.weight"].n_bytes) / layer_bytes(tmp_path / "m.gguf").total
        assert head_of(session).price.level == pytest.approx(expected, rel=0.01)  # tiles have whole groups of rows
    prices = []
    for n_used in (2, 4):
        tiny = replace(EXPERTS, n_expert_used=n_used)
        with loaded(tmp_path, tiny) as model:
            prices.append(head_of(model.session(64)).price.level * layer_bytes(tmp_path / "m.gguf").total)
    assert prices[1] - prices[0] == pytest.approx(2 * 3 * 48 * 32 * 4)

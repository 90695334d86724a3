"""Rows that are vectors in place of tokens, and rows of tokens that see each other: the runtimes agree on them.

A row has its bits however it is asked for. Bounds are those of tests/runtimes/cpu/test_logits.py. The models of vectors
are tiny ones of each family whose pictures differ: in causal rows (llama, lfm2), in what multiplies vectors (granite,
minicpm), in rows that see each other (gemma3), and in places by height and width, with additions behind layers
(qwen2vl, qwen3vl, qwen35). llama.cpp evaluates the models whose rows of tokens all see each other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_quantized import ARCHITECTURES, DIFFUSION, Tiny, write_tiny
from support.models.tiny_runs import bits, distance

from edgedec.errors import CapabilityError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup, Session, Span
from edgedec.pictures import Block
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.choose import LossyModel
from edgedec_runtimes.layer_skip.layer_sets import without
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow


BEFORE, AFTER = 7, 9
TOKENS = np.random.default_rng(1).integers(4, 260, BEFORE + AFTER).astype(np.int32)
BLOCK = Block(12, 4, 3)
FAMILIES = ("llama", "lfm2", "granite", "minicpm", "gemma3", "qwen2vl", "qwen3vl", "qwen35")
REFERENCE_BOUND, LLAMACPP_BOUND = 2.5e-4, 2.5e-3
N_ADDED = {"qwen3vl": 3}


def block_of(name: str) -> Block:
    """Return the block of a family's picture."""
    return replace(BLOCK, mutual=name == "gemma3")


def vectors_of(name: str, n_embd: int, seed: int = 2) -> NDArray[np.float32]:
    """Return rows of a picture: f32[12, n_embd], for models with additions behind layers more numbers."""
    width = n_embd * (1 + N_ADDED.get(name, 0))
    return np.random.default_rng(seed).standard_normal((BLOCK.n_rows, width)).astype(np.float32)


def read(
    session: Session, name: str, sizes: tuple[int, ...] = (), layers: LayerSet | None = None
) -> NDArray[np.float32]:
    """Read tokens, a picture and tokens on an empty session; return the logits of all rows behind the picture.

    `sizes` are the rows of the forwards that the picture's rows are read in, `layers` those that all rows pass.
    """
    block, vectors = block_of(name), vectors_of(name, session.model.card.n_embd)
    session.forward(TOKENS[:BEFORE], n_past=0, layers=layers)
    first, span = 0, Span(layers=layers)
    for n in (*sizes, BLOCK.n_rows - sum(sizes)):
        rows = vectors[first : first + n]
        evaluated(session, BEFORE + first, RowGroup(vectors=rows, sees=replace(block, first=first), span=span))
        first += n
    return session.forward(TOKENS[BEFORE:], n_past=BEFORE + BLOCK.n_rows, rows="all", layers=layers).logits.copy()


@dataclass(frozen=True, slots=True)
class Case:
    """A family's model on the cpu runtime, and what the reference says."""

    name: str
    path: Path
    model: Model
    exact: NDArray[np.float32]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny model with F16 matrices."""
    name: str = request.param
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", replace(ARCHITECTURES[name], types=("F16",)))
    with Reference().load(path, LoadOptions(n_ctx=64, max_rows=64)) as reference:
        exact = read(reference.session(64), name)
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=2, max_rows=64, n_parallel=4)) as model:
        yield Case(name, path, model, exact)


def test_cpu_agrees_with_the_reference(case: Case) -> None:
    """Up to rounding."""
    assert distance(read(case.model.session(64), case.name), case.exact) < REFERENCE_BOUND


def test_llamacpp_agrees_with_the_reference(case: Case) -> None:
    """It computes attention in float16. Going back to before the picture and reading it again changes nothing."""
    with LlamaCpp().load(case.path, LoadOptions(n_ctx=64, n_threads=1, max_rows=64)) as model:
        session = model.session(64)
        found = read(session, case.name)
        assert distance(found, case.exact) < LLAMACPP_BOUND
        np.testing.assert_array_equal(bits(read(session, case.name)), bits(found))


def test_any_split_has_the_same_bits(case: Case) -> None:
    """Rows of a picture one by one, in pieces, and together; a mutual block is refused in pieces."""
    expected = bits(read(case.model.session(64), case.name))
    for sizes in ((1,) * (BLOCK.n_rows - 1), (5, 1)):
        if block_of(case.name).mutual:
            with pytest.raises(RequestError, match="evaluate it whole"):
                read(case.model.session(64), case.name, sizes)
        else:
            np.testing.assert_array_equal(bits(read(case.model.session(64), case.name, sizes)), expected)


def test_layers_that_are_left_out(case: Case) -> None:
    """With `layer-skip` a picture's rows are those of forwards by hand through the same layers, and the reference's."""
    layers = without(case.model.card.n_layer, [(0, 1), (1, 0)])
    expected = read(case.model.session(64), case.name, layers=layers)
    with Reference().load(case.path, LoadOptions(n_ctx=64, max_rows=64)) as reference:
        exact = read(reference.session(64), case.name, layers=layers)
    assert distance(expected, exact) < REFERENCE_BOUND < distance(expected, case.exact)
    lossy = LossyModel(case.model, layers, 0.5)
    np.testing.assert_array_equal(bits(read(lossy.session(64), case.name)), bits(expected))


def test_beside_other_sessions(case: Case) -> None:
    """A picture in a joint forward with a picture and with tokens of other sessions."""
    expected = bits(read(case.model.session(64), case.name))
    block, vectors = block_of(case.name), vectors_of(case.name, case.model.card.n_embd)
    other = vectors_of(case.name, case.model.card.n_embd, seed=3)
    sessions = [case.model.session(64) for _ in range(3)]
    for session in sessions:
        session.forward(TOKENS[:BEFORE], n_past=0)
    pairs = zip(sessions[:2], (vectors, other), strict=True)
    items = [ForwardItem(each, BEFORE, (RowGroup(vectors=rows, sees=block),)) for each, rows in pairs]
    case.model.forward([ForwardItem(sessions[2], BEFORE, (RowGroup(TOKENS[:5]),)), *items])
    found = case.model.forward(
        [ForwardItem(each, each.n_cached, (RowGroup(TOKENS[BEFORE:]),), rows="all") for each in sessions]
    )
    np.testing.assert_array_equal(bits(found[0].logits), expected)
    assert (bits(found[1].logits) != expected).any()


def test_what_follows_goes_on_alike(case: Case) -> None:
    """Steps, a tree, a fork, a saved and restored session, and going back behind a picture, into text and before it."""
    session = case.model.session(64)
    expected = bits(read(session, case.name))
    n_past = BEFORE + BLOCK.n_rows

    def check(each: Session, n: int) -> None:
        found = each.forward(TOKENS[BEFORE + n :], n_past=n_past + n, rows="all").logits
        np.testing.assert_array_equal(bits(found), expected[n:])

    check(session, 3)
    fork = session.fork()
    data, n_held = session.save(), session.n_cached
    check(fork, 5)
    session.forward(TOKENS[:3], n_past=2)  # before the picture
    check(fork, 0)
    np.testing.assert_array_equal(bits(read(session, case.name)), expected)
    restored = case.model.session(64)
    restored.load(data, n_held)
    check(restored, AFTER - 1)
    parents = np.array([-1, 0, 0, 1], np.int32)
    tree = np.array([TOKENS[BEFORE], 9, TOKENS[BEFORE + 1], 11], np.int32)
    rows = bits(session.forward(tree, n_past=n_past, parents=parents, rows="all").logits)
    np.testing.assert_array_equal(rows[[0, 2]], expected[:2])
    session.keep(np.array([0, 2], np.int32))
    check(session, 2)


def test_embeddings_as_vectors_are_tokens(tmp_path: Path) -> None:
    """Token embeddings given as rows, without a block, have the bits of the tokens."""
    path = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES["llama"], types=("F32",)))
    from edgedec.gguf.file import read_gguf

    gguf = read_gguf(path)
    for runtime in (Cpu(), Reference()):
        with runtime.load(path, LoadOptions(n_ctx=64, max_rows=64)) as model:
            table = np.frombuffer(gguf.read_tensor_bytes("token_embd.weight"), "<f4").reshape(-1, model.card.n_embd)
            expected = bits(model.session(64).forward(TOKENS, n_past=0, rows="all").logits)
            found = evaluated(model.session(64), 0, RowGroup(vectors=table[TOKENS]), rows="all").logits
            np.testing.assert_array_equal(bits(found), expected)


def with_nan(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows with an element that is no number."""
    found = rows.copy()
    found[3, 5] = np.nan
    return found


def test_what_is_refused(case: Case) -> None:
    """Nothing is evaluated, and the session can be used."""
    session, block, rows = case.model.session(64), block_of(case.name), vectors_of(case.name, case.model.card.n_embd)
    session.forward(TOKENS[:BEFORE], n_past=0)
    for vectors, wrong in (
        (with_nan(rows), block),
        (rows[:, :-1], block),
        (rows, replace(block, n_rows=11)),
        (rows, replace(block, first=1)),
        (rows, replace(block, n_x=0)),
    ):
        with pytest.raises(RequestError):
            evaluated(session, BEFORE, RowGroup(vectors=vectors, sees=wrong))
    tall, long = np.zeros((300, rows.shape[1]), np.float32), case.model.session(512)
    with pytest.raises(CapabilityError, match="at most 256 such rows"):
        evaluated(long, 0, RowGroup(vectors=tall, sees=Block(300, 20, 15, mutual=True)))
    assert session.n_cached == BEFORE


llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

N = 40
BLOCK_TOKENS = np.random.default_rng(1).integers(4, 260, N).astype(np.int32)
BLOCKS = {"tokenizer.ggml.mask_token_id": 3, "diffusion.block_size": 8, "diffusion.shift_logits": False}


def grid(n: int) -> Block:
    """Return blocks of `n` positions."""
    return Block(n, 1, 1, mutual=True)


def block_rows(runtime: Cpu | Reference, path: Path, size: int, n_threads: int = 1) -> NDArray[np.float32]:
    """Return the logits of all rows of TOKENS in blocks."""
    with runtime.load(path, LoadOptions(n_ctx=64, n_threads=n_threads)) as model:
        return evaluated(model.session(64), 0, RowGroup(BLOCK_TOKENS, sees=grid(size)), rows="all").logits.copy()


def of_llama_cpp(path: Path) -> NDArray[np.float32]:
    """Return llama.cpp's logits of all rows of TOKENS, which all see each other."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    context = llama_cpp.llama_init_from_model(model, options)
    llama_cpp.llama_set_causal_attn(context, False)
    batch = llama_cpp.llama_batch_init(N, 0, 1)
    for i, token in enumerate(BLOCK_TOKENS.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    batch.n_tokens = N
    assert llama_cpp.llama_decode(context, batch) == 0
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    found = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (n_vocab,)).copy() for i in range(N)]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.array(found)


@pytest.mark.parametrize("name", ["dream", "llada", "qwen3"])
def test_the_runtimes_agree(tmp_path: Path, name: str) -> None:
    """On rows that see their blocks, and on those that see the whole text, where llama.cpp is asked as well."""
    path = write_tiny(tmp_path / "m.gguf", DIFFUSION.get(name, Tiny(name)), metadata=BLOCKS if name == "qwen3" else {})
    for size in (8, 64):
        found, exact = block_rows(Cpu(), path, size), block_rows(Reference(), path, size)
        assert distance(found, exact) < REFERENCE_BOUND
    if name != "qwen3":
        assert distance(found, of_llama_cpp(path)) < LLAMACPP_BOUND
        assert distance(block_rows(Cpu(), path, 8), of_llama_cpp(path)) > 0.05


def test_bits_are_those_of_any_forward(tmp_path: Path) -> None:
    """On any number of threads, block by block, with some rows wanted, and beside another session's rows."""
    path = write_tiny(
        tmp_path / "m.gguf", Tiny("qwen3", types=("Q4_K", "Q6_K"), n_head=8, head_dim=32), metadata=BLOCKS
    )
    expected = bits(block_rows(Cpu(), path, 8))
    assert (bits(block_rows(Cpu(), path, 8, n_threads=3)) == expected).all()
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=2)) as model:
        session, other = model.session(64), model.session(64)
        for begin, end in ((0, 8), (8, 24), (24, N)):
            found = evaluated(session, begin, RowGroup(BLOCK_TOKENS[begin:end], sees=grid(8)), rows="all").logits
            assert (bits(found) == expected[begin:end]).all()
        wanted = np.array([1, 6], np.int32)
        assert (
            bits(evaluated(session, 16, RowGroup(BLOCK_TOKENS[16:24], sees=grid(8)), rows=wanted).logits)
            == expected[[17, 22]]
        ).all()
        other.forward(BLOCK_TOKENS[:5], n_past=0)
        items = [
            ForwardItem(other, 5, (RowGroup(BLOCK_TOKENS[5:9]),), rows="all"),
            ForwardItem(session, 8, (RowGroup(BLOCK_TOKENS[8:16], sees=grid(8)),), rows="all"),
        ]
        causal, mutual = model.forward(items)
        assert (bits(mutual.logits) == expected[8:16]).all()
        assert (
            bits(causal.logits) == bits(model.session(64).forward(BLOCK_TOKENS[:9], n_past=0, rows="all").logits[5:])
        ).all()


def test_what_is_no_block_is_refused(tmp_path: Path) -> None:
    """Nothing is evaluated then; llama.cpp's runtime refuses such rows of any model."""
    path = write_tiny(tmp_path / "m.gguf", Tiny())
    for runtime in (Cpu(), Reference()):
        with runtime.load(path, LoadOptions(n_ctx=300)) as model:
            session = model.session(300)
            for block in (Block(8, 1, 1), Block(0, 1, 1, mutual=True), Block(-8, 1, 1, mutual=True)):
                with pytest.raises(RequestError):
                    evaluated(session, 0, RowGroup(BLOCK_TOKENS, sees=block))
            with pytest.raises(CapabilityError):
                evaluated(session, 0, RowGroup(np.zeros(257, np.int32), sees=grid(8)))
            assert session.n_cached == 0
    with LlamaCpp().load(path, LoadOptions(n_ctx=64)) as model, pytest.raises(CapabilityError):
        evaluated(model.session(64), 0, RowGroup(BLOCK_TOKENS, sees=grid(8)))

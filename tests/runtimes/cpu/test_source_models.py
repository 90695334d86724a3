"""Encoder-decoder models on the cpu runtime: logits of float64, the same bits and texts however they are asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import distance
from support.models.tiny_runs import Bits, bits, extend
from support.models.tiny_t5 import END, PAD, TOKENS, TinyT5, t5_logits

from edgedec.errors import CapabilityError, ModelFormatError, PromptTooLongError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

SMALL = TinyT5()
SHAPES = {
    "v1.1": replace(SMALL, n_ctx=300),
    "first": replace(SMALL, n_encoder=2, n_decoder=4, gated=False, tied=True, n_buckets=16, n_ctx=300, seed=1),
    "halves": replace(SMALL, n_head=4, n_ctx=300, dtype=np.float16, seed=2),
}
N_CTX = 128


def ids(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Return random tokens without special ones."""
    return np.random.default_rng(seed).integers(3, len(TOKENS), n).astype(np.int32)


def sourced(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Return the tokens of a source of length `n`."""
    return np.append(ids(n - 1, seed), np.int32(END))


def begun(text: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a text behind the token that it begins with."""
    return np.concatenate([np.array([PAD], np.int32), text])


SOURCE, OTHER, TEXT = sourced(40, 1), sourced(33, 3), begun(ids(30, 2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a small model."""
    return SMALL.write(tmp_path / "t5.gguf")


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    """Load it on one thread."""
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=1)) as loaded:
        yield loaded


def after(model: Model, source: NDArray[np.int32], sizes: Sequence[int] = ()) -> Session:
    """Open a session that holds a source, read in pieces of these sizes and then the rest."""
    session, ends = model.session(N_CTX), [*np.cumsum(sizes, dtype=int).tolist(), len(source)]
    for begin, end in zip([0, *ends], ends, strict=False):
        session.forward(source[begin:end], n_past=begin)
    return session


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("n_source", "n_text"), [(7, 30), (1, 2), *(pytest.param(n, 139, marks=SLOW) for n in (130, 299))]
)
@pytest.mark.parametrize("name", SHAPES)
def test_logits(tmp_path: Path, name: str, n_source: int, n_text: int) -> None:
    """They are those of float64, for sources and texts over several spans of attention."""
    shape, source, text = SHAPES[name], sourced(n_source), begun(ids(n_text, 4))
    path = shape.write(tmp_path / "t5.gguf")
    with Cpu().load(path, LoadOptions(n_ctx=600, max_rows=256)) as model:
        session = model.session(600)
        session.forward(source, n_past=0)
        found = session.forward(text, n_past=len(source), rows="all").logits
    expected = t5_logits(shape, shape.weights(), source.tolist(), text.tolist())
    assert distance(found, expected) < 2e-3


def ways(model: Model, source: NDArray[np.int32], text: NDArray[np.int32]) -> Iterator[Bits]:
    """Yield the logits of a text, evaluated in several ways."""
    n = len(source)
    yield extend(after(model, source), text, (1,) * len(text))
    for sizes in ((1, 1, 5), (n - 1,), (10, n - 20)):
        yield extend(after(model, source, sizes), text, (3, 9))
    forked = after(model, source[:9]).fork()
    forked.forward(source[9:], n_past=9)
    yield extend(forked.fork(), text)
    again = after(model, OTHER)
    extend(again, text)
    again.forward(source, n_past=0)
    extend(again, begun(TEXT[:0:-1]))
    last = bits(again.forward(text[:1], n_past=n, rows="all").logits)
    yield np.concatenate([last, extend(again, text[1:])])
    saved, loaded = after(model, source), model.session(N_CTX)
    half = extend(saved, text[:8])
    loaded.load(saved.save(), n + 8)
    yield np.concatenate([half, extend(loaded, text[8:])])
    loaded.load(after(model, source).save(), n)
    yield extend(loaded, text)
    together = [after(model, source), after(model, OTHER)]
    rows = [RowGroup(text), RowGroup(text[:5])]
    items = [ForwardItem(s, s.n_cached, (row,), "all") for s, row in zip(together, rows, strict=True)]
    yield bits(model.forward(items)[0].logits)
    half = extend(again := after(model, source), text[:4])
    tree = np.repeat(text[4:], 2)  # each token twice; the second one of a pair goes on
    parents = np.array([i - 1 - (i % 2 == 0) if i > 1 else -1 for i in range(len(tree))], np.int32)
    parents[2::2] = np.arange(1, len(tree) - 2, 2)
    parents[3::2] = np.arange(1, len(tree) - 2, 2)
    item = ForwardItem(again, n + 4, (RowGroup(tree, sees=parents),), "all")
    logits = again.evaluate(item).logits
    yield np.concatenate([half, bits(logits[1::2])])
    again.keep(np.arange(1, len(tree), 2, dtype=np.int32))
    assert (bits(again.forward(text[-1:], n_past=n + len(text) - 1).logits)[0] == bits(logits)[-1]).all()


@pytest.mark.parametrize(
    "isa", [pytest.param(isa, marks=SLOW if isa != instruction_sets()[0] else ()) for isa in instruction_sets()]
)
def test_bits(path: Path, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same bits by steps, pieces, trees, forks, saved states, beside others and on two threads."""
    monkeypatch.setenv("EDGEDEC_CPU_ISA", isa)
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=1)) as model:
        expected = extend(after(model, SOURCE), TEXT)
        for number, found in enumerate(ways(model, SOURCE, TEXT)):
            assert (found == expected).all(), number
    with Cpu().load(path, LoadOptions(n_ctx=N_CTX, n_threads=2)) as model:
        assert all((found == expected).all() for found in ways(model, SOURCE, TEXT))


def test_what_is_refused(path: Path, model: Model, tmp_path: Path) -> None:
    """By name: a long source, logits of a source, a tree in it, states of no source, and other runtimes."""
    session = after(model, SOURCE)
    with pytest.raises(
        PromptTooLongError, match=r"takes 65 tokens or more; the encoder of this model reads 64 at most"
    ):
        session.forward(sourced(25), n_past=40)
    with pytest.raises(CapabilityError, match="the prompt, whose tokens have no probabilities"):
        session.forward(SOURCE, n_past=0, rows="all")
    for tokens, parents in ((TEXT, None), (SOURCE, np.arange(-1, len(SOURCE) - 1, dtype=np.int32))):
        with pytest.raises(RequestError, match="begins behind a prompt of at least one token"):
            session.evaluate(ForwardItem(session, 0, (RowGroup(tokens, sees=parents),)))
    assert (extend(session, TEXT) == extend(after(model, SOURCE), TEXT)).all()
    data = bytearray(session.save())
    data[68:72] = b"\xff" * 4
    with pytest.raises(ModelFormatError, match="no source in front of its text"):
        session.load(bytes(data), session.n_cached)
    for runtime in (LlamaCpp(), Reference()):
        assert "the cpu runtime" in str(runtime.accepts(path))
    odd: dict[str, tuple[TinyT5, dict[str, int]]] = {
        "of 2 layers of a decoder, expected 9": (SMALL, {"t5.decoder_block_count": 9}),
        "of 32 ranges of distances, expected 30": (SMALL, {"t5.attention.relative_buckets_count": 30}),
        "30 ranges of distances are no multiple of 4 up to 128": (replace(SMALL, n_buckets=30), {}),
        "its decoder begins with token 999, and it has 108": (SMALL, {"t5.decoder_start_token_id": 999}),
    }
    for number, (message, (shape, more)) in enumerate(odd.items()):
        assert message in str(Cpu().accepts(shape.write(tmp_path / f"{number}.gguf", more)))


def test_the_memory_plan(path: Path) -> None:
    """Cross-attention takes no places of its own: those of the three layers that the longer side has."""
    terms = {term.name: term for term in Cpu().plan(path, LoadOptions(n_ctx=128, prompt_cache_bytes=1 << 30))}
    assert terms["KV cache"].n_bytes == 128 * 3 * 2 * 3 * 32 * 2
    assert terms["KV cache"].detail == "128 tokens of source and text × 1"
    assert "prompt cache" not in terms
    long = SMALL.write(path, {"t5.context_length": 700})
    plan = Cpu().plan(long, LoadOptions(n_ctx=900, prompt_cache_bytes=1 << 30))
    assert {term.name: term.n_bytes for term in plan}["prompt cache"] == 4 * (700 + 64) * (3 * 2 * 3 * 32 * 2 + 12)


def llama_logits(path: Path, source: Sequence[int], text: Sequence[int]) -> NDArray[np.float64]:
    """Return float64[len(text), n_vocab], what llama.cpp makes of a text behind a source."""
    import llama_cpp as api

    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    context = api.llama_init_from_model(model, params)
    try:
        for evaluate, tokens in ((api.llama_encode, source), (api.llama_decode, text)):
            batch = api.llama_batch_init(len(tokens), 0, 1)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            batch.n_tokens = len(tokens)
            assert evaluate(context, batch) == 0
            api.llama_batch_free(batch)
        pointers = [api.llama_get_logits_ith(context, i) for i in range(len(text))]
        return np.array([pointer[: len(TOKENS)] for pointer in pointers], np.float64)
    finally:
        api.llama_free(context)
        api.llama_model_free(model)


def divergence(logits: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Return the mean KL divergence of the expected distributions to others."""

    def logs(x: NDArray[Any]) -> NDArray[np.float64]:
        below: NDArray[np.float64] = x.astype(np.float64)
        below -= below.max(-1, keepdims=True)
        below -= np.log(np.exp(below).sum(-1, keepdims=True))
        return below

    p, q = logs(expected), logs(logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", ["v1.1", "halves"])
def test_llama_cpp(tmp_path: Path, name: str) -> None:
    """Its logits are ours, and no nearer to those of float64."""
    pytest.importorskip("llama_cpp")
    shape, source, text = SHAPES[name], sourced(150), begun(ids(60, 4))
    path = shape.write(tmp_path / "t5.gguf")
    theirs = llama_logits(path, source.tolist(), text.tolist())
    with Cpu().load(path, LoadOptions(n_ctx=600, max_rows=64)) as model:
        session = model.session(600)
        session.forward(source, n_past=0)
        ours = session.forward(text, n_past=len(source), rows="all").logits
    expected = t5_logits(shape, shape.weights(), source.tolist(), text.tolist())
    assert distance(ours, theirs) < 1e-2
    assert divergence(ours, expected) <= divergence(theirs, expected)

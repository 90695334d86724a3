"""Rows of tokens that see each other: the runtimes agree on them, and a row has its bits however it is asked for.

Bounds are those of tests/runtimes/cpu/test_logits.py. llama.cpp evaluates the models whose rows all see each other.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_quantized import DIFFUSION, Tiny, write_tiny
from support.models.tiny_runs import bits

from edgedec.errors import CapabilityError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, RowGroup
from edgedec.pictures import Block
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

N = 40
TOKENS = np.random.default_rng(1).integers(4, 260, N).astype(np.int32)
REFERENCE_BOUND, LLAMACPP_BOUND = 2.5e-4, 2.5e-3
BLOCKS = {"tokenizer.ggml.mask_token_id": 3, "diffusion.block_size": 8, "diffusion.shift_logits": False}


def grid(n: int) -> Block:
    """Return blocks of `n` positions."""
    return Block(n, 1, 1, mutual=True)


def rows(runtime: Cpu | Reference, path: Path, size: int, n_threads: int = 1) -> NDArray[np.float32]:
    """Return the logits of all rows of TOKENS in blocks."""
    with runtime.load(path, LoadOptions(n_ctx=64, n_threads=n_threads)) as model:
        return evaluated(model.session(64), 0, RowGroup(TOKENS, sees=grid(size)), rows="all").logits.copy()


def distance(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the root mean square of the differences over that of the expected values around their mean."""
    exact = expected.astype(np.float64)
    return float(np.sqrt(np.square(found - exact).mean() / exact.var()))


def of_llama_cpp(path: Path) -> NDArray[np.float32]:
    """Return llama.cpp's logits of all rows of TOKENS, which all see each other."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    context = llama_cpp.llama_init_from_model(model, options)
    llama_cpp.llama_set_causal_attn(context, False)
    batch = llama_cpp.llama_batch_init(N, 0, 1)
    for i, token in enumerate(TOKENS.tolist()):
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
        found, exact = rows(Cpu(), path, size), rows(Reference(), path, size)
        assert distance(found, exact) < REFERENCE_BOUND
    if name != "qwen3":
        assert distance(found, of_llama_cpp(path)) < LLAMACPP_BOUND
        assert distance(rows(Cpu(), path, 8), of_llama_cpp(path)) > 0.05


def test_bits_are_those_of_any_forward(tmp_path: Path) -> None:
    """On any number of threads, block by block, with some rows wanted, and beside another session's rows."""
    path = write_tiny(
        tmp_path / "m.gguf", Tiny("qwen3", types=("Q4_K", "Q6_K"), n_head=8, head_dim=32), metadata=BLOCKS
    )
    expected = bits(rows(Cpu(), path, 8))
    assert (bits(rows(Cpu(), path, 8, n_threads=3)) == expected).all()
    with Cpu().load(path, LoadOptions(n_ctx=64, n_threads=2)) as model:
        session, other = model.session(64), model.session(64)
        for begin, end in ((0, 8), (8, 24), (24, N)):
            found = evaluated(session, begin, RowGroup(TOKENS[begin:end], sees=grid(8)), rows="all").logits
            assert (bits(found) == expected[begin:end]).all()
        wanted = np.array([1, 6], np.int32)
        assert (
            bits(evaluated(session, 16, RowGroup(TOKENS[16:24], sees=grid(8)), rows=wanted).logits)
            == expected[[17, 22]]
        ).all()
        other.forward(TOKENS[:5], n_past=0)
        items = [
            ForwardItem(other, 5, (RowGroup(TOKENS[5:9]),), rows="all"),
            ForwardItem(session, 8, (RowGroup(TOKENS[8:16], sees=grid(8)),), rows="all"),
        ]
        causal, mutual = model.forward(items)
        assert (bits(mutual.logits) == expected[8:16]).all()
        assert (
            bits(causal.logits) == bits(model.session(64).forward(TOKENS[:9], n_past=0, rows="all").logits[5:])
        ).all()


def test_what_is_no_block_is_refused(tmp_path: Path) -> None:
    """Nothing is evaluated then; llama.cpp's runtime refuses such rows of any model."""
    path = write_tiny(tmp_path / "m.gguf", Tiny())
    for runtime in (Cpu(), Reference()):
        with runtime.load(path, LoadOptions(n_ctx=300)) as model:
            session = model.session(300)
            for block in (Block(8, 1, 1), Block(0, 1, 1, mutual=True), Block(-8, 1, 1, mutual=True)):
                with pytest.raises(RequestError):
                    evaluated(session, 0, RowGroup(TOKENS, sees=block))
            with pytest.raises(CapabilityError):
                evaluated(session, 0, RowGroup(np.zeros(257, np.int32), sees=grid(8)))
            assert session.n_cached == 0
    with LlamaCpp().load(path, LoadOptions(n_ctx=64)) as model, pytest.raises(CapabilityError):
        evaluated(model.session(64), 0, RowGroup(TOKENS, sees=grid(8)))

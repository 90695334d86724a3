"""Gemma 4: its networks beside float64, what a file may leave out, and what is refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.gemma4_truth import Truth, tensors_of
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(2).integers(0, 260, 40).astype(np.int32)
SMALL, MIXED = ARCHITECTURES["gemma4"], ARCHITECTURES["gemma4-moe"]
KINDS = {
    "small": SMALL,
    "mixture": MIXED,
    "plain": replace(SMALL, n_shared=0, n_per_layer=0),
    "values of keys": replace(SMALL, n_shared=0, n_per_layer=0, keys_as_values=True),
}


def logits(runtime: Runtime, path: Path, kv_type: str = "f16") -> NDArray[np.float64]:
    """Return the logits of all rows of TOKENS."""
    with runtime.load(path, LoadOptions(n_ctx=64, n_threads=1, max_rows=64, kv_type=kv_type)) as model:
        return model.session(64).forward(TOKENS, n_past=0, rows="all").logits.astype(np.float64)


def truth(path: Path, tiny: Tiny) -> NDArray[np.float64]:
    """Return the same in float64."""
    sliding = tuple(tiny.slides(i) for i in range(tiny.n_layer))
    n_own = tiny.n_layer - tiny.n_shared
    of = Truth(tensors_of(read_gguf(path)), tiny.n_head, sliding, tiny.sliding_window, n_own, tiny.n_expert_used, 1e-5)
    return of(TOKENS.tolist())


def distance(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the root mean square of the differences over that of the expected values around their mean."""
    return float(np.sqrt(np.square(found - expected).mean() / expected.var()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_nearer_to_float64_than_llamacpp(tmp_path: Path, name: str, seed: int) -> None:
    """Both keep keys and values as float16; llama.cpp also rounds GELU to it. With float32 for both, little is left."""
    tiny = replace(KINDS[name], seed=seed)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = truth(path, tiny)
    ours, theirs = distance(logits(Cpu(), path), expected), distance(logits(LlamaCpp(), path), expected)
    assert ours <= theirs
    assert ours < 1e-3
    assert distance(logits(Reference(), path, "f32"), expected) < 2e-6

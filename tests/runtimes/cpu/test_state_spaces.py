"""Models with Mamba-2 mixers: their logits are at least as near to those without rounding as llama.cpp's are.

Both keep keys and values as float16 where a layer has attention, which is what most of the difference comes from.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.hybrid_forms import exact_logits
from support.models.state_spaces import StateSpace
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.load_options import LoadOptions
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 260, 24).astype(np.int32)
NAMES = [name for name, tiny in ARCHITECTURES.items() if tiny.parts]
FLOAT32 = 3e-6  # how far apart two ways of summing are


def logits(runtime: Runtime, path: Path) -> NDArray[np.float64]:
    """Return the logits of all rows of TOKENS."""
    with runtime.load(path, LoadOptions(n_ctx=64, n_threads=1, max_rows=64)) as model:
        return model.session(64).forward(TOKENS, n_past=0, rows="all").logits.astype(np.float64)


def distance(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the root mean square of the differences over the spread of what is expected."""
    return float(np.sqrt(np.square(found - expected).mean() / expected.var()))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_as_near_to_the_exact_logits_as_llamacpp(tmp_path: Path, name: str, seed: int) -> None:
    """With every instruction set, and the reference runtime; the exact logits are sums in float64."""
    tiny = replace(ARCHITECTURES[name], seed=seed)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = exact_logits(tiny, TOKENS.tolist())
    bound = max(distance(logits(LlamaCpp(), path), expected), FLOAT32)
    assert distance(logits(Reference(), path), expected) <= bound
    for isa in instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEDEC_CPU_ISA", isa)
            assert distance(logits(Cpu(), path), expected) <= bound, isa


@pytest.mark.parametrize(
    "space",
    [
        StateSpace(n_inner=1280, n_head=16, n_state=24, n_group=4),  # heads of 80, as Nemotron Nano 9B has them
        StateSpace(n_inner=256, n_head=2, n_state=7),
        StateSpace(n_inner=512, n_head=32, n_state=1, n_group=32, length=2),
    ],
)
def test_odd_sizes(tmp_path: Path, space: StateSpace) -> None:
    """Heads that fill no whole tile, states of an odd length, a group for each head, another convolution."""
    tiny = replace(ARCHITECTURES["nemotron_h"], space=space)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = exact_logits(tiny, TOKENS.tolist())
    assert distance(logits(Cpu(), path), expected) <= 2e-3
    assert distance(logits(Reference(), path), expected) <= 2e-3

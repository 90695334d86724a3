"""Logits of networks with gated delta rules are as near to float64 as llama.cpp's, and no part of the formulas is free.

Both runtimes keep keys and values as float16, which is most of their distance from float64.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.delta_form import DeltaForm
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.load_options import LoadOptions
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 260, 100).astype(np.int32)
_SECTIONS = (("rope.dimension_sections", np.array([2, 1, 1, 0], np.int32)),)  # llama.cpp wants them
NARROW = Tiny("qwen35", n_layer=5, n_embd=64, head_dim=16, n_head=4, n_head_kv=1, n_ff=96, n_rot=8, keys=_SECTIONS)
SHAPES = {
    **{name: ARCHITECTURES[name] for name in ("qwen35", "qwen35moe", "qwen3next")},
    # heads of which no 32 lanes are full, and one key for all of them; the last layer has a state
    "one key": replace(NARROW, recurrent=(0, 2, 4), n_state_head=6, n_state_key_head=1, n_state=16),
    "wide": replace(NARROW, recurrent=(0, 1, 3), n_state_head=3, n_state_key_head=3, n_state=80),
}


def logits(runtime: Runtime, path: Path) -> NDArray[np.float64]:
    """Return the logits of all rows of TOKENS."""
    with runtime.load(path, LoadOptions(n_ctx=128, n_threads=1, max_rows=128)) as model:
        return model.session(128).forward(TOKENS, n_past=0, rows="all").logits.astype(np.float64)


def distance(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the root mean square of the differences over that of the expected values around their mean."""
    return float(np.sqrt(np.square(found - expected).mean() / expected.var()))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("name", SHAPES)
def test_as_near_to_float64_as_llamacpp(tmp_path: Path, name: str, seed: int) -> None:
    """Random models of several shapes; the distance to llama.cpp itself is of the same size."""
    path = write_tiny(tmp_path / "m.gguf", replace(SHAPES[name], seed=seed))
    form = DeltaForm(path)
    expected = np.array([form.logits(int(token)) for token in TOKENS])
    ours, theirs = logits(Cpu(), path), logits(LlamaCpp(), path)
    assert distance(ours, expected) <= 1.05 * distance(theirs, expected)
    assert distance(ours, expected) < 1e-3

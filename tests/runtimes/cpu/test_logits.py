"""Logits of tiny random models on the cpu runtime agree with llama.cpp's, and with the reference where that reads them.

Bounds are on the root mean square of the differences over that of the logits. Measured over all rows of all models
here: 2.1e-4 against the reference on floats (both keep keys and values as float16), 1.7e-3 on F32 and F16 against
llama.cpp (which also computes attention in float16: it is as far from the reference); where activations are
rounded to int8, by both, 0.02 where they are rounded alike, and 0.05 where llama.cpp rounds 256 together.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.models.code_paths import CODE_PATHS, each_architecture
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, WINDOWED_EXAONE4, Tiny, write_tiny
from support.models.tiny_runs import all_logits, distance

from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(1).integers(0, 260, 48).astype(np.int32)
REFERENCE_BOUND = 2.5e-4
BOUNDS = {"F32": 2.5e-3, "F16": 2.5e-3, "BF16": 1e-2}
INT8_BOUND, ROUNDED_TOGETHER_BOUND = 0.04, 0.08  # for blocks of 32 weights, and of 256
STATES_BOUND = 0.15  # recurrent states add up what is rounded; test_divergence.py tells who is nearer to floats
logits = partial(all_logits, tokens=TOKENS)


def odd_rows(tiny: Tiny) -> int:
    """Return in how many rows llama.cpp, which rounds otherwise, may go through another expert at a near-tie."""
    return 8 if tiny.n_expert else 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_floats_agree_with_llamacpp(tmp_path: Path, name: str) -> None:
    """Models of every architecture whose matrices are F32 and F16 in turn."""
    tiny = replace(ARCHITECTURES[name], types=("F32", "F16"), dealt=True)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    assert distance(logits(Cpu(), path), logits(LlamaCpp(), path), odd_rows(tiny)) < BOUNDS["F32"]


def test_exaone4_with_windows_agrees_with_llamacpp(tmp_path: Path) -> None:
    """Its layers that see everything do not rotate. What halves round adds up: to 2.7e-4, and 2.8e-3."""
    path = write_tiny(tmp_path / "m.gguf", WINDOWED_EXAONE4)
    assert distance(logits(Cpu(), path), logits(Reference(), path)) < 2 * REFERENCE_BOUND
    assert distance(logits(Cpu(), path), logits(LlamaCpp(), path)) < 2 * BOUNDS["F32"]


@pytest.mark.parametrize("name", each_architecture())
def test_mixed_types_agree_with_llamacpp(tmp_path: Path, name: str) -> None:
    """Models with matrices of all types side by side."""
    tiny = replace(ARCHITECTURES[name], types=TILE_TYPES)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    bound = STATES_BOUND if tiny.recurrent or tiny.parts else ROUNDED_TOGETHER_BOUND
    assert distance(logits(Cpu(), path), logits(LlamaCpp(), path), odd_rows(tiny)) < bound


@pytest.mark.parametrize("kind", TILE_TYPES)
def test_every_type_agrees_with_llamacpp(tmp_path: Path, kind: str) -> None:
    """All matrices of the one type, with every instruction set here."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(types=(kind,), seed=2))
    expected = logits(LlamaCpp(), path)
    bound = BOUNDS.get(kind, INT8_BOUND if GGMLType[kind].block_size == 32 else ROUNDED_TOGETHER_BOUND)
    for name in instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEDEC_CPU_ISA", name)
            assert distance(logits(Cpu(), path), expected) < bound, name


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(types=("F16",), tied=True, n_head_kv=1),
        Tiny(types=("F32", "F16"), n_head_kv=4),
        Tiny(biases=True, head_dim=128),
        Tiny("qwen2", n_head=8, n_head_kv=4, head_dim=32),
        Tiny(n_embd=80, n_ff=50, n_head=5, n_head_kv=5, head_dim=16),
        Tiny(n_embd=48, n_ff=17, n_head=3, n_head_kv=1, head_dim=48, tied=True),
        *ARCHITECTURES.values(),
        *(replace(ARCHITECTURES[name], sliding_window=5, seed=9) for name in ("gemma2", "gemma3")),
        replace(ARCHITECTURES["phi3"], keys=(("attention.sliding_window", 9),), types=("F32", "F16")),
        replace(ARCHITECTURES["granite"], keys=(*ARCHITECTURES["granite"].keys, ("rope.scaling.finetuned", False))),
    ],
)
def test_floats_agree_with_the_reference(tmp_path: Path, tiny: Tiny) -> None:
    """To float32's rounding, as keys and values are rounded alike; widths need not fit a vector.

    Instruction sets are all asked for what CODE_PATHS has, and for the odd widths.
    """
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = logits(Reference(), path)
    is_repeat = tiny in [ARCHITECTURES[name] for name in ARCHITECTURES.keys() - CODE_PATHS.keys()]
    for name in instruction_sets()[: 1 if is_repeat else None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEDEC_CPU_ISA", name)
            assert distance(logits(Cpu(), path), expected) < REFERENCE_BOUND, name


def test_a_sliding_window_hides_what_lies_behind_it(tmp_path: Path) -> None:
    """With a window as long as the text gemma3's logits are others; up to the window's length they are the same."""
    tiny = replace(ARCHITECTURES["gemma3"], sliding_window=8)
    short = logits(Cpu(), write_tiny(tmp_path / "short.gguf", tiny))
    long = logits(Cpu(), write_tiny(tmp_path / "long.gguf", replace(tiny, sliding_window=64)))
    np.testing.assert_array_equal(short[:8], long[:8])
    assert (short[8:] != long[8:]).any(axis=1).all()

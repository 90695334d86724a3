"""On quantized models and on networks with states the cpu runtime is as close to exact numbers as llama.cpp, or closer.

The quantized models are random, with logits as sharp as a chat model's. Their weights as floats, evaluated by the
reference runtime, give p; of a runtime's q the tests take the Kullback-Leibler divergence of p, and the most probable
token. Which of two runtimes rounds one small model better is chance, so those of several seeds count together. Where
two experts of a mixture have nearly the same score, rounding decides through which a token goes. Such rows diverge by
0.03 to 0.09, others by 0.003, and which runtime has more of them is chance, too: so the farthest rows do not count.

Networks with states are compared with float64. Both runtimes keep keys and values as float16, which is most of their
distance from it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.code_paths import each_architecture
from support.models.exact_networks import DeltaForm, exact_logits
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.state_spaces import StateSpace
from support.models.tiny_quantized import ARCHITECTURES, EXPORTED_TYPES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.models.tiny_runs import all_logits, distance

from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.runtime import Runtime
from edgedec_runtimes.cpu.library import instruction_sets
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.weights.levels import dequantize

pytestmark = pytest.mark.slow


ROWS_READ = np.random.default_rng(11).integers(0, 260, 40).astype(np.int32)
SMALL_SEEDS, LARGE_SEEDS = range(21, 25), (22,)
SHARPNESS = 2.0  # what the last norm is multiplied by
ODD = 20  # one row in so many may go through another expert, or meet what rounding has added up in a state
CHANCE, CHANCE_OF_STATES = 1.05, 1.25  # where both round alike
NEAR_TIE = 0.3  # between the two greatest probabilities; of 6,480 rows both runtimes turned some with gaps up to 0.26

F64 = NDArray[np.float64]


def log_probabilities(runtime: Runtime, path: Path) -> F64:
    """Return f64[n, n_vocab], the logarithms of the probabilities behind every token of ROWS_READ."""
    options = LoadOptions(n_ctx=128, n_threads=1, max_rows=128)
    with runtime.load(path, options) as model:
        logits = model.session(128).forward(ROWS_READ, n_past=0, rows="all").logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def as_floats(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Return the same tensors with every matrix as F32."""
    found = {}
    for name, tensor in tensors.items():
        rows = np.frombuffer(tensor.data, np.uint8).reshape(math.prod(tensor.shape[1:]), -1)
        values = dequantize(GGMLType(tensor.type), rows).astype(np.float32)
        found[name] = RawTensor(GGMLType.F32, tensor.shape, values.tobytes())
    return found


def write_pair(folder: Path, tiny: Tiny) -> tuple[Path, Path]:
    """Write a quantized model and the same with float weights."""
    metadata: dict[str, Any] = tiny_metadata(tiny)
    tensors = dict(tiny_tensors(tiny))
    for name in tensors:
        is_post_norm = ".post_" in name and tiny.architecture.startswith("gemma")  # or embeddings outweigh the layers
        is_last = name in ("output_norm.weight", "token_embd_norm.weight")
        factor = SHARPNESS if is_last else 4.0 if is_post_norm else 1.0
        if factor != 1.0:
            norm = np.frombuffer(tensors[name].data, "<f4") * np.float32(factor)
            tensors[name] = RawTensor(GGMLType.F32, norm.shape, norm.tobytes())
    quantized = write_gguf(folder / "quantized.gguf", metadata, tensors)
    return quantized, write_gguf(folder / "floats.gguf", metadata, as_floats(tensors))


def divergence(p: F64, q: F64, n_odd: int) -> float:
    """Return the mean divergence of p from q over the rows, without the n_odd rows that diverge most."""
    rows = np.sort((np.exp(p) * (p - q)).sum(-1))
    return float(rows[: len(rows) - n_odd].mean())


def resized(tiny: Tiny) -> Tiny:
    """Return a model with wider layers, of the types that files have most."""
    wide = replace(tiny, n_head=2 * tiny.n_head, n_head_kv=2 * tiny.n_head_kv)
    space = replace(tiny.space, n_inner=2 * tiny.space.n_inner, n_head=2 * tiny.space.n_head)
    return replace(wide, n_embd=512, n_ff=768, n_ff_expert=512, space=space, types=("Q4_K", "Q5_K", "Q6_K"))


@pytest.mark.parametrize("name", each_architecture())
def test_small_models_are_as_close_to_the_floats_as_llamacpps(tmp_path: Path, name: str) -> None:
    """The divergence is llama.cpp's at most, but for chance; near-ties apart, the most probable token is the same."""
    check(tmp_path, name, large=False)


@pytest.mark.parametrize("name", each_architecture(short=("llama", "gemma2", "gpt-oss", "lfm2", "mamba2", "qwen35moe")))
def test_wider_models_are_as_close_to_the_floats_as_llamacpps(tmp_path: Path, name: str) -> None:
    """The same with the types that files have most; they are rounded by kernels that architectures share."""
    check(tmp_path, name, large=True)


def check(tmp_path: Path, name: str, *, large: bool) -> None:
    """Compare the two runtimes on an architecture."""
    tiny = replace(ARCHITECTURES[name], types=EXPORTED_TYPES)
    found = []
    for seed in LARGE_SEEDS if large else SMALL_SEEDS:
        quantized, floats = write_pair(tmp_path, replace(resized(tiny) if large else tiny, seed=seed))
        runs = ((Reference(), floats), (Cpu(), quantized), (LlamaCpp(), quantized))
        found.append([log_probabilities(runtime, path) for runtime, path in runs])
    p, ours, theirs = (np.concatenate(rows) for rows in zip(*found, strict=True))
    first_two = np.sort(np.exp(p), axis=-1)[:, -2:]
    clear = first_two[:, 1] - first_two[:, 0] > NEAR_TIE
    has_states = bool(tiny.recurrent or tiny.parts)
    n_odd = len(p) // ODD if tiny.n_expert or has_states else 0
    # Through six layers with experts, a row may go to another one at a near-tie, and change its mind. In a state, what
    # rounding did to rows before adds up.
    most = n_odd if name == "gemma4-moe" or has_states else 0
    assert (ours.argmax(-1)[clear] != p.argmax(-1)[clear]).sum() <= most
    assert clear.sum() > len(p) // 4
    assert 0.3 < -(np.exp(p) * p).sum(-1).mean() < 2.2  # the entropy of a chat model, in nats
    chance = CHANCE_OF_STATES if has_states else CHANCE
    assert divergence(p, ours, n_odd) <= chance * divergence(p, theirs, n_odd)


TOKENS = np.random.default_rng(1).integers(0, 260, 100).astype(np.int32)
_SECTIONS = (("rope.dimension_sections", np.array([2, 1, 1, 0], np.int32)),)  # llama.cpp wants them
NARROW = Tiny("qwen35", n_layer=5, n_embd=64, head_dim=16, n_head=4, n_head_kv=1, n_ff=96, n_rot=8, keys=_SECTIONS)
SHAPES = {
    **{name: ARCHITECTURES[name] for name in ("qwen35", "qwen35moe", "qwen3next")},
    # heads of which no 32 lanes are full, and one key for all of them; the last layer has a state
    "one key": replace(NARROW, recurrent=(0, 2, 4), n_state_head=6, n_state_key_head=1, n_state=16),
    "wide": replace(NARROW, recurrent=(0, 1, 3), n_state_head=3, n_state_key_head=3, n_state=80),
}


logits = partial(all_logits, tokens=TOKENS)


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


SPACE_TOKENS = np.random.default_rng(1).integers(0, 260, 24).astype(np.int32)
NAMES = [name for name, tiny in ARCHITECTURES.items() if tiny.parts]
FLOAT32 = 3e-6  # how far apart two ways of summing are
space_logits = partial(all_logits, tokens=SPACE_TOKENS)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_as_near_to_the_exact_logits_as_llamacpp(tmp_path: Path, name: str, seed: int) -> None:
    """With every instruction set, and the reference runtime; the exact logits are sums in float64."""
    tiny = replace(ARCHITECTURES[name], seed=seed)
    path = write_tiny(tmp_path / "m.gguf", tiny)
    expected = exact_logits(tiny, SPACE_TOKENS.tolist())
    bound = max(distance(space_logits(LlamaCpp(), path), expected), FLOAT32)
    assert distance(space_logits(Reference(), path), expected) <= bound
    for isa in instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEDEC_CPU_ISA", isa)
            assert distance(space_logits(Cpu(), path), expected) <= bound, isa


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
    expected = exact_logits(tiny, SPACE_TOKENS.tolist())
    assert distance(space_logits(Cpu(), path), expected) <= 2e-3
    assert distance(space_logits(Reference(), path), expected) <= 2e-3

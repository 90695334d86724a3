"""On quantized models of every architecture the cpu runtime is as close to the floats as llama.cpp is, or closer.

The models are random, with logits as sharp as a chat model's. Their weights as floats, evaluated by the reference
runtime, give p; of a runtime's q the tests take the Kullback-Leibler divergence of p, and the most probable token.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.gguf_writer import RawTensor, write_gguf
from support.tiny_quantized import ARCHITECTURES, EXPORTED_TYPES, Tiny, tiny_metadata, tiny_tensors

from edgedec.gguf.levels import dequantize
from edgedec.gguf.tensor_types import GGMLType
from edgedec.model import LoadOptions, Runtime
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(11).integers(0, 260, 60).astype(np.int32)
SHARPNESS = 2.0  # what the last norm is multiplied by
NEAR_TIE = 0.25  # between the two greatest probabilities; both runtimes turn tokens round up to gaps of 0.19

F64 = NDArray[np.float64]


def log_probabilities(runtime: Runtime, path: Path) -> F64:
    """Return f64[n, n_vocab], the logarithms of the probabilities behind every token of TOKENS."""
    options = LoadOptions(n_ctx=128, n_threads=1, max_rows=128)
    with runtime.load(path, options) as model:
        logits = model.session(128).forward(TOKENS, n_past=0, rows="all").logits.astype(np.float64)
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


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_as_close_to_the_floats_as_llamacpp(tmp_path: Path, name: str, large: bool) -> None:
    """The divergence is not above llama.cpp's, and the most probable token is the same but for near-ties."""
    tiny = replace(ARCHITECTURES[name], types=EXPORTED_TYPES, seed=21)
    if large:
        tiny = replace(tiny, n_head=2 * tiny.n_head, n_head_kv=2 * tiny.n_head_kv)
        tiny = replace(tiny, n_embd=512, n_ff=768, n_ff_expert=512, types=("Q4_K", "Q5_K", "Q6_K"), seed=22)
    quantized, floats = write_pair(tmp_path, tiny)
    p, ours, theirs = (
        log_probabilities(runtime, path)
        for runtime, path in ((Reference(), floats), (Cpu(), quantized), (LlamaCpp(), quantized))
    )
    divergence, their_divergence = ((np.exp(p) * (p - q)).sum(-1).mean() for q in (ours, theirs))
    first_two = np.sort(np.exp(p), axis=-1)[:, -2:]
    clear = first_two[:, 1] - first_two[:, 0] > NEAR_TIE
    np.testing.assert_array_equal(ours.argmax(-1)[clear], p.argmax(-1)[clear])
    assert clear.sum() > len(TOKENS) // 3
    assert 0.3 < -(np.exp(p) * p).sum(-1).mean() < 2.2  # the entropy of a chat model, in nats
    assert divergence <= their_divergence

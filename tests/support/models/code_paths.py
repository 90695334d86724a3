"""The tiny architectures with which tests of shared code run; those of all architectures are in the lane `long`.

The conformance suite, and comparisons with float64, the reference and llama.cpp, run with every architecture. How rows
are grouped, streamed, stored or shared out to threads is decided by kernels that architectures have in common, so one
member for each way through them finds what all would. tests/runtimes/architectures/test_architectures.py fails where an
architecture sets a switch, has a mixer or a kind of tensor that no member has.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from support.models.tiny_quantized import ARCHITECTURES

CODE_PATHS = {
    "llama": "attention and a feed-forward block, without more; neighbouring elements rotate",
    "gemma2": "soft caps of scores and logits, GELU, sliding windows of every other layer",
    "gemma4": "six layers, of which three read the keys of others; a part of each token's row for every layer",
    "gemma4-moe": "experts beside a feed-forward block, gates and ups in one matrix, values that are normed keys",
    "gpt-oss": "sinks, biases of everything, experts chosen before their softmax, a limit of gates",
    "hunyuan-dense": "norms of queries and keys behind the rotation",
    "lfm2": "short convolutions",
    "mamba2": "no attention, so that there are no keys",
    "minicpm-longrope": "scales of embeddings, residuals and logits; rotations of short and of long contexts",
    "mistral3": "queries that grow with their position",
    "nanbeige": "layers that are run twice, with a norm between",
    "falcon-h1": "a state space beside attention in one layer",
    "nemotron_h_moe": "layers with one part each: a state space, attention or experts without gates",
    "olmo2": "norms over all heads together, and none before a half-layer",
    "qwen35moe": "gated delta rules, gated attention and an expert for all tokens",
    "smallthinker": "a router before attention, and ReLU",
}
"""By name, what the way of this architecture through the code has of its own."""


def each_architecture(names: Iterable[str] = ARCHITECTURES, short: Collection[str] = CODE_PATHS) -> list[Any]:
    """Return a test's parameters: the names, of which those that `short` does not have are in the lane `long`."""
    long = (pytest.mark.slow, pytest.mark.long)
    return [pytest.param(name, marks=() if name in short else long) for name in names]

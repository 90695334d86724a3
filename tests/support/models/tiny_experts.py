"""The tensors of layers with a mixture of experts, and random vectors, of the models of tiny_quantized.py."""

from collections.abc import Callable

import numpy as np

from edgedec.gguf.tensor_types import GGMLType
from support.models.gguf_writer import RawTensor
from support.models.tiny_gemma4 import gate_and_up_together
from support.models.tiny_shapes import Tiny

DELTA = ("qwen35", "qwen35moe", "qwen3next")
"""Architectures with the gated delta rule."""
UNGATED = ("nemotron_h", "nemotron_h_moe", "blockffn")
"""Architectures whose feed-forward blocks have no gates."""


def random_vector(n: int, mean: float, rng: np.random.Generator) -> RawTensor:
    """Return a vector of numbers about a mean."""
    values = (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)
    return RawTensor(GGMLType.F32, (n,), values.tobytes())


def experts_of(tiny: Tiny, matrix: Callable[..., RawTensor], rng: np.random.Generator) -> dict[str, RawTensor]:
    """Return the tensors of a layer's experts."""
    n, n_embd, n_ff = tiny.n_expert, tiny.n_embd, tiny.n_ff_expert

    # Gates and ups of gpt-oss go beyond their bound of 7 now and then.
    wide, narrow = (2.0, 0.25) if tiny.architecture == "gpt-oss" else (1.0, 1.0)

    def stacked(n_out: int, n_in: int, gain: float) -> RawTensor:
        found = matrix(n * n_out, n_in, gain)
        return RawTensor(found.type, (n_in, n_out, n), found.data)

    # Scores so far apart that the last of a token's experts counts for little: which one it is may change by rounding.
    # Half of all sigmoids are near 1 then, so tokens of lfm2moe go through more experts than that.
    is_gemma = tiny.architecture == "gemma4"  # its routers read states over the root of their length
    router = (rng.standard_normal((n, n_embd)) * 4 / n_embd ** (0.0 if is_gemma else 0.5)).astype(np.float32)
    ins = ("up",) if tiny.architecture in UNGATED else ("gate", "up")
    found = {"ffn_gate_inp.weight": RawTensor(GGMLType.F32, (n_embd, n), router.tobytes())}
    found |= {f"ffn_{name}_exps.weight": stacked(n_ff, n_embd, wide) for name in ins}
    found["ffn_down_exps.weight"] = stacked(n_embd, n_ff, narrow)
    if tiny.n_ff_shared:
        found |= {f"ffn_{name}_shexp.weight": matrix(tiny.n_ff_shared, n_embd) for name in ins}
        found["ffn_down_shexp.weight"] = matrix(n_embd, tiny.n_ff_shared)
    if tiny.architecture == "gpt-oss":
        for name, width in (("gate_exps", n_ff), ("up_exps", n_ff), ("down_exps", n_embd), ("gate_inp", 1)):
            bias = (0.3 * rng.standard_normal(n * width)).astype(np.float32)
            shape = (width, n) if width > 1 else (n,)
            found[f"ffn_{name}.bias"] = RawTensor(GGMLType.F32, shape, bias.tobytes())
    if tiny.architecture in ("lfm2moe", "nemotron_h_moe"):
        found["exp_probs_b.bias"] = random_vector(n, 0.0, rng)
    if tiny.architecture in ("qwen2moe", *DELTA):
        found["ffn_gate_inp_shexp.weight"] = random_vector(n_embd, 0.0, rng)
    are_alike = is_gemma and found["ffn_gate_exps.weight"].type == found["ffn_up_exps.weight"].type
    return gate_and_up_together(found) if are_alike else found

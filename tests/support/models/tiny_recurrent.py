"""The tensors and metadata of layers with the gated delta rule (Yang et al. 2024, arXiv:2412.06464)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from edgedec.gguf.tensor_types import GGMLType
from support.models.gguf_writer import RawTensor
from support.models.tiny_experts import random_vector
from support.models.tiny_shapes import Tiny

_LENGTH = 4  # of the convolutions before recurrent states


def delta_keys(tiny: Tiny) -> dict[str, Any]:
    """Return the metadata of a model's recurrent layers, below the architecture's name."""
    return {
        "attention.recurrent_layers": [layer in tiny.recurrent for layer in range(tiny.n_layer)],
        "ssm.conv_kernel": _LENGTH,
        "ssm.state_size": tiny.n_state,
        "ssm.group_count": tiny.n_state_key_head,
        "ssm.time_step_rank": tiny.n_state_head,
        "ssm.inner_size": tiny.n_state_head * tiny.n_state,
    }


def delta_tensors(tiny: Tiny, matrix: Callable[..., RawTensor], rng: np.random.Generator) -> dict[str, RawTensor]:
    """Return the tensors of a layer with the gated delta rule but for its norms."""
    n_head, n_values = tiny.n_state_head, tiny.n_state_head * tiny.n_state
    n_column = 2 * tiny.n_state_key_head * tiny.n_state + n_values
    kernels = (rng.standard_normal(n_column * _LENGTH) / _LENGTH**0.5).astype(np.float32)
    rates = -np.exp(rng.standard_normal(n_head)).astype(np.float32)
    joined = {"ssm_ba.weight": matrix(2 * n_head, tiny.n_embd)}
    apart = {f"ssm_{name}.weight": matrix(n_head, tiny.n_embd) for name in ("alpha", "beta")}
    return {
        "attn_qkv.weight": matrix(n_column, tiny.n_embd, 1.5),
        "attn_gate.weight": matrix(n_values, tiny.n_embd),
        **(joined if tiny.architecture == "qwen3next" else apart),
        "ssm_out.weight": matrix(tiny.n_embd, n_values),
        "ssm_conv1d.weight": RawTensor(GGMLType.F32, (_LENGTH, n_column), kernels.tobytes()),
        "ssm_dt.bias": random_vector(n_head, 0.0, rng),
        "ssm_a": RawTensor(GGMLType.F32, (n_head,), rates.tobytes()),
        "ssm_norm.weight": random_vector(tiny.n_state, 0.3, rng),  # calm, as small results are normed, too
    }

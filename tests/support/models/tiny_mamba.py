"""A random tiny recurrent model (mamba) that llama.cpp loads: its state can't be rolled back."""

from pathlib import Path
from typing import Any

import numpy as np

from support.models.gguf_writer import write_gguf
from support.models.tiny_models import N_VOCAB, vocabulary

_N_EMBD, _D_INNER, _D_STATE, _D_CONV, _DT_RANK = 32, 64, 16, 4, 2


def tiny_mamba(path: Path, *, n_layer: int = 2, seed: int = 0) -> Path:
    """Write the model and return its path."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> Any:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    metadata = {
        "general.architecture": "mamba",
        "general.name": "tiny mamba",
        "mamba.context_length": 256,
        "mamba.embedding_length": _N_EMBD,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.block_count": n_layer,
        "mamba.ssm.conv_kernel": _D_CONV,
        "mamba.ssm.inner_size": _D_INNER,
        "mamba.ssm.state_size": _D_STATE,
        "mamba.ssm.time_step_rank": _DT_RANK,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
    } | vocabulary(N_VOCAB)
    tensors = {"token_embd.weight": random(N_VOCAB, _N_EMBD) * 10, "output_norm.weight": np.ones(_N_EMBD, np.float32)}
    for layer in range(n_layer):
        block = f"blk.{layer}."
        tensors |= {
            block + "attn_norm.weight": np.ones(_N_EMBD, np.float32),
            block + "ssm_in.weight": random(2 * _D_INNER, _N_EMBD),
            block + "ssm_conv1d.weight": random(_D_INNER, _D_CONV),
            block + "ssm_conv1d.bias": random(_D_INNER),
            block + "ssm_x.weight": random(_DT_RANK + 2 * _D_STATE, _D_INNER),
            block + "ssm_dt.weight": random(_D_INNER, _DT_RANK),
            block + "ssm_dt.bias": random(_D_INNER),
            block + "ssm_a": -np.abs(random(_D_INNER, _D_STATE)),
            block + "ssm_d": random(_D_INNER),
            block + "ssm_out.weight": random(_N_EMBD, _D_INNER),
        }
    return write_gguf(path, metadata, tensors)

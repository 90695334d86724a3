"""What tiny models of gemma4 have beside those of other architectures (tiny_quantized.py)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import ValueType
from edgedec.gguf.tensor_types import GGMLType
from support.models.gguf_writer import RawTensor, Typed

Matrix = Callable[..., RawTensor]
# llama.cpp rounds GELU to float16; with larger norms, what that changes grows from layer to layer.
MEANS = {
    **dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), 0.2),
    **dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), 0.5),
    "layer_output_scale.weight": 0.7,
}
"""The means of the vectors that are not about 1."""


def gemma4_keys(sliding: list[bool], heads_kv: list[int], widths: list[int], **sizes: int) -> dict[str, Any]:
    """Return metadata keys, below the architecture's name.

    Args:
        sliding, heads_kv, widths: By layer: whether it has a window, its key-value heads, the width of its block.
        sizes: `window`, `narrow` (the length of heads in layers with a window), `n_shared` and `n_per_layer`.
    """
    narrow = sizes["narrow"]
    return {
        "attention.head_count_kv": np.array(heads_kv, np.int32),
        "feed_forward_length": np.array(widths, np.int32),
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "attention.sliding_window": sizes["window"],
        "attention.sliding_window_pattern": Typed(ValueType.ARRAY, sliding, ValueType.BOOL),
        "attention.shared_kv_layers": sizes["n_shared"],
        "embedding_length_per_layer_input": sizes["n_per_layer"],
        "final_logit_softcapping": 30.0,
        "rope.dimension_count_swa": narrow,
        "rope.freq_base_swa": 10000.0,
    }


def rope_divisors(n_pairs: int) -> RawTensor:
    """Return what frequencies are divided by: only the first quarter of the pairs turns."""
    values = np.where(np.arange(n_pairs) < n_pairs // 4, 1, 1e30).astype(np.float32)
    return RawTensor(GGMLType.F32, values.shape, values.tobytes())


def per_layer_tables(n_layer: int, n: int, n_embd: int, n_vocab: int, matrix: Matrix) -> dict[str, RawTensor]:
    """Return the tensors that make what layers get of a token: n elements each."""
    rows = matrix(n_vocab * n_layer, n, 8 / (n_layer * n) ** 0.5 * n**0.5)
    return {
        "per_layer_token_embd.weight": RawTensor(rows.type, (n * n_layer, n_vocab), rows.data),
        "per_layer_model_proj.weight": matrix(n_layer * n, n_embd, 8.0),
    }


def token_parts(n: int, n_embd: int, matrix: Matrix) -> dict[str, RawTensor]:
    """Return the matrices of a layer that read what it gets of a token."""
    return {"inp_gate.weight": matrix(n, n_embd), "proj.weight": matrix(n_embd, n)}


def gate_and_up_together(experts: dict[str, RawTensor]) -> dict[str, RawTensor]:
    """Return a layer's experts with one matrix for gates and ups: of each expert first its gate, then its up."""
    gate, up = experts["ffn_gate_exps.weight"], experts["ffn_up_exps.weight"]
    n_in, n_ff, n = gate.shape
    assert gate.type == up.type, "the two become one matrix"
    pair = [np.frombuffer(tensor.data, np.uint8).reshape(n, 1, -1) for tensor in (gate, up)]
    data: NDArray[np.uint8] = np.concatenate(pair, axis=1)
    others = {name: tensor for name, tensor in experts.items() if tensor is not gate and tensor is not up}
    return others | {"ffn_gate_up_exps.weight": RawTensor(gate.type, (n_in, 2 * n_ff, n), data.tobytes())}


def expert_vectors(n_embd: int, n_expert: int) -> Iterator[tuple[str, int]]:
    """Yield name and length of the vectors of a layer with experts."""
    for name in ("ffn_gate_inp.scale", "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight"):
        yield name, n_embd
    yield "ffn_down_exps.scale", n_expert

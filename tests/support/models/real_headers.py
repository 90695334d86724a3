"""Stand-ins for real models: files with their sizes, shapes and types, a made vocabulary, and a hole for the weights.

Memory plans depend on nothing else, so the tables of the documents can be made and tested without the models.
"""

import math
from pathlib import Path
from typing import Any

from edgedec.gguf.tensor_types import GGMLType
from support.models.gguf_writer import Claims, RawTensor, build_gguf
from support.models.tiny_models import vocabulary

# Width, layers, width within, heads, heads of keys, tokens, context; types: embedding, output, down, values, others.
_SIZES = {
    "smollm2-135m": ("llama", 576, 30, 1536, 9, 3, 49152, 8192, ("Q8_0", "", "Q4_1", "Q4_1", "Q4_1")),
    "qwen2.5-coder-0.5b": ("qwen2", 896, 24, 4864, 14, 2, 151936, 32768, ("Q5_0", "Q8_0", "Q6_K", "Q8_0", "Q5_0")),
    "qwen2.5-coder-1.5b": ("qwen2", 1536, 28, 8960, 12, 2, 151936, 32768, ("Q4_K", "Q6_K", "Q6_K", "Q6_K", "Q4_K")),
}


def real_header(folder: Path, name: str) -> Path:
    """Write the stand-in of smollm2-135m, qwen2.5-coder-0.5b or -1.5b into a folder, and return its path."""
    family, n_embd, n_layer, n_ff, n_head, n_kv_head, n_vocab, n_ctx, types = _SIZES[name]
    embedding, output, down, values, others = types
    n_kv = n_embd // n_head * n_kv_head
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("output_norm.weight", "F32", (n_embd,))]
    tensors += [("token_embd.weight", embedding, (n_embd, n_vocab))]
    tensors += [("output.weight", output, (n_embd, n_vocab))] if output else []
    for i in range(n_layer):
        # llama.cpp gives more bits to an eighth of the layers at each end, and to every third one between.
        is_dear = i < n_layer // 8 or i >= 7 * n_layer // 8 or (i - n_layer // 8) % 3 == 2
        less = "Q4_K" if others.startswith("Q5") else others
        blk = f"blk.{i}"
        tensors += [(f"{blk}.{norm}_norm.weight", "F32", (n_embd,)) for norm in ("attn", "ffn")]
        tensors += [(f"{blk}.attn_{part}.weight", others, (n_embd, n_embd)) for part in ("q", "output")]
        tensors += [(f"{blk}.attn_k.weight", others, (n_embd, n_kv))]
        tensors += [(f"{blk}.attn_v.weight", values if is_dear else others, (n_embd, n_kv))]
        tensors += [(f"{blk}.ffn_{part}.weight", others, (n_embd, n_ff)) for part in ("gate", "up")]
        tensors += [(f"{blk}.ffn_down.weight", down if is_dear else less, (n_ff, n_embd))]
        if family == "qwen2":
            sizes = {"q": n_embd, "k": n_kv, "v": n_kv}
            tensors += [(f"{blk}.attn_{part}.bias", "F32", (size,)) for part, size in sizes.items()]
    offset, offsets, raw = 0, dict[str, int](), dict[str, RawTensor]()
    for tensor, kind, shape in tensors:
        offsets[tensor], raw[tensor] = offset, RawTensor(GGMLType[kind], shape, b"")
        n_bytes = math.prod(shape) // GGMLType[kind].block_size * GGMLType[kind].block_bytes
        offset += -(-n_bytes // 32) * 32
    metadata: dict[str, Any] = {
        "general.architecture": family,
        "general.file_type": 15,
        f"{family}.block_count": n_layer,
        f"{family}.context_length": n_ctx,
        f"{family}.embedding_length": n_embd,
        f"{family}.feed_forward_length": n_ff,
        f"{family}.attention.head_count": n_head,
        f"{family}.attention.head_count_kv": n_kv_head,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
        **vocabulary(n_vocab),
    }
    path = folder / f"{name}.gguf"
    data = build_gguf(metadata, raw, Claims(offsets=offsets)).data
    with path.open("wb") as file:
        file.write(data)
        file.truncate(len(data) + offset)
    return path

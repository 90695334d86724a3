"""The program that another process runs to try llama.cpp's library: it loads and evaluates a tiny model.

    python -m edgedec_runtimes.llamacpp.tiny_run [plain]

With `plain` the weights are not rearranged, and the kernels for rearranged weights are not used.
"""

import ctypes
import os
import struct
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.llamacpp.library import load_library

_WIDTH = 256  # of the model, in every direction: the shortest row of all types
_HEADS = 4
_STRING, _UINT32, _FLOAT32, _GGUF_VERSION = 8, 4, 6, 3
# One matrix of each type that llama.cpp has kernels for rearranged weights for, on some processor.
_MATRICES = {
    "attn_q": GGMLType.Q4_0,
    "attn_k": GGMLType.Q8_0,
    "attn_v": GGMLType.Q4_K,
    "attn_output": GGMLType.Q6_K,
    "ffn_gate": GGMLType.Q4_1,
    "ffn_up": GGMLType.Q5_K,
    "ffn_down": GGMLType.IQ4_XS,
}
_ROWS = (1, 2, 16, 64)  # of the forwards: one row, few and many have kernels of their own


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def tiny_model() -> bytes:
    """Return a GGUF of one layer of zeros without a vocabulary; a forward of it takes every step of a real one."""
    n = _WIDTH
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    whole = {"context_length": n, "embedding_length": n, "block_count": 1, "feed_forward_length": n, "vocab_size": n}
    heads = {"attention.head_count": _HEADS, "attention.head_count_kv": _HEADS, "rope.dimension_count": n // _HEADS}
    whole |= heads
    tensors = {"token_embd": ((n, n), GGMLType.Q4_0), "output_norm": ((n,), GGMLType.F32)}
    tensors |= {f"blk.0.{name}": ((n,), GGMLType.F32) for name in ("attn_norm", "ffn_norm")}
    tensors |= {f"blk.0.{name}": ((n, n), kind) for name, kind in _MATRICES.items()}
    head = struct.pack("<4sIQQ", b"GGUF", _GGUF_VERSION, len(tensors), len(texts) + len(whole) + 1)
    for key, text in texts.items():
        head += _string(key) + struct.pack("<I", _STRING) + _string(text)
    for key, value in whole.items():
        head += _string(f"llama.{key}") + struct.pack("<II", _UINT32, value)
    head += _string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, 1e-5)
    place = 0
    for name, (shape, kind) in tensors.items():
        head += _string(f"{name}.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)
        place += n ** len(shape) // kind.block_size * kind.block_bytes  # a multiple of the alignment, 32
    return head + bytes(-len(head) % 32 + place)


def run_tiny_model(api: ModuleType, folder: Path, *, repack: bool = True) -> None:
    """Load the tiny model on the devices that a model would take, and evaluate rows; `repack` as in LoadOptions."""
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_model())
    model_params = api.llama_model_default_params()
    model_params.use_extra_bufts = repack
    model = api.llama_model_load_from_file(os.fsencode(path), model_params)
    if not model:
        return  # a message of llama.cpp's says why, and this is not what is tried here
    params = api.llama_context_default_params()
    params.n_ctx = _WIDTH
    context = api.llama_init_from_model(model, params)
    for n in _ROWS if context else ():
        tokens = (ctypes.c_int32 * n)(*range(n))
        api.llama_decode(context, api.llama_batch_get_one(tokens, n))
    if context:
        api.llama_free(context)
    api.llama_model_free(model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run_tiny_model(load_library(), Path(made), repack="plain" not in sys.argv[1:])

"""The program that another process runs to try llama.cpp's library: it loads and evaluates a tiny model."""

import ctypes
import os
import struct
import tempfile
from pathlib import Path
from types import ModuleType

from edgedec_runtimes.llamacpp.library import load_library

_WIDTH = 32  # of the model, in every direction
_STRING, _UINT32, _FLOAT32, _GGUF_VERSION = 8, 4, 6, 3


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def tiny_model() -> bytes:
    """Return a GGUF of one layer of zeros without a vocabulary; a forward of it takes every step of a real one."""
    n = _WIDTH
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    whole = {"context_length": n, "embedding_length": n, "block_count": 1, "feed_forward_length": n, "vocab_size": n}
    whole |= {"attention.head_count": 1, "attention.head_count_kv": 1, "rope.dimension_count": n}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd.weight": (n, n), "output_norm.weight": (n,)}
    shapes |= {f"blk.0.{name}.weight": (n,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.{name}.weight": (n, n) for name in matrices}
    head = struct.pack("<4sIQQ", b"GGUF", _GGUF_VERSION, len(shapes), len(texts) + len(whole) + 1)
    for key, text in texts.items():
        head += _string(key) + struct.pack("<I", _STRING) + _string(text)
    for key, value in whole.items():
        head += _string(f"llama.{key}") + struct.pack("<II", _UINT32, value)
    head += _string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", _FLOAT32, 1e-5)
    place = 0
    for name, shape in shapes.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, place)
        place += 4 * n ** len(shape)
    return head + bytes(-len(head) % 32 + place)


def run_tiny_model(api: ModuleType, folder: Path) -> None:
    """Load the tiny model on the devices that a model would take, and evaluate one token and two."""
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_model())
    model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
    if not model:
        return  # a message of llama.cpp's says why, and this is not what is tried here
    params = api.llama_context_default_params()
    params.n_ctx = _WIDTH
    context = api.llama_init_from_model(model, params)
    for n in (1, 2) if context else ():
        tokens = (ctypes.c_int32 * n)(*range(n))
        api.llama_decode(context, api.llama_batch_get_one(tokens, n))
    if context:
        api.llama_free(context)
    api.llama_model_free(model)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        run_tiny_model(load_library(), Path(made))

"""The program that another process runs to try a library of llama.cpp: it loads and evaluates a tiny model.

    python -m edgedec_runtimes.llamacpp.tiny_run PACKAGE [plain]

With `plain` the weights are not rearranged, and the kernels for rearranged weights are not used. The last line that it
writes has, as JSON, the library's GPUs, and what was wrong, or null.
"""

import ctypes
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RuntimeUnavailableError
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, RowGroup
from edgedec_runtimes.llamacpp.binding import RELEASES
from edgedec_runtimes.llamacpp.library import last_complaint, load_library
from edgedec_runtimes.reference.runtime import Reference

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
_GPUS = (1, 2)  # ggml_backend_dev_type: GPUs and integrated ones
_FAR = 0.03  # off the reference's logits, as a part of their length: rounding to float16 makes 0.0004
_ROWS = (1, 2, 16, 64)  # of the forwards: one row, few and many have kernels of their own
_COMPARED = (1, 16)  # as a GPU compiles its kernels first


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def tiny_model(*, plain: bool = False) -> bytes:
    """Return a GGUF of one layer without a vocabulary; a forward of it takes every step of a real one.

    Its matrices are of several types, and zeros; in a `plain` one they are random float32 numbers.
    """
    n = _WIDTH
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    whole = {"context_length": n, "embedding_length": n, "block_count": 1, "feed_forward_length": n, "vocab_size": n}
    heads = {"attention.head_count": _HEADS, "attention.head_count_kv": _HEADS, "rope.dimension_count": n // _HEADS}
    whole |= heads
    matrices = {"token_embd": GGMLType.Q4_0} | {f"blk.0.{name}": kind for name, kind in _MATRICES.items()}
    tensors: dict[str, tuple[tuple[int, ...], GGMLType]] = {
        name: ((n, n), GGMLType.F32 if plain else kind) for name, kind in matrices.items()
    }
    tensors |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), ((n,), GGMLType.F32))
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
    values = np.random.default_rng(0).normal(0, 0.1, place // 4).astype("<f4").tobytes() if plain else bytes(place)
    return head + bytes(-len(head) % 32) + values


@contextmanager
def _context(api: Any, path: Path, *, repack: bool, on_cpu: bool = False) -> Iterator[Any]:
    """Yield a context of a model, `on_cpu` or on the devices that a model would take (OSError where there is none)."""
    params = api.llama_model_default_params()
    params.use_extra_bufts = repack
    no_devices = (ctypes.c_void_p * 1)()
    if on_cpu:
        params.n_gpu_layers, params.devices = 0, ctypes.addressof(no_devices)
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    params = api.llama_context_default_params()
    params.n_ctx = _WIDTH
    params.n_outputs_max = params.n_outputs_max_per_seq = max(_ROWS)
    context = api.llama_init_from_model(model, params) if model else None
    if not context:
        raise OSError(last_complaint())
    yield context
    api.llama_free(context)
    api.llama_model_free(model)


def _decode(api: Any, context: Any, n: int) -> NDArray[np.float32]:
    """Evaluate tokens 0 to n - 1 from the first position on, and return their logits, f32[n, width]."""
    tokens, positions, mask = (np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32), np.ones(n, np.int8))
    batch = api.llama_batch(
        n_tokens=n,
        token=tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        pos=positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
        logits=mask.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
    )
    api.llama_memory_seq_rm(api.llama_get_memory(context), -1, -1, -1)
    code = api.llama_decode(context, batch)
    if code:
        raise OSError(f"code {code}, {last_complaint()}")
    rows = [api.llama_get_logits_ith(context, row) for row in range(n)]
    return np.array([np.ctypeslib.as_array((ctypes.c_float * _WIDTH).from_address(row)) for row in rows])


def run_tiny_model(api: Any, folder: Path, *, repack: bool = True) -> float:
    """Evaluate tiny models in llama.cpp; `repack` as in LoadOptions.

    Returns:
        How far the plain model's logits are off those of the reference runtime, as a part of their length.

    Raises:
        OSError: llama.cpp refuses the model, or a forward.
    """
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_model())
    with _context(api, path, repack=repack, on_cpu=True) as context:  # a GPU would compile kernels for every type
        for n in _ROWS:
            _decode(api, context, n)
    path.write_bytes(tiny_model(plain=True))
    with closing(Reference().load(path, LoadOptions(n_ctx=_WIDTH))) as model:
        session, tokens = model.session(_WIDTH), np.arange(max(_COMPARED), dtype=np.int32)
        expected = session.evaluate(ForwardItem(session, 0, (RowGroup(tokens),), tokens)).logits
    off = 0.0
    with _context(api, path, repack=repack) as context:
        for n in _COMPARED:
            distances = np.linalg.norm(_decode(api, context, n) - expected[:n], axis=1)
            far = float(np.max(distances / np.linalg.norm(expected[:n], axis=1)))
            off = max(off, 1.0 if np.isnan(far) else far)
    return off


def _run(package: str, *arguments: str) -> None:
    try:
        api = load_library(next(release for release in RELEASES if release.package == package))
    except RuntimeUnavailableError as error:
        print(json.dumps([[], str(error)]), flush=True)
        return
    handles = [api.ggml_backend_dev_get(index) for index in range(api.ggml_backend_dev_count())]
    gpus = [api.ggml_backend_dev_name(one).decode() for one in handles if api.ggml_backend_dev_type(one) in _GPUS]
    where, wrong = ", ".join(gpus) or "the CPU", None
    try:
        with tempfile.TemporaryDirectory() as made:
            off = run_tiny_model(api, Path(made), repack="plain" not in arguments)
        if off > _FAR:
            wrong = f"it computes wrong numbers on {where} (a tiny model's logits are off by {off:.2g} of their length)"
    except OSError as error:
        wrong = f"it does not run a tiny model on {where}: {error}"
    print(json.dumps([gpus, wrong]), flush=True)


if __name__ == "__main__":
    _run(*sys.argv[1:])

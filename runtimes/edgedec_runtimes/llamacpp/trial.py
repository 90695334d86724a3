"""Tries llama.cpp's library in a process of its own before this process loads it for the first time.

A library for another processor, or beside an unfit driver, ends the process that uses it, and nobody could read why.
What was tried is remembered until the library, the processor or the variables that choose devices change.
"""

import ctypes
import importlib.util
import os
import signal
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from edgedec.storage import probe_cache
from edgedec_runtimes.shared.child_environment import child_environment

_PATIENCE_S = 120.0
_WIDTH = 32  # of the model that is tried, in every direction
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
_STRING, _UINT32, _FLOAT32, _GGUF_VERSION = 8, 4, 6, 3


@cache
def complaint() -> str | None:
    """Return how llama.cpp's library ended the process that tried it; None where it ran a model, or did before.

    In a frozen application nothing is tried, as it has no Python to start.
    """
    key = _key()
    if getattr(sys, "frozen", False) or key is None:
        return None
    folder = probe_cache.cache_folder(None)
    if probe_cache.get(folder, "llamacpp", key) == "it runs":
        return None
    found = _tried()
    if found is None:
        probe_cache.put(folder, "llamacpp", key, "it runs")
    return found


def _key() -> str | None:
    """Return all that the outcome depends on; None where llama-cpp-python is not installed."""
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        return None
    files = sorted((Path(package.origin).parent / "lib").glob("*"))
    states = [(file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files]
    chosen = [os.environ.get(name) for name in _DEVICE_VARIABLES]
    return f"{package.origin} {states} {chosen} {probe_cache.cpu_name()} {sys.version}"


def _tried() -> str | None:
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not run a tiny model within {_PATIENCE_S:g} s"
    except OSError:  # no process can be started here: nothing is known
        return None
    return _ending(done.returncode)


def _ending(code: int) -> str | None:
    """Say how a process ended; None where it ended well, or with a Python exception, which tells its reason itself."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = ", so it was probably built for another processor" if name == "SIGILL" else ""
        return f"it ended the process that tried it ({name}){why}"
    return f"it ended the process that tried it (exit status {code:#x})" if code > 1 else None


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
    from edgedec_runtimes.llamacpp.library import load_library

    with tempfile.TemporaryDirectory() as made:
        run_tiny_model(load_library(), Path(made))

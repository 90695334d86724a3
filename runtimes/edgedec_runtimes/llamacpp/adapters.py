"""Low-rank adapters of a model that llama.cpp runs: loaded with the model, and set for the decodes of a session."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgedec.errors import RequestError, RuntimeUnavailableError, UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec_runtimes.llamacpp.library import captured_log, last_complaint, llama
from edgedec_runtimes.weights.adapters import load_adapters


def open_adapters(model: Any, gguf: GGUF, paths: Sequence[Path]) -> tuple[Any, ...]:
    """Load the adapters of a model, before its contexts are made; they live as long as the model.

    Raises:
        RequestError: An adapter is a folder of PEFT.
        UnsupportedModelError: llama.cpp does not load an adapter.
        What load_adapters raises, which checks more than llama.cpp does.
    """
    for path in paths:
        if path.is_dir():
            raise RequestError(f"{path}: the llamacpp runtime takes adapters that are GGUFs; use the cpu runtime")
    load_adapters(paths, gguf)
    found = []
    for path in paths:
        with captured_log():
            adapter = llama().llama_adapter_lora_init(model, os.fsencode(path))
            complaint = last_complaint()
        if not adapter:
            raise UnsupportedModelError(f"llama.cpp does not load the adapter {path}: {complaint}")
        found.append(adapter)
    return tuple(found)


def set_adapters(context: Any, adapters: Sequence[Any], scales: Sequence[float]) -> None:
    """Let the decodes of a context have adapters at these scales; those at 0 are left out."""
    api = llama()
    used = [(adapter, scale) for adapter, scale in zip(adapters, scales, strict=True) if scale]
    pointers = (ctypes.c_void_p * len(used))(*(adapter for adapter, _ in used))
    code = api.llama_set_adapters_lora(
        context, pointers, len(used), (ctypes.c_float * len(used))(*(s for _, s in used))
    )
    if code != 0:
        raise RuntimeUnavailableError(f"llama.cpp did not take the adapters: {last_complaint()}")

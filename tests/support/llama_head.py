"""Run a draft head with llama.cpp's own eagle3 code: the second oracle for files, flags and the order of rows.

Two functions of the library have no C name (llama_set_embeddings_nextn, llama_get_embeddings_nextn); they are found by
the name that gcc and clang give them, and `LlamaHead.available` says whether they were.
"""

import ctypes
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.llamacpp.library import llama

F32 = NDArray[np.float32]
_ENCODE, _DECODE = 0, 1
_CONTEXT = "P13llama_context"


def _mangled(name: str, arguments: str) -> str:
    return f"_Z{len(name)}{name}{_CONTEXT}{arguments}"


class LlamaHead:
    """A head in llama.cpp; `target` is the GGUF whose matrices it borrows, where it borrows any."""

    def __init__(self, path: Path, target: Path | None = None) -> None:
        self._api: Any = llama()
        self._models: list[Any] = []
        self._contexts: list[Any] = []
        self._set = getattr(self._api._lib, _mangled("llama_set_embeddings_nextn", "bb"))
        self._set.argtypes, self._set.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
        self._get = getattr(self._api._lib, _mangled("llama_get_embeddings_nextn", ""))
        self._get.argtypes, self._get.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)
        other = None if target is None else self._open(target, None)
        self._ctx = self._open(path, other)
        vocabulary = self._api.llama_model_get_vocab(self._models[-1])
        self.n_vocab: int = self._api.llama_vocab_n_tokens(vocabulary)
        self.n_embd: int = self._api.llama_model_n_embd(self._models[-1])
        self._batch = self._api.llama_batch_ext_init(self._ctx)

    @staticmethod
    def available() -> bool:
        """Return whether the library has the functions that have no C name."""
        try:
            return hasattr(llama()._lib, _mangled("llama_set_embeddings_nextn", "bb"))
        except Exception:
            return False

    def _open(self, path: Path, other: Any) -> Any:
        model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        assert model, f"llama.cpp does not load {path}"
        self._models.append(model)
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # F32
        params.flash_attn_type = 0
        if other is not None:
            params.ctx_other = other
        context = self._api.llama_init_from_model(model, params)
        assert context, f"llama.cpp makes no context for {path}"
        self._contexts.append(context)
        return context

    def fuse(self, taps: F32) -> F32:
        """Return float32[n, n_embd], the features of float32[n, n_taps * n_embd_target] taps."""
        self._set(self._ctx, True, False)
        return self._run(_ENCODE, taps, None, 0)[1]

    def step(self, tokens: list[int], features: F32, position: int) -> tuple[F32, F32]:
        """Evaluate pairs at `position` and after.

        Returns:
            float32[n, n_vocab], the logits (-inf for tokens that can't be drafted), and float32[n, n_embd], the states.
        """
        self._set(self._ctx, True, False)
        memory = self._api.llama_get_memory(self._ctx)
        self._api.llama_memory_seq_rm(memory, 0, position, -1)
        return self._run(_DECODE, features, tokens, position)

    def _run(self, kind: int, rows: F32, tokens: list[int] | None, position: int) -> tuple[F32, F32]:
        api, batch, rows = self._api, self._batch, np.ascontiguousarray(rows, np.float32)
        api.llama_batch_ext_clear(batch)
        for i, row in enumerate(rows):
            data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            embd = api.llama_embd(data=data, n_rows=1, n_embd=len(row))
            if tokens is None:
                at = api.llama_batch_ext_add_embd(batch, 0, embd)
            else:
                at = api.llama_batch_ext_add_token(batch, 0, tokens[i])
                assert api.llama_batch_ext_set_embd_token(batch, at, embd)
            assert at == i
            api.llama_batch_ext_set_pos(batch, at, (ctypes.c_int32 * 4)(position + i, 0, 0, 0))
            api.llama_batch_ext_set_output_logits(batch, at, True)
        assert api.llama_process(self._ctx, kind, batch) == 0
        states = np.ctypeslib.as_array(self._get(self._ctx), (len(rows), self.n_embd)).copy()
        if tokens is None:
            return states, states
        logits = np.ctypeslib.as_array(api.llama_get_logits(self._ctx), (len(rows), self.n_vocab)).copy()
        return logits, states

    def close(self) -> None:
        """Free everything."""
        self._api.llama_batch_ext_free(self._batch)
        for context in reversed(self._contexts):
            self._api.llama_free(context)
        for model in reversed(self._models):
            self._api.llama_model_free(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

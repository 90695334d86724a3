"""Run the nextn layer of a model's file with llama.cpp's own code: its states, and what the layer scores."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.llamacpp.trial import repack_complaint
from support.heads.llama_head import function, llama

F32 = NDArray[np.float32]
_MODEL, _NEXTN = 0, 1  # the types of a context
_CONTEXT = "P13llama_context"


class LlamaNextn:
    """A model and its nextn layer in llama.cpp, for texts of at most `n_ctx` tokens."""

    def __init__(self, path: Path, n_ctx: int = 128) -> None:
        self._api: Any = llama()
        self._n_ctx = n_ctx
        params = self._api.llama_model_default_params()
        params.use_extra_bufts = repack_complaint() is None
        params.load_mtp = True
        self._model = self._api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._contexts: list[Any] = []
        self._target = self._context(_MODEL, None)
        self._layer = self._context(_NEXTN, self._target)
        flags = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        function("llama_set_embeddings_nextn", f"{_CONTEXT}bb", flags, None)(self._target, True, False)
        floats = ctypes.POINTER(ctypes.c_float)
        self._state = function(
            "llama_get_embeddings_nextn_ith", f"{_CONTEXT}i", [ctypes.c_void_p, ctypes.c_int], floats
        )
        self._n_embd: int = self._api.llama_model_n_embd(self._model)
        self._n_vocab: int = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))

    def _context(self, kind: int, other: Any) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # F32
        params.flash_attn_type, params.ctx_type = 0, kind
        if other is not None:
            params.ctx_other = other
        context = self._api.llama_init_from_model(self._model, params)
        assert context, "llama.cpp makes no context"
        self._contexts.append(context)
        return context

    def states(self, tokens: Sequence[int]) -> F32:
        """Return float32[n, n_embd], the model's states after its last norm, of a text from its start on."""
        n = len(tokens)
        batch = self._api.llama_batch_init(n, 0, 1)
        _fill(batch, range(n))
        for i, token in enumerate(tokens):
            batch.token[i] = token
        assert self._api.llama_decode(self._target, batch) == 0
        found = [np.ctypeslib.as_array(self._state(self._target, i), (self._n_embd,)).copy() for i in range(n)]
        self._api.llama_batch_free(batch)
        return np.stack(found)

    def scores(self, tokens: Sequence[int], states: F32) -> F32:
        """Return float32[n, n_vocab], what the layer scores for pairs of a token and the state before it."""
        n = len(tokens)
        batch = self._api.llama_batch_init(n, self._n_embd, 1)
        ids = (ctypes.c_int32 * n)(*tokens)
        batch.token = ctypes.cast(ids, type(batch.token))
        _fill(batch, range(1, n + 1))
        np.ctypeslib.as_array(batch.embd, states.shape)[:] = states
        assert self._api.llama_decode(self._layer, batch) == 0
        rows = [self._api.llama_get_logits_ith(self._layer, i) for i in range(n)]
        found = np.stack([np.ctypeslib.as_array(row, (self._n_vocab,)).copy() for row in rows])
        batch.token = type(batch.token)()
        self._api.llama_batch_free(batch)
        return found

    def close(self) -> None:
        """Free everything."""
        for context in reversed(self._contexts):
            self._api.llama_free(context)
        self._api.llama_model_free(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(batch: Any, positions: Sequence[int]) -> None:
    """Set the positions of a batch's rows, all of one text, whose logits are wanted."""
    batch.n_tokens = len(positions)
    for i, position in enumerate(positions):
        batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, 1
        batch.seq_id[i][0] = 0

"""Run a draft head with llama.cpp's own code: the second oracle for files, flags and the order of rows.

    LlamaHead(head, target)      fuses taps and evaluates pairs that the caller gives it
    LlamaPair(head, target)      evaluates a text with the target, and drafts behind it
    LlamaBlock(head)             drafts blocks: also an oracle for the order and sight of rows
    LlamaNextn(model)            gives the states of a model, and what its nextn layer, or an assistant, scores

Some functions of the library have no C name (llama_set_embeddings_nextn, llama_get_embeddings_layer_inp, ...); they are
found by the name that gcc and clang give them, and `LlamaHead.available` says whether they were.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.llamacpp import library
from edgedec_runtimes.llamacpp.trial import repack_complaint

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
_ENCODE, _DECODE = 0, 1
_CONTEXT, _MODEL = "P13llama_context", "PK11llama_model"


def llama() -> Any:
    """Return the low-level module of llama-cpp-python, which binds more than edgedec does; its log is taken."""
    from llama_cpp import llama_cpp

    library.llama()
    return llama_cpp


def _mangled(name: str, arguments: str) -> str:
    return f"_Z{len(name)}{name}{arguments}"


def function(name: str, arguments: str, types: Sequence[Any], result: Any) -> Any:
    """Return a function of the library that has no C name."""
    found = getattr(llama()._lib, _mangled(name, arguments))
    found.argtypes, found.restype = list(types), result
    return found


class LlamaHead:
    """A head in llama.cpp; `target` is the GGUF whose matrices it borrows, where it borrows any.

    Contexts have `n_ctx` tokens; that many rows can be evaluated at once.
    """

    def __init__(self, path: Path, target: Path | None = None, n_ctx: int = 64) -> None:
        self._api: Any = llama()
        self._n_ctx = n_ctx
        self._models: list[Any] = []
        self._contexts: list[Any] = []
        three = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        self._set = function("llama_set_embeddings_nextn", f"{_CONTEXT}bb", three, None)
        self._get = function("llama_get_embeddings_nextn", _CONTEXT, three[:1], ctypes.POINTER(ctypes.c_float))
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
            return hasattr(llama()._lib, _mangled("llama_set_embeddings_nextn", f"{_CONTEXT}bb"))
        except Exception:
            return False

    def _open(self, path: Path, other: Any) -> Any:
        model_params = self._api.llama_model_default_params()
        model_params.use_extra_bufts = repack_complaint() is None
        model = self._api.llama_model_load_from_file(str(path).encode(), model_params)
        assert model, f"llama.cpp does not load {path}"
        self._models.append(model)
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_ctx
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
        last = self._api.llama_memory_seq_pos_max(self._api.llama_get_memory(self._ctx), 0)
        return self._run(_ENCODE, taps, None, last + 1)[1]  # fc has no positions, but the library checks them

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


class LlamaPair(LlamaHead):
    """A target and its head in llama.cpp, with the calls that its own speculative decoding makes.

    Attributes:
        features: float32[n, n_embd], what fc made of the taps of the tokens that were evaluated.
    """

    def __init__(self, path: Path, target: Path, n_ctx: int = 64) -> None:
        super().__init__(path, target, n_ctx)
        ids = function("llama_model_target_layer_ids", _MODEL, [ctypes.c_void_p], ctypes.POINTER(ctypes.c_int32))
        n_ids = function("llama_model_target_layer_ids_n", _MODEL, [ctypes.c_void_p], ctypes.c_uint32)
        self.taps: list[int] = ids(self._models[-1])[: n_ids(self._models[-1])]
        watch = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool]
        set_input = function("llama_set_embeddings_layer_inp", f"{_CONTEXT}jb", watch, None)
        floats = ctypes.POINTER(ctypes.c_float)
        self._input = function("llama_get_embeddings_layer_inp", f"{_CONTEXT}j", watch[:2], floats)
        for layer in self.taps:
            set_input(self._contexts[0], layer, True)
        self._n_tapped: int = self._api.llama_model_n_embd(self._models[0])
        self._target_batch = self._api.llama_batch_init(n_ctx, 0, 1)
        self.features = np.zeros((0, self.n_embd), np.float32)

    def read(self, tokens: Sequence[int], n_past: int) -> F32:
        """Evaluate tokens of the text behind its first `n_past`, and the pairs that they complete.

        Returns:
            float32[n, n_taps * n_embd_target], the taps of the tokens.
        """
        self._forget(n_past)
        taps = self._read_by_target(tokens, n_past)
        known = max(0, n_past - 1)
        waiting = self.features[known:n_past]
        fused = self.fuse(taps)
        self.features = np.concatenate((self.features[:n_past], fused))
        if pairs := list(tokens if len(waiting) else tokens[1:]):
            self.step(pairs, np.concatenate((waiting, fused[:-1])), known)
        return taps

    def scores(self, n_past: int, token: int, drafted: Sequence[int]) -> F32:
        """Return float32[len(drafted) + 1, n_vocab], the logits behind `token`, and behind each drafted token."""
        self._forget(n_past)
        rows, states = self.step([token], self.features[n_past - 1 : n_past], n_past - 1)
        found = [rows[-1]]
        for i, following in enumerate(drafted):
            rows, states = self.step([following], states[-1:], n_past + i)
            found.append(rows[-1])
        return np.stack(found)

    def draft(self, n_past: int, token: int, n: int, allowed: I32) -> tuple[list[int], F32]:
        """Return a chain of the most likely `allowed` tokens behind `token`, and their logits, float32[n, n_vocab]."""
        drafted: list[int] = []
        while True:
            rows = self.scores(n_past, token, drafted)
            drafted.append(int(allowed[rows[-1, allowed].argmax()]))
            if len(drafted) == n:
                return drafted, rows

    def _forget(self, n_past: int) -> None:
        """Drop the tokens behind the first `n_past`, and the pairs that need one of them."""
        for context, first in ((self._contexts[0], n_past), (self._contexts[-1], max(0, n_past - 1))):
            self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, first, -1)

    def _read_by_target(self, tokens: Sequence[int], n_past: int) -> F32:
        batch = self._target_batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, n_past + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert self._api.llama_decode(self._contexts[0], batch) == 0
        shape = (len(tokens), self._n_tapped)
        taps = [np.ctypeslib.as_array(self._input(self._contexts[0], layer), shape) for layer in self.taps]
        return np.concatenate(taps, axis=1)

    def close(self) -> None:
        """Free everything."""
        self._api.llama_batch_free(self._target_batch)
        super().close()


_WHOLE, _NEXTN = 0, 1  # the types of a context


class LlamaBlock(LlamaHead):
    """A block head in llama.cpp's dflash code with its state for one text.

    The head must have an embedding and an output matrix of its own, so that no target is needed. A Markov head drafts
    the chain of its most probable tokens inside the graph.
    """

    def __init__(self, path: Path, *, causal: bool, n_ctx: int = 64) -> None:
        super().__init__(path, n_ctx=n_ctx)
        self._set(self._ctx, True, True)
        self._api.llama_set_causal_attn(self._ctx, causal)

    def absorb(self, taps: F32, position: int) -> None:
        """Take in float32[n, n_taps * n_embd_target], the taps of the tokens at `position` and after."""
        self._clear()
        for i, row in enumerate(np.ascontiguousarray(taps, np.float32)):
            data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            at = self._api.llama_batch_ext_add_embd(
                self._batch, 0, self._api.llama_embd(data=data, n_rows=1, n_embd=len(row))
            )
            self._place(at, i, position, scored=False)
        assert self._api.llama_process(self._ctx, _DECODE, self._batch) == 0

    def block(self, tokens: list[int], position: int) -> tuple[F32, F32]:
        """Evaluate the rows of a block, which are forgotten again.

        Returns:
            float32[n, n_vocab], the scores (-inf for tokens that can't be drafted), and float32[n, n_embd]: each row's
            confidence again and again, or a selector's tokens and scores (where the head has such).
        """
        self._clear()
        for i, token in enumerate(tokens):
            self._place(self._api.llama_batch_ext_add_token(self._batch, 0, token), i, position, scored=True)
        assert self._api.llama_process(self._ctx, _DECODE, self._batch) == 0
        n = len(tokens)
        scores = np.ctypeslib.as_array(self._api.llama_get_logits(self._ctx), (n, self.n_vocab)).copy()
        beside = np.ctypeslib.as_array(self._get(self._ctx), (n, self.n_embd)).copy()
        memory = self._api.llama_get_memory(self._ctx)
        self._api.llama_memory_seq_rm(memory, 0, position, -1)
        return scores, beside

    def _clear(self) -> None:
        self._api.llama_batch_ext_clear(self._batch)

    def _place(self, at: int, i: int, position: int, *, scored: bool) -> None:
        assert at == i
        self._api.llama_batch_ext_set_pos(self._batch, at, (ctypes.c_int32 * 4)(position + i, 0, 0, 0))
        self._api.llama_batch_ext_set_output_logits(self._batch, at, scored)


class LlamaNextn:
    """A model and its nextn layer, or an assistant of its own file, in llama.cpp, for at most `n_ctx` tokens."""

    def __init__(self, path: Path, n_ctx: int = 128, assistant: Path | None = None) -> None:
        self._api: Any = llama()
        self._n_ctx = n_ctx
        params = self._api.llama_model_default_params()
        params.use_extra_bufts = repack_complaint() is None
        params.load_mtp = True
        paths = [path] if assistant is None else [path, assistant]
        self._models = [self._api.llama_model_load_from_file(str(each).encode(), params) for each in paths]
        assert all(self._models), f"llama.cpp does not load {path}"
        self._model = self._models[0]
        self._contexts: list[Any] = []
        self._target = self._context(_WHOLE, None)
        self._layer = self._context(_NEXTN, self._target)
        flags = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
        for context in self._contexts[: len(paths)]:
            function("llama_set_embeddings_nextn", f"{_CONTEXT}bb", flags, None)(context, True, False)
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
        context = self._api.llama_init_from_model(self._models[-1 if kind == _NEXTN else 0], params)
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

    def step(self, token: int, state: F32, position: int) -> tuple[F32, F32]:
        """Return float32[n_vocab], what an assistant scores behind a token at a position, and the next one's state."""
        row = self.scores([token], state[None], position)[0]
        return row, np.ctypeslib.as_array(self._state(self._layer, 0), (self._n_embd,)).copy()

    def scores(self, tokens: Sequence[int], states: F32, position: int = 1) -> F32:
        """Return float32[n, n_vocab], what the layer scores for pairs of a token and the state before it."""
        n = len(tokens)
        batch = self._api.llama_batch_init(n, self._n_embd, 1)
        ids = (ctypes.c_int32 * n)(*tokens)
        batch.token = ctypes.cast(ids, type(batch.token))
        _fill(batch, range(position, position + n))
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
        for model in reversed(self._models):
            self._api.llama_model_free(model)

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

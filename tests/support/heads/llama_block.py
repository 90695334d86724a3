"""Run a block head with llama.cpp's own dflash code: the second oracle for files, and for the order and sight of rows.

The head must have an embedding and an output matrix of its own, so that no target is needed. A Markov head drafts the
chain of its most probable tokens inside the graph.
"""

import ctypes
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from support.heads.llama_head import LlamaHead

F32 = NDArray[np.float32]
_DECODE = 1


class LlamaBlock(LlamaHead):
    """A block head in llama.cpp with its state for one text."""

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
            float32[n, n_vocab], the scores (-inf for tokens that can't be drafted), and float32[n], the confidences
            (where the head has any).
        """
        self._clear()
        for i, token in enumerate(tokens):
            self._place(self._api.llama_batch_ext_add_token(self._batch, 0, token), i, position, scored=True)
        assert self._api.llama_process(self._ctx, _DECODE, self._batch) == 0
        n = len(tokens)
        scores = np.ctypeslib.as_array(self._api.llama_get_logits(self._ctx), (n, self.n_vocab)).copy()
        sure = np.ctypeslib.as_array(self._get(self._ctx), (n, self.n_embd))[:, 0].copy()
        memory = self._api.llama_get_memory(self._ctx)
        self._api.llama_memory_seq_rm(memory, 0, position, -1)
        return scores, sure

    def _clear(self) -> None:
        self._api.llama_batch_ext_clear(self._batch)

    def _place(self, at: int, i: int, position: int, *, scored: bool) -> None:
        assert at == i
        self._api.llama_batch_ext_set_pos(self._batch, at, (ctypes.c_int32 * 4)(position + i, 0, 0, 0))
        self._api.llama_batch_ext_set_output_logits(self._batch, at, scored)

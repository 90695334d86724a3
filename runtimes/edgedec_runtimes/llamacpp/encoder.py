"""A GGUF that was trained to embed texts, loaded by llama.cpp: it returns the final states of a text's tokens.

Each text is evaluated alone, in one micro-batch, so that its states depend on nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import OptionError
from edgedec.gguf.file import GGUF
from edgedec.gguf.metadata import get_text
from edgedec.memory_plan import MemoryTerm
from edgedec.model import RowGroup
from edgedec.model_card import Capabilities, ModelCard
from edgedec_runtimes.llamacpp.context import Context, ContextOptions
from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.llamacpp.tokenizer import LlamaCppTokenizer
from edgedec_runtimes.shared.encoder_session import EncoderSession
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.session_state import CheckedItem
from edgedec_runtimes.tokenizer import open_tokenizer
from edgedec_runtimes.tokenizer.metadata import BERT
from edgedec_runtimes.weights.levels import read_rows

_NO_ROWS = np.empty(0, np.int32)
_TYPES = "token_types.weight"


class LlamaCppEncoder(LibraryModel[Any, "LlamaCppEncoderSession"]):
    """Implements edgedec.model.Model; its sessions have `final_states` and no other forwards.

    One context serves all sessions, as no session keeps anything in it.
    """

    batch_invariant = 1

    def __init__(
        self,
        handle: Any,
        files: MappedFiles | None,
        card: ModelCard,
        options: ContextOptions,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        gguf: GGUF,
    ) -> None:
        """Take over a loaded model of a file, whose weights are mapped from `files` where these are given."""
        contexts: list[Context] = []
        super().__init__(
            handle,
            card,
            Capabilities(rollback=False, exact_trees=False, final_states=True, max_rows=1),
            open_tokenizer(gguf) if uses_word_pieces(gguf) else LlamaCppTokenizer(self._vocabulary),
            terms,
            partial(_free, handle, contexts, files),
        )
        self._finalizer.atexit = True  # llama.cpp's GPU back ends want their memory back before the process ends
        self._n_ctx = options.n_cells
        self._typed = typed_rows(gguf)
        contexts.append(Context(handle, card.n_vocab, options, self.stop, files))
        self._context = contexts[0]

    def session(self, n_ctx: int) -> "LlamaCppEncoderSession":
        """Open a session for texts of at most `n_ctx` tokens (OptionError where the model was loaded for fewer)."""
        if not 1 <= n_ctx <= self._n_ctx:
            raise OptionError("n_ctx", n_ctx, f"the model was loaded for texts of 1 to {self._n_ctx} tokens")
        with self.lock:
            return self.adopt(LlamaCppEncoderSession(self, n_ctx, n_layer=1))

    def final_states(
        self, session: "LlamaCppEncoderSession", tokens: NDArray[np.int32], n_first: int | None
    ) -> NDArray[np.float32]:
        """Return f32[n, n_embd], the final state of each token; see edgedec.model.EncoderSession."""
        vectors = None if n_first is None or self._typed is None else self._typed(tokens, n_first)
        with self.lock:
            outer = self.stop.running
            try:
                item = CheckedItem(session, 0, (RowGroup(tokens),), len(tokens), None, _NO_ROWS)
                self.stop.running = (*outer, item)
                mutual = self.card.architecture == "t5encoder"
                return self._context.final_states(tokens, self.card.n_embd, vectors, mutual)
            finally:
                self.stop.leave(outer)

    def _vocabulary(self) -> Any:
        """Return the native vocabulary; does not wait for a forward (SessionError once the model is closed)."""
        self.lock.check()
        return llama().llama_model_get_vocab(self.handle)


class LlamaCppEncoderSession(EncoderSession):
    """Implements edgedec.model.EncoderSession; it holds nothing."""

    def _free(self) -> None:
        return


def uses_word_pieces(gguf: GGUF) -> bool:
    """Return whether a model has BERT's tokenizer."""
    return get_text(gguf, "tokenizer.ggml.model") == BERT


def typed_rows(gguf: GGUF) -> Callable[[NDArray[np.int32], int], NDArray[np.float32]] | None:
    """Return `(int32[n] tokens, n_first)` -> f32[n, width], what stands in place of embeddings for a pair of texts.

    BERT's tokenizer gives the tokens of the second text another type, for which llama.cpp adds the first type's vector:
    the difference of the two types is added here. None for a model without such types: no tokenizer but BERT's makes
    them, whatever rows its models have.
    """
    types = gguf.tensors.get(_TYPES)
    if types is None or types.shape[1:] < (2,) or not uses_word_pieces(gguf):
        return None
    first, second = read_rows(gguf, _TYPES, 0, 2)
    step = second - first

    def rows(tokens: NDArray[np.int32], n_first: int) -> NDArray[np.float32]:
        all_rows = np.concatenate([read_rows(gguf, "token_embd.weight", token_id, 1) for token_id in tokens.tolist()])
        all_rows[n_first:] += step
        return all_rows

    return rows


def _free(handle: Any, contexts: list[Context], files: MappedFiles | None) -> None:
    if files is not None:
        files.close()
    for context in contexts:
        context.close()
    llama().llama_model_free(handle)

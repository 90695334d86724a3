"""A llama.cpp context: one KV cache that several sequences share, and the batch of rows that a decode takes."""

import ctypes
import ctypes.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import (
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryCapError,
    RequestError,
    RuntimeUnavailableError,
    UnsupportedModelError,
)
from edgedec.gguf.file import GGUF
from edgedec_runtimes.llamacpp.library import captured_log, last_complaint, llama
from edgedec_runtimes.shared.library_model import Stop
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.native import c_library
from edgedec_runtimes.weights.adapters import load_adapters

N_BATCH = 2048
N_UBATCH = 512
_CELLS_STEP = 256
_NO_SLOT, _ABORTED = 1, 2
_NO_POOLING = 0


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What a context is made with.

    Attributes:
        n_cells: Tokens that its KV cache holds, over all sequences.
        n_sequences: How many sequence ids it has.
        logit_rows: Most rows of logits of one decode.
        n_threads: Threads of a forward.
        type_k, type_v: ggml's types of keys and values.
        flash_attention: True, False, or None for llama.cpp's choice.
        embeds: Whether it returns the final states of tokens in place of logits; a text is then one micro-batch.
        around: Returns a block that each forward of so many rows runs in; None for forwards on this machine. With it,
            one token is evaluated first.
        adapters: The adapters of the model, as llama.cpp has loaded them.
    """

    n_cells: int
    n_sequences: int
    logit_rows: int
    n_threads: int
    type_k: int
    type_v: int
    flash_attention: bool | None
    embeds: bool = False
    around: Callable[[int], AbstractContextManager[None]] | None = None
    adapters: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a decode.

    Attributes:
        tokens: int32[n], the token of each row; not read where `vectors` are given, in a decode of their own.
        positions: int32[n], the position of each row; of vectors that turn to places int32[4 * n]: the times of all
            rows, their heights, their widths, and zeros.
        sequences: The sequence ids that each row belongs to; for a chain one tuple that holds for all rows.
        has_logits: bool[n], the rows whose logits are returned.
        vectors: f32[n, width], what stands in place of embeddings.
        mutual: Whether the rows see each other.
    """

    tokens: NDArray[np.int32] | None
    positions: NDArray[np.int32]
    sequences: Sequence[tuple[int, ...]] | tuple[int]
    has_logits: NDArray[np.bool_]
    vectors: NDArray[np.float32] | None = None
    mutual: bool = False

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(self.has_logits)


def context_params(options: ContextOptions) -> Any:
    """Return llama.cpp's parameter struct for these options."""
    api = llama()
    params = api.llama_context_default_params()
    # llama.cpp rounds the cells up to a multiple of this anyway, but would cap the batch at the number given.
    params.n_ctx = -(-options.n_cells // _CELLS_STEP) * _CELLS_STEP
    params.n_batch = N_BATCH
    params.n_ubatch = N_UBATCH
    params.n_seq_max = options.n_sequences
    params.n_outputs_max = max(options.logit_rows, options.n_sequences)
    params.n_outputs_max_per_seq = params.n_outputs_max
    params.n_threads = params.n_threads_batch = options.n_threads
    params.type_k, params.type_v = options.type_k, options.type_v
    params.flash_attn_type = -1 if options.flash_attention is None else int(options.flash_attention)
    params.kv_unified = True  # coupled sequences (trees, forks) need one stream
    params.no_perf = True
    if options.embeds:
        params.embeddings = True
        params.pooling_type = _NO_POOLING
        # Attention that is not causal sees a whole text at once; every token has an output.
        params.n_batch = params.n_ubatch = params.n_outputs_max = params.n_outputs_max_per_seq = params.n_ctx
    return params


class Context:
    """Owns a llama_context, which runs one decode at a time; the model's Stop ends a decode early."""

    def __init__(
        self, model: Any, n_vocab: int, options: ContextOptions, stop: Stop, files: MappedFiles | None
    ) -> None:
        """Make a context of a model whose weights are mapped from `files`, if they are.

        Raises:
            MemoryCapError: There is no memory for it.
        """
        self._api = llama()
        self.options = options
        self._n_vocab = n_vocab
        self._scales = (0.0,) * len(options.adapters)
        self._files = files
        self._stop = stop  # its flag is read at its address
        self._handle = self._api.llama_init_from_model(model, context_params(options))
        if not self._handle:
            raise MemoryCapError(
                f"llama.cpp could not make a context of {options.n_cells} tokens: {last_complaint()}; "
                f"ask for a shorter context"
            )
        strlen = ctypes.cast(_string_length(), ctypes.c_void_p)
        self._api.llama_set_abort_callback(self._handle, strlen, ctypes.addressof(stop.flag))
        self.n_cells = int(self._api.llama_n_ctx(self._handle))
        self.n_batch = int(self._api.llama_n_batch(self._handle))  # smaller in a short context
        self._memory = self._api.llama_get_memory(self._handle)
        self._make_batch(options.n_sequences)
        self._around = options.around or nullcontext
        if options.around is not None:
            with self._around(1):
                self._evaluate([Part(np.zeros(1, np.int32), np.zeros(1, np.int32), (0,), np.ones(1, np.bool_))])
                self._api.llama_synchronize(self._handle)
            self.remove(0, 0)

    def _make_batch(self, n_sequences: int) -> None:
        """Allocate the batch once; its arrays stay at their addresses."""
        n = max(N_BATCH, self.n_batch)
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(4 * n, np.int32)
        self._n_ids = np.ones(n, np.int32)
        self._ids = np.zeros((n, n_sequences), np.int32)
        self._id_rows = (self._ids.ctypes.data + self._ids.strides[0] * np.arange(n)).astype(np.uintp)
        self._wanted = np.zeros(n, np.int8)
        id_row = ctypes.POINTER(ctypes.c_int32)
        self._batch = self._api.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._n_ids, ctypes.c_int32),
            seq_id=ctypes.cast(self._id_rows.ctypes.data, ctypes.POINTER(id_row)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )

    def use(self, scales: tuple[float, ...]) -> None:
        """Let later decodes have adapters at these scales."""
        if scales != self._scales:
            set_adapters(self._handle, self.options.adapters, scales)
            self._scales = scales

    def decode(self, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        """Evaluate parts together.

        Returns:
            For each part the wanted rows of logits, f32[n_wanted, n_vocab]: views that are valid until the next decode.

        Raises:
            ContextFullError: No cells are free; nothing was evaluated.
            CancelledError: The model's Stop was set; drop the rows, as some may have been evaluated.
            ModelFormatError: A file that the weights are mapped from has changed, so that results are of no use.
        """
        with self._around(sum(part.n_rows for part in parts)):
            return [self._logits(start, stop) for start, stop in self._evaluate(parts)]

    def final_states(
        self, tokens: NDArray[np.int32], n_embd: int, vectors: NDArray[np.float32] | None = None, mutual: bool = False
    ) -> NDArray[np.float32]:
        """Evaluate a text, int32[n], alone in a context that embeds, and return f32[n, n_embd], a state for each token.

        `vectors`, f32[n, width], stand in place of the tokens' embeddings where they are given. `mutual` says that all
        tokens see each other, where llama.cpp does not know it of the architecture.

        Raises:
            CancelledError, ContextFullError, ModelFormatError: As decode.
        """
        n = len(tokens)
        if not 0 < n <= self.n_batch:
            raise ContextFullError(f"a text has {n} tokens; the context has room for 1 to {self.n_batch}")
        self.remove(0, 0)
        with self._around(n):
            self._evaluate([Part(tokens, np.arange(n, dtype=np.int32), (0,), np.ones(n, np.bool_), vectors, mutual)])
            address = self._api.llama_get_embeddings(self._handle)
        if not address:
            raise RuntimeUnavailableError(f"llama.cpp returned no states: {last_complaint()}")
        return _view(address, n, n_embd).copy()

    def _evaluate(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Evaluate parts together and return each part's first row and the row after its last; raises as decode."""
        n = 0
        spans = []
        for part in parts:
            spans.append((n, n + part.n_rows))
            self._fill(part, n)
            n += part.n_rows
        self._batch.n_tokens = n
        vectors, mutual = parts[0].vectors, parts[0].mutual
        if vectors is not None:
            self._batch.token, self._batch.embd = None, _pointer(vectors, ctypes.c_float)
        if mutual:
            self._api.llama_set_causal_attn(self._handle, False)
        try:
            code = self._api.llama_decode(self._handle, self._batch)
        finally:
            if mutual:
                self._api.llama_set_causal_attn(self._handle, True)
            self._batch.token, self._batch.embd = _pointer(self._tokens, ctypes.c_int32), None
        if code == _ABORTED:
            raise CancelledError("the forward was cancelled")
        if code == _NO_SLOT:
            raise ContextFullError(
                f"the KV cache of {self.n_cells} tokens, shared by every session and fork on it, is full; "
                f"close sessions or load the model with a longer context"
            )
        if code != 0:
            raise RuntimeUnavailableError(f"llama.cpp failed with code {code}: {last_complaint()}")
        if self._files is not None:
            self._files.check()
        return spans

    def _fill(self, part: Part, start: int) -> None:
        stop = start + part.n_rows
        if part.tokens is not None:
            self._tokens[start:stop] = part.tokens
        self._positions[start : start + len(part.positions)] = part.positions
        self._wanted[start:stop] = part.has_logits
        if isinstance(part.sequences[0], int):
            self._n_ids[start:stop] = 1
            self._ids[start:stop, 0] = part.sequences[0]
            return
        for row, ids in enumerate(part.sequences, start):
            assert isinstance(ids, tuple)
            self._n_ids[row] = len(ids)
            self._ids[row, : len(ids)] = ids

    def _logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the wanted logits of rows [start, stop) of the batch, f32[n_wanted, n_vocab]."""
        rows = np.flatnonzero(self._wanted[start:stop]) + start
        if not len(rows):
            return np.empty((0, self._n_vocab), np.float32)
        size = self._n_vocab * 4
        addresses = [self._address(int(row)) for row in rows]
        if addresses[-1] - addresses[0] == (len(rows) - 1) * size:
            return _view(addresses[0], len(rows), self._n_vocab)
        return np.concatenate([_view(address, 1, self._n_vocab) for address in addresses])

    def _address(self, row: int) -> int:
        address: int | None = self._api.llama_get_logits_ith(self._handle, row)
        if not address:
            raise RuntimeUnavailableError(f"llama.cpp returned no logits for row {row}: {last_complaint()}")
        return address

    def remove(self, sequence: int, start: int) -> bool:
        """Drop a sequence's positions from `start` on; return whether that was done."""
        return bool(self._api.llama_memory_seq_rm(self._memory, sequence, start, -1))

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        """Let the sequence `target` share positions of the sequence `source`; no data is copied."""
        self._api.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def save(self, sequence: int) -> bytes:
        """Return the KV of a sequence."""
        size = self._api.llama_state_seq_get_size(self._handle, sequence)
        buffer = (ctypes.c_uint8 * size)()
        n = self._api.llama_state_seq_get_data(self._handle, buffer, size, sequence)
        return bytes(memoryview(buffer)[:n])

    def load(self, sequence: int, data: bytes) -> bool:
        """Restore what save() returned; return False where llama.cpp refuses the data."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return bool(self._api.llama_state_seq_set_data(self._handle, buffer, len(data), sequence))

    def last_position(self, sequence: int) -> int:
        """Return the highest position that a sequence holds, -1 for an empty sequence."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, sequence))

    def close(self) -> None:
        """Free the context; calling it again does nothing."""
        handle, self._handle = self._handle, None
        if handle:
            self._api.llama_free(handle)


@dataclass(slots=True, eq=False)
class Pool:
    """A context, and what of it no session has taken.

    Attributes:
        pools: All pools of the model; a pool that nobody uses leaves this list, unless it is the first.
        free_ids: Sequence ids that nobody uses.
        n_reserved: Cells that are kept for sessions.
    """

    context: Context
    pools: list["Pool"]
    free_ids: list[int]
    n_reserved: int = 0

    def take(self, n: int) -> tuple[int, ...]:
        """Take `n` sequence ids (CapabilityError where fewer are free)."""
        if len(self.free_ids) < n:
            raise CapabilityError(
                f"{n} more sequences are over the {self.context.options.n_sequences} the model was loaded for; "
                f"close forks, or load with a larger n_parallel or max_rows"
            )
        taken, self.free_ids[:n] = tuple(self.free_ids[:n]), []
        return taken

    def release(self, sequence: int, n_reserved: int) -> None:
        """Take back what a session held."""
        self.free_ids.append(sequence)
        self.n_reserved -= n_reserved
        if len(self.free_ids) == self.context.options.n_sequences and self is not self.pools[0]:
            self.pools.remove(self)
            self.context.close()


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _view(address: int, n_rows: int, n_vocab: int) -> NDArray[np.float32]:
    floats = (ctypes.c_float * (n_rows * n_vocab)).from_address(address)
    return np.ctypeslib.as_array(floats).reshape(n_rows, n_vocab)


def _string_length() -> Any:
    """Return C's strlen, which serves as the abort callback.

    llama.cpp asks between any two operations of a graph whether to stop. A Python callback would take the interpreter's
    lock a thousand times a token; strlen of Stop.flag returns 0 or 1 without the lock.
    """
    return c_library().strlen


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
    opened = []
    for path in paths:
        with captured_log():
            adapter = llama().llama_adapter_lora_init(model, os.fsencode(path))
            complaint = last_complaint()
        if not adapter:
            raise UnsupportedModelError(f"llama.cpp does not load the adapter {path}: {complaint}")
        opened.append(adapter)
    return tuple(opened)


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

"""Our own picture encoder, for projectors of the SigLIP kind (gemma3, idefics3, lfm2), on the cpu runtime's kernels.

Weights are read from the mapped file. Rows have the same bits for any number of threads.
"""

import ctypes
import mmap
import os
import threading
import weakref
from contextlib import ExitStack, nullcontext
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RuntimeUnavailableError, StorageError, as_storage_error
from edgedec.gguf.file import GGUF, FileState, floats, read_gguf
from edgedec.gguf.header import TensorInfo
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_runtimes.cpu.library import (
    INVALID,
    NOT_FINITE,
    UNREADABLE,
    EncoderConfig,
    address,
    check,
    forced_instruction_set,
    instruction_sets,
    last_error,
    native,
    new_handle,
)
from edgedec_runtimes.cpu.mapping import Mapping
from edgedec_runtimes.cpu.native_tables import NUMBERS, numbers
from edgedec_runtimes.pictures.calls import PHASE
from edgedec_runtimes.pictures.contract import Picture, PictureLayout
from edgedec_runtimes.pictures.fewer_rows import RowChooser, best_rows, fewer
from edgedec_runtimes.pictures.header import ProjectorHeader
from edgedec_runtimes.pictures.siglip_file import SiglipFile, Weight, positions, siglip_file, vector_slots
from edgedec_runtimes.pictures.siglip_layout import largest_tile, layout_of, resized_bytes, tiles_of
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.pages import give_back_all

VERSION = "1"
"""The version of what is computed, raised when a bit of a row changes."""

_WHAT = "encoding a picture"
_FIRST_OF_LAYER_MATRICES, _FIRST_OF_LAYER_VECTORS = NUMBERS["EC_ENCODER_Q"], NUMBERS["EC_ENCODER_NORM_1"]


def open_native(
    path: Path,
    header: ProjectorHeader,
    n_threads: int | None = None,
    max_tokens: int | None = None,
    chooser: RowChooser | None = None,
) -> "NativeEncoder | None":
    """Return our encoder for a projector file; None where the file has anything that our encoder does not run.

    Args:
        header: What its header says.
        n_threads: Threads that encode; None for a thread on each core.
        max_tokens: Most rows of a picture, where the kind has such a limit; None for the kind's own.
        chooser: Leaves rows of pictures out; None to keep all.
    """
    try:
        gguf = read_gguf(path)
        file = siglip_file(gguf, header.projector_type, header.n_embd, max_tokens)
        return None if file is None else NativeEncoder(gguf, file, n_threads or usable_cores(), chooser)
    except (ModelFormatError, RuntimeUnavailableError):
        return None


class NativeEncoder:
    """Implements edgedec_runtimes.pictures.contract.PictureEncoder. The weights are mapped with the first picture."""

    def __init__(self, gguf: GGUF, file: SiglipFile, n_threads: int, chooser: RowChooser | None = None) -> None:
        """Prepare; nothing is mapped yet (RuntimeUnavailableError where there is no native library)."""
        isa = forced_instruction_set()
        native()
        self._gguf, self._file, self._n_threads = gguf, file, n_threads
        self._chooser = None if chooser is None or chooser.kept_share == 1 else chooser
        name = isa.decode() if isa is not None else instruction_sets()[0]
        # What a bit of a row depends on, beside the pixels and the projector file.
        self.identity = f"edgedec {VERSION} {name} {file.cutting.max_tokens}"
        if self._chooser is not None:
            self.identity += f" {self._chooser.choice}"
        self._lock = threading.Lock()
        self._weights: _Weights | None = None

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes; see edgedec_runtimes.pictures.contract.PictureEncoder."""
        layout = layout_of(self._file.cutting, width, height)
        return layout if self._chooser is None else fewer(layout, self._chooser.kept_share)

    def encode(
        self, picture: Picture, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the rows of a picture; see edgedec_runtimes.pictures.contract.PictureEncoder.

        Raises:
            RequestError: The picture can't be cut into tiles.
            CancelledError: `cancel` was cancelled.
            ModelFormatError: The file makes rows that are not finite, or was changed.
            MemoryCapError: The system refuses memory.
        """
        n_tiles, made = len(self.layout(picture.width, picture.height).blocks), list[NDArray[np.float32]]()
        with self._lock:
            if self._weights is None:
                self._weights = _Weights(self._gguf, self._file, self._n_threads)
            try:
                for tile in tiles_of(self._file.cutting, picture):
                    check_cancelled(cancel, _WHAT)
                    report_progress(on_progress, PHASE, len(made), n_tiles, "tiles")
                    made.append(self._weights.encode(np.asarray(tile), cancel, self._chooser))
            finally:
                self._weights.let_go()
        report_progress(on_progress, PHASE, n_tiles, n_tiles, "tiles")
        return made

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what is held while a picture is encoded: the mapped weights, and one tile's buffers."""
        name = self._gguf.paths[0].name
        return (
            MemoryTerm("picture encoder", self._gguf.n_bytes, f"{name}, mapped while it is used", grows=True),
            MemoryTerm("encoder's buffers", self._buffer_bytes(), "of one tile", grows=True),
        )

    def close(self) -> None:
        """Free everything; calling it again does nothing."""
        with self._lock:
            if self._weights is not None:
                self._weights.close()
            self._weights = None

    def _buffer_bytes(self) -> int:
        """Return the bytes of the largest tile: native buffers, what goes in and comes out, and the resized picture."""
        cutting = self._file.cutting
        side = largest_tile(cutting) // cutting.patch_size
        n_patches = max(side**2, cutting.max_tokens * cutting.merge**2 if cutting.kind == "lfm2" else 0)
        handle = _create(self._file, self._n_threads)
        try:
            n_bytes = int(native().ec_encoder_buffer_bytes(handle, -(-n_patches // side), side))
        finally:
            native().ec_encoder_destroy(handle)
        numbers = 3 * cutting.patch_size**2 + self._file.n_embd
        if self._chooser is not None:
            n_bytes += 4 * n_patches * (self._file.n_layer + self._file.n_head)
        return n_bytes + 4 * n_patches * (2 * numbers + self._file.n_out // cutting.merge**2) + resized_bytes(cutting)


class _Weights:
    """A mapped projector file, and the native encoder that reads it."""

    def __init__(self, gguf: GGUF, file: SiglipFile, n_threads: int) -> None:
        self._path, self._file = gguf.paths[0], file
        with ExitStack() as opened:
            opened_file = opened.enter_context(_opened(gguf))
            self._map = opened.enter_context(mmap.mmap(opened_file.fileno(), 0, access=mmap.ACCESS_READ))
            data = np.frombuffer(self._map, np.uint8)
            watched = Mapping(address(data), len(data), opened_file.fileno())
            opened.callback(watched.close)
            handle = _create(file, n_threads)
            opened.callback(native().ec_encoder_destroy, handle)
            native().ec_encoder_set_mapping(handle, watched.handle)
            self._handle, start = handle, address(data)
            del data  # the map can't be closed while an array shows its bytes
            for i, weight in enumerate(file.once):
                self._set_matrix(i, 0, weight, start)
            for layer, weights in enumerate(file.layers):
                for i, weight in enumerate(weights):
                    self._set_matrix(_FIRST_OF_LAYER_MATRICES + i, layer, weight, start)
            for layer in (None, *range(file.n_layer)):
                first = 0 if layer is None else _FIRST_OF_LAYER_VECTORS
                for i, (name, _) in enumerate(vector_slots(file, layer), first):
                    if name is not None and name in file.vectors:
                        values = self._floats(file.vectors[name])
                        code = native().ec_encoder_set_vector(handle, i, layer or 0, address(values), values.size)
                        check(code, _WHAT)
            code = native().ec_encoder_finish(handle)
            if code == INVALID:
                raise ModelFormatError(f"{self._path}: {last_error()}; download the file again")
            check(code, _WHAT)
            self._table = self._floats(file.position).reshape(file.side**2, file.n_embd)
            self._finalizer = weakref.finalize(self, opened.pop_all().close)
            self._finalizer.atexit = False  # a daemon thread may be encoding then

    def encode(
        self, pixels: NDArray[np.uint8], cancel: CancelToken | None, chooser: RowChooser | None
    ) -> NDArray[np.float32]:
        """Return f32[n_rows, n_out], the rows of one tile that stay; its pixels are u8[height, width, 3]."""
        file, patch = self._file, self._file.cutting.patch_size
        n_x, n_y = pixels.shape[1] // patch, pixels.shape[0] // patch
        scaled = (pixels.astype(np.float32) / np.float32(255) - np.array(file.mean, np.float32)) / np.array(
            file.std, np.float32
        )
        squares = scaled.reshape(n_y, patch, n_x, patch, 3).transpose(0, 2, 4, 1, 3)
        patches = np.ascontiguousarray(squares).reshape(n_y * n_x, -1)
        places = positions(self._table, file.side, n_x, n_y)
        rows = np.empty((n_x * n_y // file.cutting.merge**2, file.n_out), np.float32)
        flag, mass, flow = c_int32(0), None, None
        if chooser is not None:
            seen = np.empty((file.n_layer if chooser.reads_flow else 1, n_x * n_y), np.float32)
            mass, flow = (None, address(seen)) if chooser.reads_flow else (address(seen), None)

        def stop() -> None:
            flag.value = 1

        with nullcontext() if cancel is None else cancel.calling(stop):
            check_cancelled(cancel, _WHAT)
            read, at, out, stopped = address(patches), address(places), address(rows), ctypes.byref(flag)
            code = native().ec_encoder_encode(self._handle, read, at, n_x, n_y, out, rows.size, stopped, mass, flow)
        if code == NOT_FINITE:
            raise ModelFormatError(f"{self._path}: {last_error()}; the file is damaged: download it again")
        if code == UNREADABLE:
            raise StorageError(
                f"{self._path}: {last_error()}; the picture encoder is mapped from there: check the disk and the file, "
                "and load the model again"
            )
        check(code, f"{self._path}: {_WHAT}")
        if chooser is None:
            return rows
        return rows[best_rows(chooser.worth(seen), n_x, file.cutting.merge, chooser.kept_share)]

    def let_go(self) -> None:
        """Give pages back to the system: those of the file, which stay cached while there is memory, and buffers'."""
        give_back_all(self._map)
        return_free_memory()

    def close(self) -> None:
        """Free the encoder and the mapping."""
        self._finalizer()

    def _floats(self, tensor: TensorInfo) -> NDArray[np.float32]:
        data = np.frombuffer(self._map[tensor.offset : tensor.offset + tensor.n_bytes], np.uint8)
        return np.ascontiguousarray(floats(tensor.type, data))

    def _set_matrix(self, which: int, layer: int, weight: Weight, start: int) -> None:
        kind, place, n_bytes = int(weight.tensor.type), start + weight.tensor.offset, weight.tensor.n_bytes
        shape = weight.n_rows, weight.n_cols, weight.transposed
        code = native().ec_encoder_set_matrix(self._handle, which, layer, kind, *shape, place, n_bytes)
        check(code, _WHAT)


def _create(file: SiglipFile, n_threads: int) -> c_void_p:
    """Return a native encoder without weights, which the caller destroys."""
    n_patch, pools = 3 * file.cutting.patch_size**2, file.cutting.kind == "gemma3"
    config = EncoderConfig(n_patch, file.n_embd, file.n_ff, file.n_layer, file.n_head, file.n_out)
    config.activation, config.merge = numbers("activations", "EC_")[file.activation], file.cutting.merge
    config.pools, config.epsilon, config.merged_epsilon = pools, file.epsilon, file.merged_epsilon
    isa = forced_instruction_set()
    return new_handle(lambda to: native().ec_encoder_create(ctypes.byref(config), n_threads, isa, to), _WHAT)


def _opened(gguf: GGUF) -> BinaryIO:
    """Return a file, opened, that has not changed since its header was read."""
    path = gguf.paths[0]
    with as_storage_error(str(path), "check the disk"):
        file = path.open("rb")
    if FileState.of(path, os.fstat(file.fileno())) != gguf.states[0]:
        file.close()
        raise ModelFormatError(f"{path}: another file stands there since it was opened; load the model again")
    return file

"""From a GGUF to native weights: tiles packed in pieces, vectors copied, a native model made of both."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, RequestError, StorageError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.memory_plan import MemoryTerm
from edgedec.model import LoadOptions
from edgedec.storage.probe_cache import cache_folder
from edgedec_runtimes.cpu.library import (
    KERNEL_ROWS,
    Config,
    address,
    check,
    forced_instruction_set,
    native,
    native_handle,
)
from edgedec_runtimes.cpu.network import EMBEDDING, OUTPUT, Network
from edgedec_runtimes.cpu.tiles.cache import (
    Tiles,
    TileTensor,
    can_be_mapped,
    known_tile_file,
    open_tiles,
    tile_offsets,
    tiles_n_bytes,
)
from edgedec_runtimes.cpu.tiles.streamed_tiles import StreamedTiles
from edgedec_runtimes.cpu.tiles.streaming import StreamPlan, plan_streaming, remembered_rate

LAYOUT = "1"
"""Version of the arrangement in tiles (native/tiles.h); a change makes caches start anew."""

_PIECE_BYTES = 8 << 20
_TILE_ROWS = 16


def tile_tensors(network: Network) -> tuple[TileTensor, ...]:
    """Return the tiles of a network's matrices, in the order in which a forward reads them."""
    library = native()
    return tuple(
        TileTensor(
            t.name,
            library.ec_tile_bytes(t.type, t.shape[1], t.shape[0]),
            unit_bytes=library.ec_tile_bytes(t.type, _TILE_ROWS, t.shape[0]),
        )
        for t in (placed.tensor for placed in network.matrices)
    )


def tile_bytes(gguf: GGUF, network: Network) -> int:
    """Return what all tiles take."""
    return tiles_n_bytes(gguf, tile_tensors(network), layout=LAYOUT)


def stream_plan(gguf: GGUF, network: Network, options: LoadOptions) -> StreamPlan | None:
    """Return how the weights share options.resident_bytes; None where all of them may stay in memory.

    Raises:
        RequestError: It is too little, or there is to be no tile file to read from.
    """
    if options.resident_bytes is None or options.resident_bytes >= tile_bytes(gguf, network):
        return None
    if not has_tile_file(gguf, network, options):
        raise RequestError(
            "resident_bytes is less than the weights take, and there is no tile file to read the rest from, nor can "
            "one be made (tile_cache is off, or its folder can't be written or is full); allow all, or make room"
        )
    offsets = tile_offsets(gguf, tile_tensors(network), layout=LAYOUT)
    return plan_streaming(network, offsets, options.resident_bytes)


def streamed_term(gguf: GGUF, network: Network, options: LoadOptions, plan: StreamPlan) -> MemoryTerm:
    """Return the weights' line of the memory plan; before there are tiles, the speed is that of the model's disk."""
    tiles = known_tile_file(gguf, tile_tensors(network), layout=LAYOUT, cache_dir=cache_folder(options.cache_dir))
    rate = remembered_rate(tiles or gguf.paths[0])
    return plan.memory_term(rate, "the tiles" if tiles else "the model's file, as there are no tiles yet")


def stream_tiles(gguf: GGUF, network: Network, options: LoadOptions, plan: StreamPlan) -> StreamedTiles:
    """Open the tiles in the cache, made first if need be, and read what stays in memory.

    Raises:
        StorageError: They can't be kept on the disk, or read.
        CancelledError, MemoryCapError, ModelFormatError.
    """
    mapped = replace(options, mmap=True)  # but not read: that takes no memory
    with load_tiles(gguf, network, mapped, in_memory=False) as tiles:
        assert tiles.path is not None, "they are in a file"
        return StreamedTiles(tiles.path, tiles.label, plan, on_progress=options.on_progress, cancel=options.cancel)


def load_tiles(gguf: GGUF, network: Network, options: LoadOptions, *, in_memory: bool = True) -> Tiles:
    """Map the tiles from the cache, or copy them; made first if need be, with `in_memory=False` nowhere else."""
    return open_tiles(
        gguf,
        tile_tensors(network),
        _packer(gguf),
        layout=LAYOUT,
        cache_dir=cache_folder(options.cache_dir) if options.tile_cache else None,
        in_memory=in_memory,
        mapped=options.mmap,
        on_progress=options.on_progress,
        cancel=options.cancel,
    )


def _packer(gguf: GGUF) -> Callable[[str, NDArray[np.uint8], int], None]:
    """Return what writes a tensor's tiles from a byte on, reading the file a few rows at a time."""

    def fill(name: str, out: NDArray[np.uint8], start: int) -> None:
        tensor = gguf.tensors[name]
        n_cols, n_all_rows = tensor.shape
        unit_bytes = native().ec_tile_bytes(tensor.type, _TILE_ROWS, n_cols)
        first = start // unit_bytes * _TILE_ROWS
        n_rows = min(len(out) // unit_bytes * _TILE_ROWS, n_all_rows - first)
        row_bytes = tensor.n_bytes // n_all_rows
        step = max(_TILE_ROWS, _PIECE_BYTES // row_bytes // _TILE_ROWS * _TILE_ROWS)
        piece = np.empty(step * row_bytes, np.uint8)
        path = gguf.paths[tensor.shard]
        with _open(path) as file:
            file.seek(tensor.offset + first * row_bytes)
            for begin in range(0, n_rows, step):
                end = min(begin + step, n_rows)
                data = piece[: (end - begin) * row_bytes]
                if file.readinto(data) != len(data):  # type: ignore[attr-defined]  # a buffered binary file
                    raise _shrunk(path, tensor)
                rows = (tensor.type, n_rows, n_cols, begin, end)
                code = native().ec_tile_pack(*rows, address(data), len(data), address(out), len(out))
                check(code, f"packing {name}")

    return fill


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise StorageError(f"{path}: reading failed ({error.strerror or error}); check the disk") from error


def create(network: Network, n_threads: int) -> ctypes.c_void_p:
    """Make a native model without weights."""
    config = Config(*(getattr(network, field[0]) for field in Config._fields_))
    handle = ctypes.c_void_p()
    code = native().ec_model_create(
        ctypes.byref(config), n_threads, KERNEL_ROWS, forced_instruction_set(), ctypes.byref(handle)
    )
    check(code, f"a network of the shape of {network.architecture}")
    return handle


def attach(handle: ctypes.c_void_p, gguf: GGUF, network: Network, tiles: Tiles | StreamedTiles) -> None:
    """Give a native model its weights; the tiles must outlive it."""
    library = native()
    if isinstance(tiles, StreamedTiles):
        tiles.attach(handle, network)
    else:
        _set_matrices(handle, network, tiles)
    for placed in network.vectors:
        values = np.frombuffer(gguf.read_tensor_bytes(placed.tensor.name), "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {placed.tensor.name!r} holds what is no number; download the file again"
            )
        code = library.ec_model_set_vector(handle, placed.which, placed.layer, address(values), len(values))
        check(code, placed.tensor.name)
    check(library.ec_model_finish(handle), str(gguf.paths[0]))


def rarely_read(network: Network) -> TensorInfo | None:
    """Return the embedding matrix where it is not the head's as well: of it a forward reads a row for each token."""
    placed = {matrix.which: matrix.tensor for matrix in network.matrices if matrix.which in (EMBEDDING, OUTPUT)}
    embedding, output = placed[EMBEDDING], placed.get(OUTPUT)
    return None if output is None or output.name == embedding.name else embedding


def mapped_bytes(gguf: GGUF, network: Network) -> int:
    """Return what mapped tiles hold in memory: all but the embedding matrix where its rows are read from the file."""
    rare, n_bytes = rarely_read(network), tile_bytes(gguf, network)
    if rare is None:
        return n_bytes
    return n_bytes - next(tensor.n_bytes for tensor in tile_tensors(network) if tensor.name == rare.name)


def are_mapped(gguf: GGUF, network: Network, options: LoadOptions) -> bool:
    """Tell whether load_tiles will map a file."""
    return options.mmap and has_tile_file(gguf, network, options)


def has_tile_file(gguf: GGUF, network: Network, options: LoadOptions) -> bool:
    """Tell whether load_tiles will have a file of tiles: there is one, or one can be made."""
    tensors, folder = tile_tensors(network), cache_folder(options.cache_dir)
    return options.tile_cache and can_be_mapped(gguf, tensors, layout=LAYOUT, cache_dir=folder)


def _set_matrices(handle: ctypes.c_void_p, network: Network, tiles: Tiles) -> None:
    for placed in network.matrices:
        tensor, data = placed.tensor, tiles[placed.tensor.name]
        code = native().ec_model_set_matrix(
            *(handle, placed.which, placed.layer, tensor.type, tensor.shape[1], tensor.shape[0]),
            *(address(data), len(data)),
        )
        check(code, tensor.name)
    if tiles.mapping is not None:
        native().ec_model_set_mapping(handle, tiles.mapping.handle)
    rare = rarely_read(network)
    if rare is not None and tiles.file is not None:
        fd, place = tiles.file.fileno(), tiles.head.places()[rare.name]
        code = native().ec_model_read_rows(handle, native_handle(fd), os.fstat(fd).st_size, place)
        check(code, rare.name)


def _shrunk(path: Path, tensor: TensorInfo) -> ModelFormatError:
    return ModelFormatError(
        f"{path}: tensor {tensor.name!r} reaches beyond the file's end; the file got shorter since it was opened: "
        "download or copy it again"
    )

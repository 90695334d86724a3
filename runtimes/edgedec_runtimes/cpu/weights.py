"""From a GGUF to native weights: tiles packed in pieces, vectors copied, a native model made of both."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, StorageError
from edgedec.gguf import GGUF, TensorInfo
from edgedec.model import LoadOptions
from edgedec.remembered import cache_folder
from edgedec_runtimes.cpu.library import Config, address, check, forced_instruction_set, native
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.tile_cache import Tiles, TileTensor, open_tiles, tiles_n_bytes

LAYOUT = "1"
"""Version of the arrangement in tiles (native/tiles.h); a change makes caches start anew."""

MAX_ROWS = 256
"""Most rows that go through the layers together."""

_PIECE_BYTES = 8 << 20
_TILE_ROWS = 16


def tile_tensors(network: Network) -> tuple[TileTensor, ...]:
    """Return the tiles of a network's matrices, in the order in which a forward reads them."""
    library = native()
    return tuple(
        TileTensor(t.name, library.ec_tile_bytes(t.type, t.shape[1], t.shape[0]))
        for t in (placed.tensor for placed in network.matrices)
    )


def tile_bytes(gguf: GGUF, network: Network) -> int:
    """Return what all tiles take."""
    return tiles_n_bytes(gguf, tile_tensors(network), layout=LAYOUT)


def load_tiles(gguf: GGUF, network: Network, options: LoadOptions) -> Tiles:
    """Map the tiles from the cache, or make them."""
    return open_tiles(
        gguf,
        tile_tensors(network),
        _packer(gguf),
        layout=LAYOUT,
        cache_dir=cache_folder(options.cache_dir) if options.tile_cache else None,
        on_progress=options.on_progress,
        cancel=options.cancel,
    )


def _packer(gguf: GGUF) -> Callable[[str, NDArray[np.uint8]], None]:
    """Return what writes one tensor's tiles, reading the file a few rows at a time."""

    def fill(name: str, out: NDArray[np.uint8]) -> None:
        tensor = gguf.tensors[name]
        n_cols, n_rows = tensor.shape
        row_bytes = tensor.n_bytes // n_rows
        step = max(_TILE_ROWS, _PIECE_BYTES // row_bytes // _TILE_ROWS * _TILE_ROWS)
        piece = np.empty(step * row_bytes, np.uint8)
        path = gguf.paths[tensor.shard]
        with _open(path) as file:
            file.seek(tensor.offset)
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
        ctypes.byref(config), n_threads, MAX_ROWS, forced_instruction_set(), ctypes.byref(handle)
    )
    check(code, f"a network of the shape of {network.architecture}")
    return handle


def attach(handle: ctypes.c_void_p, gguf: GGUF, network: Network, tiles: Tiles) -> None:
    """Give a native model its weights; the tiles must outlive it."""
    library = native()
    for placed in network.matrices:
        tensor, data = placed.tensor, tiles[placed.tensor.name]
        code = library.ec_model_set_matrix(
            *(handle, placed.which, placed.layer, tensor.type, tensor.shape[1], tensor.shape[0]),
            *(address(data), len(data)),
        )
        check(code, tensor.name)
    for placed in network.vectors:
        values = np.frombuffer(gguf.read_tensor_bytes(placed.tensor.name), "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {placed.tensor.name!r} holds what is no number; download the file again"
            )
        code = library.ec_model_set_vector(handle, placed.which, placed.layer, address(values), len(values))
        check(code, placed.tensor.name)
    check(library.ec_model_finish(handle), str(gguf.paths[0]))


def _shrunk(path: Path, tensor: TensorInfo) -> ModelFormatError:
    return ModelFormatError(
        f"{path}: tensor {tensor.name!r} reaches beyond the file's end; the file got shorter since it was opened: "
        "download or copy it again"
    )

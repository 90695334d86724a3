"""Reading a GGUF that a tile file took the place of: its header, and its tensors in the GGUF's own bytes."""

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.header import Header, TensorInfo, read_header
from edgedec.gguf.tile_header import HEADER_NAME, TileHeader, checked_header
from edgedec.gguf.untiled import TILE_ROWS, untiled

_PIECE_BYTES = 1 << 20


def read_tiled_header(file: BinaryIO, path: Path) -> Header:
    """Return the checked header of the GGUF that a tile file took the place of.

    Raises:
        ModelFormatError: The tile file is damaged, or holds no header.
        UnsupportedModelError: As read_header.
    """
    tiles = checked_header(file, path.name)
    if not tiles.n_plain:
        raise ModelFormatError(f"{path}: a file of tiles without the rest of the model; pass the model's .gguf file")
    file.seek(tiles.places()[HEADER_NAME])
    raw = file.read(tiles.tensors[tiles.n_matrices].n_bytes)
    if hashlib.sha256(raw).hexdigest() != tiles.header_hash:
        raise damaged_model(path, "its header has another checksum")
    return replace(read_header(io.BytesIO(raw), tiles.n_model_bytes, str(path)), tiles=tiles)


def read_tiled(file: BinaryIO, header: TileHeader, tensor: TensorInfo, start: int, n_bytes: int) -> bytes:
    """Return `n_bytes` bytes of a tensor from its byte `start` on, as the GGUF held them; fewer where the file ends.

    Raises:
        ModelFormatError: The file does not hold the tensor.
        OSError: The file can't be read.
    """
    places = header.places()
    if tensor.name not in places:
        raise ModelFormatError(f"{file.name}: it has no tensor {tensor.name!r}; download the model again")
    place = places[tensor.name]
    if tensor.name in {plain.name for plain in header.tensors[header.n_matrices :]}:
        file.seek(place + start)
        return file.read(n_bytes)
    n_cols = tensor.shape[0]
    tile_bytes = TILE_ROWS * (tensor.n_bytes // (tensor.n_elements // n_cols))
    first, end = start // tile_bytes, -(-(start + n_bytes) // tile_bytes)
    found, step = bytearray(), max(1, _PIECE_BYTES // tile_bytes)
    for begin in range(first, end, step):
        file.seek(place + begin * tile_bytes)
        tiles = file.read((min(end, begin + step) - begin) * tile_bytes)
        if len(tiles) % tile_bytes:
            return b""
        found += untiled(tensor.type, np.frombuffer(tiles, np.uint8), n_cols).data.cast("B")
    begin = start - first * tile_bytes
    return bytes(memoryview(found)[begin : begin + n_bytes])


def damaged_model(path: Path, what: str) -> ModelFormatError:
    """Return the error to raise where the tile file that is all there is of a model is damaged."""
    return ModelFormatError(f"{path}: it is damaged: {what}; download the model again with edgedec pull --force")

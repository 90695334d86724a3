"""Reading a GGUF that a tile file took the place of: its header, and its tensors in the GGUF's own bytes.

The core finds `read_form` by its entry point (edgedec.gguf.file), so whatever reads GGUFs reads tile files too.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, HEADER_NAME
from edgedec.gguf.header import TensorInfo
from edgedec_runtimes.tile_files.header import TileHeader, checked_header
from edgedec_runtimes.tile_files.record import TILE_MAGIC
from edgedec_runtimes.tile_files.untiled import TILE_ROWS, untiled

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TiledForm:
    """The form of a file of tiles, as edgedec.gguf.file.GGUFForm describes it.

    Attributes:
        tiles: The file's header.
        places: The byte at which each tensor begins, by its name.
    """

    tiles: TileHeader
    places: Mapping[str, int] = field(repr=False)

    @property
    def n_model_bytes(self) -> int:
        """The size of the GGUF."""
        return self.tiles.n_model_bytes

    def read(self, file: BinaryIO, tensor: TensorInfo, start: int, n_bytes: int) -> bytes:
        """Return `n_bytes` bytes of a tensor from its byte `start` on as the GGUF held them, fewer where the file ends.

        Raises:
            ModelFormatError: The file does not hold the tensor.
            OSError: The file can't be read.
        """
        if tensor.name not in self.places:
            raise ModelFormatError(f"{file.name}: it has no tensor {tensor.name!r}; download the model again")
        place = self.places[tensor.name]
        if place >= self.places[HEADER_NAME]:  # what is plain follows the tiles, and begins with the header
            file.seek(place + start)
            return file.read(n_bytes)
        return _read_matrix(file, place, tensor, start, n_bytes)


def tiles_of(gguf: GGUF) -> TileHeader | None:
    """Return the header of the tile file that took the place of a GGUF; None for a GGUF."""
    return gguf.form.tiles if isinstance(gguf.form, TiledForm) else None


def read_form(file: BinaryIO, path: Path) -> tuple[TiledForm, bytes] | None:
    """Return the form of a tile file, and the header of the GGUF that it took the place of; None for any other file.

    Args:
        file: The open file, at its start.
        path: Its path, for messages.

    Raises:
        ModelFormatError: The tile file is damaged, or holds no header.
        OSError: The file can't be read.
    """
    if file.read(len(TILE_MAGIC)) != TILE_MAGIC:
        return None
    file.seek(0)
    tiles = checked_header(file, path.name)
    if not tiles.n_plain:
        raise ModelFormatError(f"{path}: a file of tiles without the rest of the model; pass the model's .gguf file")
    places = tiles.places()
    file.seek(places[HEADER_NAME])
    raw = file.read(tiles.tensors[tiles.n_matrices].n_bytes)
    if hashlib.sha256(raw).hexdigest() != tiles.header_hash:
        raise damaged_model(path, "its header has another checksum")
    return TiledForm(tiles, places), raw


def _read_matrix(file: BinaryIO, place: int, tensor: TensorInfo, start: int, n_bytes: int) -> bytes:
    """Return bytes of a matrix whose tiles begin at the byte `place` of a file; fewer where the file ends."""
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

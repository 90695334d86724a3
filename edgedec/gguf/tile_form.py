"""Reading a GGUF that a tile file took the place of: its header, and its tensors in the GGUF's own bytes.

A tile is 16 rows of a matrix, block by block of the file's columns. This file turns the arrangement back, for the types
whose bits tiles hold as they are; runtimes/edgedec_runtimes/cpu/native/weights/tiles.h describes it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.gguf.header import TensorInfo
from edgedec.gguf.places import TILE_MAGIC
from edgedec.gguf.tensor_types import GGMLType
from edgedec.gguf.tile_header import HEADER_NAME, REMEDY, TileHeader, checked_header

TILE_ROWS = 16
U8 = NDArray[np.uint8]
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TiledForm:
    """What a tile file holds, and how the bytes of the GGUF whose place it took are read from it.

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

        The header of the GGUF is read under the name HEADER_NAME.

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


def read_form(file: BinaryIO, path: Path) -> tuple[TiledForm, bytes] | None:
    """Return the form of a tile file, and the header of the GGUF that it took the place of; None for any other file.

    Args:
        path: Its path, for messages.

    Raises:
        ModelFormatError: The tile file is damaged, or holds no header.
        OSError: The file can't be read.
    """
    file.seek(0)
    if file.read(len(TILE_MAGIC)) != TILE_MAGIC:
        return None
    file.seek(0)
    try:
        tiles = checked_header(file, path.name)
    except ModelFormatError as error:
        raise damaged_model(path, error) from error
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
    data, step = bytearray(), max(1, _PIECE_BYTES // tile_bytes)
    for begin in range(first, end, step):
        file.seek(place + begin * tile_bytes)
        tiles = file.read((min(end, begin + step) - begin) * tile_bytes)
        if len(tiles) % tile_bytes:
            return b""
        data += untiled(tensor.type, np.frombuffer(tiles, np.uint8), n_cols).data.cast("B")
    begin = start - first * tile_bytes
    return bytes(memoryview(data)[begin : begin + n_bytes])


def damaged_model(path: Path, what: object) -> ModelFormatError:
    """Return the error to raise where the tile file that is all there is of a model is damaged."""
    what = f"it is damaged: {str(what).removesuffix(f'; {REMEDY}')}"  # there is nothing to make them of
    return ModelFormatError(f"{path}: {what}; download the model again with edgedec pull --force")


def untiled(kind: GGMLType, tiles: U8, n_cols: int) -> U8:
    """Return whole tiles as rows of the file, uint8[n, row_bytes], n a multiple of 16; the last may be padding.

    Args:
        kind: A type of UNTILED.
        tiles: uint8[n / 16 * n_cols / block_size * 16 * block_bytes], some tiles one after another.
        n_cols: The columns of the matrix.
    """
    n_blocks = n_cols // kind.block_size
    blocks = tiles.reshape(-1, TILE_ROWS * kind.block_bytes)
    rows = UNTILED[kind](blocks).reshape(-1, n_blocks, TILE_ROWS, kind.block_bytes)
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1, n_blocks * kind.block_bytes)


def _plain(n_bytes: int) -> Callable[[U8], U8]:
    return lambda blocks: blocks.reshape(-1, TILE_ROWS, n_bytes)


def _columns(part: U8, width: int) -> U8:
    """Return uint8[n, 16, width * k] for k vectors that each hold `width` bytes of 16 rows."""
    n = len(part)
    k = part.shape[1] // (TILE_ROWS * width)
    return part.reshape(n, k, TILE_ROWS, width).transpose(0, 2, 1, 3).reshape(n, TILE_ROWS, k * width)


def _simple(*, minimum: bool, fifth: bool) -> Callable[[U8], U8]:
    def rows(blocks: U8) -> U8:
        scales = 256 + 64 * fifth
        parts = [_columns(blocks[:, scales : scales + 32], 2)]
        if minimum:
            parts.append(_columns(blocks[:, scales + 32 :], 2))
        if fifth:
            parts.append(np.packbits(_fifths(blocks[:, 256:320]), axis=-1, bitorder="little"))
        return np.concatenate([*parts, _columns(blocks[:, :256], 4)], axis=2)

    return rows


def _fifths(part: U8) -> U8:
    """Return uint8[n, 16, 32] of zeros and ones, by column, from the fifth bits of 16 rows."""
    bits = np.unpackbits(part.reshape(-1, TILE_ROWS, 4, 1), axis=3, bitorder="little")
    return bits.transpose(0, 1, 3, 2).reshape(-1, TILE_ROWS, 32)


def _q8_0(blocks: U8) -> U8:
    return np.concatenate([_columns(blocks[:, 512:], 2), _columns(blocks[:, :512], 4)], axis=2)


def _joined(low: U8, high: U8) -> U8:
    """Return bytes with the nibbles of 32 columns in their low halves and of 32 others in their high halves.

    Both are given as tiles have them: uint8[..., 16], columns 0 to 15 in the low halves and 16 to 31 in the high ones.
    """
    first = (low & 15) | (high << np.uint8(4))
    second = (low >> np.uint8(4)) | (high & 240)
    return np.concatenate([first, second], axis=-1)


def _q45_k(*, fifth: bool) -> Callable[[U8], U8]:
    def rows(blocks: U8) -> U8:
        n, step = len(blocks), 256 + 64 * fifth
        groups = blocks[:, : 8 * step].reshape(n, 8, step)
        scales = blocks[:, 8 * step :]
        nibbles = _columns(groups[:, :, :256].reshape(8 * n, 256), 4).reshape(n, 8, TILE_ROWS, 16)
        low = _joined(nibbles[:, 0::2], nibbles[:, 1::2]).transpose(0, 2, 1, 3).reshape(n, TILE_ROWS, 128)
        parts = [_columns(scales[:, 192:224], 2), _columns(scales[:, 224:256], 2), _columns(scales[:, :192], 1)]
        if fifth:
            bits = _fifths(groups[:, :, 256:].reshape(8 * n, 64)).reshape(n, 8, TILE_ROWS, 32)
            parts.append(np.packbits(bits, axis=1, bitorder="little")[:, 0])
        return np.concatenate([*parts, low], axis=2)

    return rows


def _q6_k(blocks: U8) -> U8:
    n = len(blocks)
    groups = blocks[:, :3072].reshape(n, 8, 384)
    nibbles = _columns(groups[:, :, :256].reshape(8 * n, 256), 4).reshape(n, 2, 2, 2, TILE_ROWS, 16)
    low = _joined(nibbles[:, :, 0], nibbles[:, :, 1]).transpose(0, 3, 1, 2, 4).reshape(n, TILE_ROWS, 128)
    twos = groups[:, :, 256:].reshape(n, 2, 4, 2, TILE_ROWS, 4)
    high = np.empty((n, 2, 2, 4, TILE_ROWS, 4), np.uint8)  # by half of the block, by half and group of 32 columns
    for g in range(4):
        moved = [(twos[:, :, i] >> np.uint8(2 * g) & 3) << np.uint8(2 * i) for i in range(4)]
        high[:, :, :, g] = moved[0] | moved[1] | moved[2] | moved[3]
    columns = high.transpose(0, 4, 1, 2, 3, 5).reshape(n, TILE_ROWS, 64)
    return np.concatenate([low, columns, _columns(blocks[:, 3072:3328], 1), _columns(blocks[:, 3328:], 2)], axis=2)


def _q1_0(blocks: U8) -> U8:
    codes = [np.packbits(_fifths(blocks[:, i : i + 64]), axis=-1, bitorder="little") for i in range(0, 256, 64)]
    return np.concatenate([_columns(blocks[:, 256:], 2), *codes], axis=2)


def _q2_0(blocks: U8) -> U8:
    twos = blocks[:, :256].reshape(-1, 4, TILE_ROWS, 4)  # bits 2 g and 2 g + 1 of each byte are column 4 g + its place
    by_column = [twos >> np.uint8(2 * g) & 3 for g in range(4)]
    four = np.stack(by_column, axis=3).transpose(0, 2, 1, 3, 4)  # by row, by 16 columns, by group, by place
    codes = np.bitwise_or.reduce(four << np.array([0, 2, 4, 6], np.uint8), axis=4).reshape(-1, TILE_ROWS, 16)
    return np.concatenate([_columns(blocks[:, 256:], 2), codes], axis=2)


UNTILED: Mapping[GGMLType, Callable[[U8], U8]] = {
    GGMLType.F32: _plain(4),
    GGMLType.F16: _plain(2),
    GGMLType.BF16: _plain(2),
    GGMLType.Q4_0: _simple(minimum=False, fifth=False),
    GGMLType.Q4_1: _simple(minimum=True, fifth=False),
    GGMLType.Q5_0: _simple(minimum=False, fifth=True),
    GGMLType.Q5_1: _simple(minimum=True, fifth=True),
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q45_k(fifth=False),
    GGMLType.Q5_K: _q45_k(fifth=True),
    GGMLType.Q6_K: _q6_k,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
}
"""By type, what makes blocks of the file, uint8[n, 16, block_bytes], of blocks of tiles, uint8[n, 16 * block_bytes]."""

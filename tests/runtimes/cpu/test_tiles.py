"""Tiles hold a matrix's bits and nothing else: packed and unpacked again, they are the GGUF's bytes."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny_quantized import TILE_TYPES

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.model import LoadOptions
from edgedec_runtimes.cpu.library import INVALID, OK, address, native
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.weights import load_tiles

U8 = NDArray[np.uint8]
ROWS = (1, 15, 16, 17, 32, 70)


def matrix(kind: GGMLType, n_rows: int, n_cols: int, seed: int = 0) -> U8:
    """Return random bytes in the place of a matrix."""
    n_bytes = n_rows * n_cols // kind.block_size * kind.block_bytes
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def pack(kind: GGMLType, n_rows: int, n_cols: int, data: U8, ranges: list[tuple[int, int]] | None = None) -> U8:
    """Return the tiles of a matrix, packed range by range over memory that is not clean."""
    tiles = np.full(native().ec_tile_bytes(kind, n_rows, n_cols), 0xA5, np.uint8)
    row_bytes = len(data) // n_rows
    for begin, end in ranges or [(0, n_rows)]:
        rows = data[begin * row_bytes : end * row_bytes]
        shape = (kind, n_rows, n_cols, begin, end)
        assert native().ec_tile_pack(*shape, address(rows), len(rows), address(tiles), len(tiles)) == OK
    return tiles


def unpack(kind: GGMLType, n_rows: int, n_cols: int, tiles: U8, n_bytes: int) -> U8:
    """Return a matrix's bytes again."""
    data = np.full(n_bytes, 0x5A, np.uint8)
    assert native().ec_tile_unpack(kind, n_rows, n_cols, address(tiles), len(tiles), address(data), len(data)) == OK
    return data


@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("name", TILE_TYPES)
def test_unpacked_tiles_are_the_matrix_again(name: str, n_rows: int) -> None:
    """Every byte comes back, whatever the bytes are."""
    kind = GGMLType[name]
    for n_cols in (kind.block_size, 3 * kind.block_size):
        data = matrix(kind, n_rows, n_cols)
        tiles = pack(kind, n_rows, n_cols, data)
        np.testing.assert_array_equal(unpack(kind, n_rows, n_cols, tiles, len(data)), data)


@pytest.mark.parametrize("name", TILE_TYPES)
def test_tiles_of_whole_rows_of_tiles_take_the_bytes_of_the_file(name: str) -> None:
    """Where the rows are a multiple of 16 nothing is added; else the last tile is filled up."""
    kind = GGMLType[name]
    row_bytes = 2 * kind.block_bytes
    for n_rows in (16, 32, 4096):
        assert native().ec_tile_bytes(kind, n_rows, 2 * kind.block_size) == n_rows * row_bytes
    assert native().ec_tile_bytes(kind, 17, 2 * kind.block_size) == 32 * row_bytes


@pytest.mark.parametrize("name", TILE_TYPES)
def test_rows_that_fill_up_a_tile_are_zero(name: str) -> None:
    """What a matrix of 17 rows has in its tiles is what one with 15 more rows of zero bytes has."""
    kind = GGMLType[name]
    data = matrix(kind, 17, 2 * kind.block_size)
    padded = np.zeros(len(data) // 17 * 32, np.uint8)
    padded[: len(data)] = data
    tiles = pack(kind, 17, 2 * kind.block_size, data)
    np.testing.assert_array_equal(tiles, pack(kind, 32, 2 * kind.block_size, padded))


@pytest.mark.parametrize("name", TILE_TYPES)
def test_packing_in_ranges_equals_packing_at_once(name: str) -> None:
    """The order of the ranges is no matter either."""
    kind = GGMLType[name]
    data = matrix(kind, 70, kind.block_size)
    at_once = pack(kind, 70, kind.block_size, data)
    pieces = [(64, 70), (0, 16), (48, 64), (16, 48)]
    np.testing.assert_array_equal(pack(kind, 70, kind.block_size, data, pieces), at_once)


@pytest.mark.parametrize(
    ("kind", "n_rows", "n_cols"),
    [
        *((GGMLType.Q4_K, 16, 128), (GGMLType.Q8_0, 16, 33), (GGMLType.F32, 0, 16), (GGMLType.F32, 16, 0)),
        *((GGMLType.F32, -16, 16), (GGMLType.F32, 16, -16), (GGMLType.F32, 2**31, 16), (GGMLType.F32, 16, 2**31)),
        *((GGMLType.Q2_K, 16, 256), (GGMLType.F64, 16, 16), (GGMLType.IQ4_NL, 16, 32)),
        *((-1, 16, 256), (4, 16, 256), (2**31 - 1, 16, 256), (GGMLType.F32, 2**62, 2**62)),
    ],
)
def test_types_and_shapes_without_tiles_have_no_size(kind: int, n_rows: int, n_cols: int) -> None:
    """0 bytes, and packing is refused with a reason."""
    data = np.zeros(64, np.uint8)
    assert native().ec_tile_bytes(kind, n_rows, n_cols) == 0
    shape = (kind, n_rows, n_cols, 0, 16)
    assert native().ec_tile_pack(*shape, address(data), 64, address(data), 0) == INVALID
    assert native().ec_last_error() == b"a matrix of this type or shape has no tiles"
    assert native().ec_tile_unpack(kind, n_rows, n_cols, address(data), 64, address(data), 64) == INVALID


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [
        (-16, 16, "the rows to pack are out of range"),
        (0, 0, "the rows to pack are out of range"),
        (16, 0, "the rows to pack are out of range"),
        (8, 16, "the rows to pack are out of range"),
        (0, 8, "the rows to pack are out of range"),
        (0, 41, "the rows to pack are out of range"),
        (48, 64, "the rows to pack are out of range"),
        (2**62, 2**63 - 1, "the rows to pack are out of range"),
        (16, 40, "the rows have another size"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(begin: int, end: int, reason: str) -> None:
    """A matrix of 40 rows is packed from a multiple of 16 to one, or to its end, and with as many bytes."""
    data, tiles = np.zeros(16 * 34, np.uint8), np.zeros(48 * 34, np.uint8)
    shape = (GGMLType.Q8_0, 40, 32, begin, end)
    assert native().ec_tile_pack(*shape, address(data), len(data), address(tiles), len(tiles)) == INVALID
    assert native().ec_last_error().decode() == reason
    assert not tiles.any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Tiles and matrix must have their size to the byte."""
    data, tiles = np.zeros(40 * 34, np.uint8), np.zeros(48 * 34, np.uint8)
    matrix_shape = (GGMLType.Q8_0, 40, 32)
    for n_data, n_tiles in ((len(data), len(tiles) - 1), (len(data) - 1, len(tiles)), (0, len(tiles))):
        places = (address(tiles), n_tiles, address(data), n_data)
        assert native().ec_tile_unpack(*matrix_shape, *places) == INVALID
        assert native().ec_tile_pack(*matrix_shape, 0, 40, address(data), n_data, address(tiles), n_tiles) == INVALID


@pytest.mark.model
def test_the_tiles_of_a_real_model_are_its_bytes(smollm_path: Path) -> None:
    """Every matrix of SmolLM2 135M is rebuilt from its tiles, which take at most 2 % more than the file."""
    gguf = read_gguf(smollm_path)
    network = read_network(gguf)
    with_tiles = {placed.tensor.name: placed.tensor for placed in network.matrices}
    tiles = load_tiles(gguf, network, LoadOptions())
    try:
        for name, tensor in with_tiles.items():
            expected = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)
            n_cols, n_rows = tensor.shape
            np.testing.assert_array_equal(unpack(tensor.type, n_rows, n_cols, tiles[name], len(expected)), expected)
        n_tiles, n_file = sum(len(tiles[name]) for name in with_tiles), sum(t.n_bytes for t in with_tiles.values())
        assert n_file <= n_tiles <= 1.02 * n_file
    finally:
        tiles.close()

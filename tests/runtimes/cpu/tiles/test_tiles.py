"""Tiles hold a matrix's bits and nothing else: packed and unpacked again, they are the GGUF's bytes.

As floats, weights of types with codes and look-up grids are what other code makes of them.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.coded_tiles import BYTES, canonical, rebuilt
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.plain_values import plain_values
from support.models.random_blocks import random_blocks
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import FILE_SIZED, TILE_TYPES, WIDER, Tiny, tiny_metadata, tiny_tensors

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet
from edgedec_runtimes.cpu.library import INVALID, OK, address, native
from edgedec_runtimes.cpu.network import read_network
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.tiles.cache import open_tiles
from edgedec_runtimes.cpu.weights import tile_job

U8 = NDArray[np.uint8]
ROWS = (1, 15, 16, 17, 32, 70)


def matrix(kind: GGMLType, n_rows: int, n_cols: int, seed: int = 0) -> U8:
    """Return random bytes in the place of a matrix; of TQ1_0 such bytes as a quantizer writes."""
    n_bytes = n_rows * n_cols // kind.block_size * kind.block_bytes
    data = np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)
    return canonical(data) if kind is GGMLType.TQ1_0 else data


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
    """Return a matrix's bytes again, by the layout that native/weights/tiles.h describes."""
    n_blocks, n_block_bytes = n_cols // kind.block_size, kind.block_bytes
    blocks = tiles.reshape(-1, BYTES.get(kind, 16 * n_block_bytes))
    if kind in BYTES:
        rows = rebuilt(kind, blocks)
    elif kind.block_size == 1:
        rows = blocks.reshape(len(blocks), 16, n_block_bytes)
    elif kind is GGMLType.Q8_0:
        values = blocks[:, :512].reshape(-1, 8, 16, 4).transpose(0, 2, 1, 3).reshape(-1, 16, 32)
        rows = np.concatenate([by_row(blocks[:, 512:], 2), values], axis=2)
    elif kind.block_size == 32:
        rows = unpacked_32(kind, blocks)
    else:
        rows = unpacked_256(kind, blocks)
    by_tile = rows.reshape(-1, n_blocks, 16, n_block_bytes).transpose(0, 2, 1, 3)
    return by_tile.reshape(-1, n_blocks * n_block_bytes)[:n_rows].reshape(-1)


def by_row(data: U8, n_each: int) -> U8:
    """Return [blocks, 16, n_each] of values of n_each bytes that stand row after row."""
    return data.reshape(len(data), 16, n_each)


def columns(part: U8, *, fifth: bool = False, two: bool = False) -> U8:
    """Return [blocks, 16, 32]: the numbers in the nibbles of a part of a tile, with the bits behind them."""
    nibbles = part[:, :256].reshape(-1, 4, 16, 4).transpose(0, 2, 1, 3).reshape(-1, 16, 16)
    numbers = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    groups = np.arange(8)[:, None]
    if fifth:
        bits = part[:, 256:320].reshape(-1, 16, 1, 4)
        numbers |= ((bits >> groups & 1) << 4).astype(np.uint8).reshape(-1, 16, 32)
    if two:
        bits = part[:, 256:384].reshape(-1, 2, 16, 1, 4).transpose(0, 2, 1, 3, 4)
        numbers |= ((bits >> 2 * groups[:4] & 3) << 4).astype(np.uint8).reshape(-1, 16, 32)
    return numbers


def unpacked_32(kind: GGMLType, blocks: U8) -> U8:
    """Return [blocks, 16, bytes] of Q4_0, Q4_1, Q5_0 or Q5_1: the scales, the fifth bits, the nibbles."""
    fifth, n_scales = kind in (GGMLType.Q5_0, GGMLType.Q5_1), 1 + (kind in (GGMLType.Q4_1, GGMLType.Q5_1))
    q, scales = columns(blocks, fifth=fifth), blocks[:, 320 if fifth else 256 :]
    parts = [by_row(scales[:, 32 * i : 32 * i + 32], 2) for i in range(n_scales)]
    if fifth:
        parts.append(np.packbits(q >> 4, axis=2, bitorder="little"))
    return np.concatenate([*parts, q[..., :16] & 15 | (q[..., 16:] & 15) << 4], axis=2)


def unpacked_256(kind: GGMLType, blocks: U8) -> U8:
    """Return [blocks, 16, bytes] of Q4_K, Q5_K or Q6_K."""
    fifth, two = kind is GGMLType.Q5_K, kind is GGMLType.Q6_K
    step = 384 if two else 320 if fifth else 256
    q = np.stack([columns(blocks[:, step * s : step * s + step], fifth=fifth, two=two) for s in range(8)], axis=2)
    low, high, rest = q & 15, q >> 4, blocks[:, 8 * step :]
    if two:
        low, high = low.reshape(*low.shape[:2], 2, 2, 64), high.reshape(*high.shape[:2], 2, 4, 32)
        scales = rest[:, :256].reshape(-1, 16, 16).transpose(0, 2, 1)
        twos = sum(high[..., i, :] << 2 * i for i in range(4)).reshape(-1, 16, 64)  # type: ignore[union-attr]
        ql = (low[..., 0, :] | low[..., 1, :] << 4).reshape(-1, 16, 128)
        return np.concatenate([ql, twos, scales, by_row(rest[:, 256:], 2)], axis=2)
    scales = rest[:, :192].reshape(-1, 12, 16).transpose(0, 2, 1)
    parts = [by_row(rest[:, 192:224], 2), by_row(rest[:, 224:], 2), scales]
    if fifth:
        parts.append(np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=2))
    return np.concatenate([*parts, (low[:, :, ::2] | low[:, :, 1::2] << 4).reshape(-1, 16, 128)], axis=2)


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("name", TILE_TYPES)
def test_unpacked_tiles_are_the_matrix_again(name: str, n_rows: int) -> None:
    """Every byte comes back, whatever the bytes are."""
    kind = GGMLType[name]
    for n_cols in (kind.block_size, 3 * kind.block_size):
        data = matrix(kind, n_rows, n_cols)
        tiles = pack(kind, n_rows, n_cols, data)
        np.testing.assert_array_equal(unpack(kind, n_rows, n_cols, tiles, len(data)), data)


@pytest.mark.parametrize("name", FILE_SIZED)
def test_tiles_of_whole_rows_of_tiles_take_the_bytes_of_the_file(name: str) -> None:
    """Where the rows are a multiple of 16 nothing is added; else the last tile is filled up."""
    kind = GGMLType[name]
    row_bytes = 2 * kind.block_bytes
    for n_rows in (16, 32, 4096):
        assert native().ec_tile_bytes(kind, n_rows, 2 * kind.block_size) == n_rows * row_bytes
    assert native().ec_tile_bytes(kind, 17, 2 * kind.block_size) == 32 * row_bytes


@pytest.mark.parametrize("name", WIDER)
def test_types_with_grids_take_more(name: str) -> None:
    """As many bytes as docs/cpu-kernels.md says, which the memory plan counts."""
    kind = GGMLType[name]
    bits = {"TQ1_0": 2.0625, "IQ1_S": 3.1875, "IQ1_M": 3.3125, "IQ2_XXS": 3.1875, "IQ2_XS": 3.3125, "IQ2_S": 3.3125}
    n_bytes = native().ec_tile_bytes(kind, 4096, 512)
    assert n_bytes == 4096 * 512 * bits.get(name, 4.1875) / 8
    assert n_bytes > 4096 * 2 * kind.block_bytes


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
        *((GGMLType.NVFP4, 16, 256), (GGMLType.F64, 16, 16), (GGMLType.Q8_1, 16, 32)),
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


@pytest.mark.parametrize(
    ("begin", "end"), [(-16, 16), (0, 0), (16, 0), (8, 16), (0, 8), (0, 41), (48, 64), (2**62, 2**63 - 1), (16, 40)]
)
def test_ranges_that_do_not_fit_are_refused(begin: int, end: int) -> None:
    """A matrix of 40 rows is packed from a multiple of 16 to one, or to its end, and with as many bytes."""
    data, tiles = np.zeros(16 * 34, np.uint8), np.zeros(48 * 34, np.uint8)
    shape = (GGMLType.Q8_0, 40, 32, begin, end)
    assert native().ec_tile_pack(*shape, address(data), len(data), address(tiles), len(tiles)) == INVALID
    reason = "the rows have another size" if (begin, end) == (16, 40) else "the rows to pack are out of range"
    assert native().ec_last_error().decode() == reason
    assert not tiles.any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Tiles and matrix must have their size to the byte."""
    data, tiles = np.zeros(40 * 34, np.uint8), np.zeros(48 * 34, np.uint8)
    matrix_shape = (GGMLType.Q8_0, 40, 32)
    for n_data, n_tiles in ((len(data), len(tiles) - 1), (len(data) - 1, len(tiles)), (0, len(tiles))):
        assert native().ec_tile_pack(*matrix_shape, 0, 40, address(data), n_data, address(tiles), n_tiles) == INVALID


@pytest.mark.slow
@pytest.mark.model
def test_the_tiles_of_a_real_model_are_its_bytes(smollm_path: Path) -> None:
    """Every matrix of SmolLM2 135M is rebuilt from its tiles, which take at most 2 % more than the file."""
    gguf = read_gguf(smollm_path)
    network = read_network(gguf)
    with_tiles = {placed.tensor.name: placed.tensor for placed in network.matrices}
    tiles = open_tiles(tile_job(gguf, network, LoadOptions()))
    try:
        for name, tensor in with_tiles.items():
            expected = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8)
            n_cols, n_rows = tensor.shape
            np.testing.assert_array_equal(unpack(tensor.type, n_rows, n_cols, tiles[name], len(expected)), expected)
        n_tiles, n_file = sum(len(tiles[name]) for name in with_tiles), sum(t.n_bytes for t in with_tiles.values())
        assert n_file <= n_tiles <= 1.02 * n_file
    finally:
        tiles.close()


CODED = (
    *("IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K", "TQ2_0", "TQ1_0", "Q2_0", "Q1_0"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
N_EMBD = 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", CODED)
def test_embeddings_are_what_other_code_makes_of_them(tmp_path: Path, name: str) -> None:
    """A forward through no layer returns rows of the embedding matrix, whose random bytes use all entries of a grid."""
    data = random_blocks(name, N_VOCAB, N_EMBD, np.random.default_rng(0))
    if name == "MXFP4":
        data = every_exponent(data)
    tiny = Tiny(n_layer=1, n_embd=N_EMBD)
    tensors = tiny_tensors(tiny) | {"token_embd.weight": RawTensor(GGMLType[name], (N_EMBD, N_VOCAB), data)}
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(tiny), tensors)
    with Cpu().load(path, LoadOptions(n_ctx=N_VOCAB, max_rows=256)) as model:
        session = model.session(N_VOCAB)
        none = LayerSet.of(1, [])
        tokens = np.arange(N_VOCAB, dtype=np.int32)
        found = session.forward(tokens, n_past=0, layers=none, taps=(0,)).hidden[0].copy()
    rows = np.frombuffer(data, np.uint8).reshape(N_VOCAB, -1)
    expected = plain_values(GGMLType[name], rows)
    np.testing.assert_array_equal(found, expected.reshape(N_VOCAB, N_EMBD))


def every_exponent(data: bytes) -> bytes:
    """Return blocks of MXFP4 with all exponents that leave squares of weights below a float's limit."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 17).copy()
    blocks[:, 0] = np.arange(len(blocks)) % 180
    return blocks.tobytes()

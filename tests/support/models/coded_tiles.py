"""Blocks of a file, made again from tiles of the types of native/weights/coding.h, with the gguf package's grids.

rebuilt(GGMLType.IQ2_XS, tiles.reshape(-1, BYTES[GGMLType.IQ2_XS]))
"""

from typing import Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
Whole = NDArray[np.unsignedinteger[Any]]

# Bits of a code, bytes of scales, halves.
_LAYOUTS = {
    GGMLType.IQ4_NL: (4, 0, 1),
    GGMLType.IQ4_XS: (4, 6, 1),
    GGMLType.MXFP4: (4, 1, 0),
    GGMLType.Q3_K: (3, 12, 1),
    GGMLType.Q2_K: (2, 16, 2),
    GGMLType.TQ1_0: (2, 0, 1),
    GGMLType.TQ2_0: (2, 0, 1),
    GGMLType.Q2_0: (2, 0, 1),
    GGMLType.Q1_0: (1, 0, 1),
    GGMLType.IQ3_S: (4, 4, 1),
    GGMLType.IQ3_XXS: (4, 4, 1),
    GGMLType.IQ2_XXS: (3, 4, 1),
    GGMLType.IQ2_XS: (3, 8, 1),
    GGMLType.IQ2_S: (3, 8, 1),
    GGMLType.IQ1_S: (3, 4, 1),
    GGMLType.IQ1_M: (3, 8, 1),
}
BYTES = {kind: kind.block_size * bits * 2 + 16 * n + 32 * halves for kind, (bits, n, halves) in _LAYOUTS.items()}
"""The bytes of a block of 16 rows in a tile."""


def rebuilt(kind: GGMLType, blocks: U8) -> U8:
    """Return the blocks of a file, uint8[n, 16, block_bytes], from blocks of tiles, uint8[n, BYTES[kind]]."""
    bits, n_scales, n_halves = _LAYOUTS[kind]
    n_codes = kind.block_size * bits * 2
    n = len(blocks)
    parts = _codes(bits, blocks[:, :n_codes].reshape(-1, 64 * bits)).reshape(n, -1, 16, 32)
    codes: U8 = parts.transpose(0, 2, 1, 3).reshape(-1, kind.block_size)
    rest = np.split(blocks[:, n_codes:], [16 * n_scales], axis=1)
    scales: U8 = rest[0].reshape(n, n_scales, 16).transpose(0, 2, 1).reshape(16 * n, n_scales)
    halves: U8 = rest[1].reshape(n, n_halves, 16, 2).transpose(0, 2, 1, 3).reshape(16 * n, 2 * n_halves)
    return _MAKERS[kind](codes, scales, halves).reshape(n, 16, kind.block_bytes)


def canonical(data: U8) -> U8:
    """Return blocks of TQ1_0 as quantizers write them: one of the bytes that stand for the same digits in base 3."""
    blocks = data.reshape(-1, 54).copy()
    n_digits = np.where(np.arange(52) < 48, 243, 81)  # the four bytes at the end have four digits
    number = blocks[:, :52].astype(np.uint32) * n_digits // 256 * (243 // n_digits)
    blocks[:, :52] = (number * 256 + 242) // 243
    return blocks.reshape(-1)


def _codes(bits: int, part: U8) -> U8:
    """Return uint8[n, 16, 32] for the vectors of 32 columns."""
    groups = np.arange(4)[:, None]
    if bits == 1:
        ones = part.reshape(-1, 16, 1, 4) >> np.arange(8)[:, None] & 1
        return ones.astype(np.uint8).reshape(-1, 16, 32)
    if bits == 4:
        nibbles = part.reshape(-1, 4, 16, 4).transpose(0, 2, 1, 3).reshape(-1, 16, 16)
        return np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    twos = part[:, :128].reshape(-1, 2, 16, 1, 4).transpose(0, 2, 1, 3, 4)
    codes = (twos >> 2 * groups & 3).astype(np.uint8).reshape(-1, 16, 32)
    if bits == 3:
        thirds = part[:, 128:].reshape(-1, 16, 1, 4) >> np.arange(8)[:, None]
        codes |= ((thirds & 1) << 2).astype(np.uint8).reshape(-1, 16, 32)
    return codes


def _nibbles(codes: U8) -> U8:
    pairs = codes.reshape(len(codes), -1, 2, 16)
    joined: U8 = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return joined.reshape(len(codes), -1)


def _twos(codes: U8) -> U8:
    four = codes.reshape(-1, 2, 4, 32) & 3
    joined: U8 = np.bitwise_or.reduce(four << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    return joined.reshape(-1, 64)


def _in_order(codes: U8, bits: int) -> U8:
    by_bit = (codes[..., None] >> np.arange(bits) & 1).reshape(len(codes), -1)
    joined: U8 = np.packbits(by_bit, axis=1, bitorder="little")
    return joined


def _q3_k(codes: U8, scales: U8, halves: U8) -> U8:
    high = np.packbits(codes.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")[:, 0]
    return np.concatenate([high, _twos(codes), scales, halves], axis=1)


def _tq1_0(codes: U8, scales: U8, halves: U8) -> U8:
    powers = np.array([81, 27, 9, 3, 1], np.uint32)[:, None]
    parts = [codes[:, :160].reshape(-1, 5, 32), codes[:, 160:240].reshape(-1, 5, 16), codes[:, 240:].reshape(-1, 4, 4)]
    numbers = np.concatenate([(part * powers[: part.shape[1]]).sum(axis=1) for part in parts], axis=1)
    return np.concatenate([((numbers * 256 + 242) // 243).astype(np.uint8), halves], axis=1)


def _entries(kind: GGMLType, codes: U8, sign: int) -> tuple[U32, U32]:
    """Return the numbers of entries in gguf's grid, one for each run of columns, and the signs of runs of 8."""
    maker = getattr(quants, kind.name)
    maker.init_grid()
    grid = np.searchsorted(np.array(maker.grid_map, np.float32), maker.grid.reshape(maker.grid_shape))
    size = grid.shape[1]
    places = 8 ** np.arange(size)
    numbers = dict(zip((grid @ places).tolist(), range(len(grid)), strict=True))
    wanted = (codes & (1 << sign) - 1).reshape(len(codes), -1, size) @ places
    found = np.array([numbers[one] for one in wanted.reshape(-1).tolist()], np.uint32).reshape(wanted.shape)
    signs = np.packbits((codes >> sign).reshape(len(codes), -1, 8), axis=2, bitorder="little")[..., 0]
    return found, signs.astype(np.uint32)


def _words(signs: U32, scales: U8) -> U8:
    """Return 4 bytes for each 32 columns: seven signs of each run of 8, and the scale."""
    sevens = (signs & 127).reshape(-1, 8, 4)
    words: U32 = np.bitwise_or.reduce(sevens << np.array([0, 7, 14, 21], np.uint32), axis=2)
    return (words | _scale_numbers(scales) << 28).astype("<u4").view(np.uint8).reshape(-1, 8, 4)


def _scale_numbers(scales: U8) -> U32:
    return np.ascontiguousarray(np.concatenate([scales & 15, scales >> 4], axis=1), np.uint32)


def _scales(scales: U8) -> U8:
    """Return scales of 4 bits as the file has them: neighbours in a byte."""
    numbers = _scale_numbers(scales).astype(np.uint8)
    return numbers[:, ::2] | numbers[:, 1::2] << np.uint8(4)


def _iq4_xs(codes: U8, scales: U8, halves: U8) -> U8:
    high = np.stack([scales[:, 4 + i % 2] >> i // 2 * 2 & 3 for i in range(8)], axis=1).astype(np.uint32)
    return np.concatenate([halves, _bits_of_runs(high, 2, 8, "<u2"), _scales(scales[:, :4]), _nibbles(codes)], axis=1)


def _bits_of_runs(values: Whole, bits: int, each: int, dtype: str) -> U8:
    """Return numbers of `each` runs, `bits` bits of each run."""
    places = (bits * np.arange(each)).astype(np.uint32)
    joined: U32 = np.bitwise_or.reduce(values.reshape(len(values), -1, each) << places, axis=2)
    return joined.astype(dtype).view(np.uint8).reshape(len(values), -1)


def _iq3_xxs(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ3_XXS, codes, 3)
    return np.concatenate([halves, entries.astype(np.uint8), _words(signs, scales).reshape(-1, 32)], axis=1)


def _iq3_s(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ3_S, codes, 3)
    high = _bits_of_runs(entries >> np.uint32(8), 1, 8, "u1")
    return np.concatenate([halves, entries.astype(np.uint8), high, signs.astype(np.uint8), _scales(scales)], axis=1)


def _iq2_xxs(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ2_XXS, codes, 2)
    parts = np.concatenate([entries.astype(np.uint8).reshape(-1, 8, 4), _words(signs, scales)], axis=2)
    return np.concatenate([halves, parts.reshape(-1, 64)], axis=1)


def _iq2_xs(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ2_XS, codes, 2)
    words = (entries | (signs & 127) << 9).astype("<u2").view(np.uint8)
    return np.concatenate([halves, words, _scales(scales)], axis=1)


def _iq2_s(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ2_S, codes, 2)
    high = _bits_of_runs(entries >> np.uint32(8), 2, 4, "u1")
    return np.concatenate([halves, entries.astype(np.uint8), signs.astype(np.uint8), high, _scales(scales)], axis=1)


def _iq1_s(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ1_S, codes, 2)
    high = _bits_of_runs(entries >> np.uint32(8), 3, 4, "<u2").view("<u2")
    high |= (_scale_numbers(scales) << 12 | signs[:, ::4] >> 7 << 15).astype(np.uint16)
    return np.concatenate([halves, entries.astype(np.uint8), high.view(np.uint8)], axis=1)


def _iq1_m(codes: U8, scales: U8, halves: U8) -> U8:
    entries, signs = _entries(GGMLType.IQ1_M, codes, 2)
    high = _bits_of_runs(entries >> np.uint32(8) | signs >> np.uint32(7) << np.uint32(3), 4, 2, "u1")
    words = _bits_of_runs(_scale_numbers(scales), 3, 4, "<u2").view("<u2")
    words |= (halves.view("<u2") >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    return np.concatenate([entries.astype(np.uint8), high, words.view(np.uint8)], axis=1)


_MAKERS = {
    GGMLType.IQ4_NL: lambda codes, scales, halves: np.concatenate([halves, _nibbles(codes)], axis=1),
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: lambda codes, scales, halves: np.concatenate([scales, _nibbles(codes)], axis=1),
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q2_K: lambda codes, scales, halves: np.concatenate([scales, _twos(codes), halves], axis=1),
    GGMLType.Q2_0: lambda codes, scales, halves: np.concatenate([halves, _in_order(codes, 2)], axis=1),
    GGMLType.Q1_0: lambda codes, scales, halves: np.concatenate([halves, _in_order(codes, 1)], axis=1),
    GGMLType.TQ2_0: lambda codes, scales, halves: np.concatenate([_twos(codes), halves], axis=1),
    GGMLType.TQ1_0: _tq1_0,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
}

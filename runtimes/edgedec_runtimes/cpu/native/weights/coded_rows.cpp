#include "weights/coding.h"
#include "weights/grids.h"

namespace edgedec {
namespace {

constexpr int COLUMNS = 256, RUN = 8;  // of a super-block; columns whose signs are one byte

// A block of one row: codes and scales as tiles hold them.
struct Block {
  uint8_t codes[COLUMNS];
  uint8_t scales[16];
  uint16_t halves[2];
};

template <class Number>
Number read(const uint8_t *p) {
  Number x;
  memcpy(&x, p, sizeof x);
  return x;
}

// --- blocks of files (ggml-common.h)
// ---------------------------------------------------------------------------------------

// 16 bytes a block of 32 columns: the first 16 columns in the low halves, the others in the high ones.
void read_nibbles(const uint8_t *in, int n_blocks, Block &b) {
  for (int s = 0; s < n_blocks; ++s)
    for (int l = 0; l < 16; ++l) {
      b.codes[32 * s + l] = in[16 * s + l] & 15;
      b.codes[32 * s + 16 + l] = in[16 * s + l] >> 4;
    }
}

// 32 bytes for 128 columns: bits 2 i and 2 i + 1 of byte l are column 32 i + l.
void read_two_bits(const uint8_t *in, Block &b) {
  for (int i = 0; i < 8; ++i)
    for (int l = 0; l < 32; ++l) b.codes[32 * i + l] = in[i / 4 * 32 + l] >> i % 4 * 2 & 3;
}

// d, then codes of BITS bits, the first ones in the low bits of a byte
template <int BITS>
void read_in_order(const uint8_t *in, int n, Block &b) {
  constexpr int IN_BYTE = 8 / BITS;
  for (int i = 0; i < n; ++i)
    b.codes[i] = (uint8_t)(in[2 + i / IN_BYTE] >> BITS * (i % IN_BYTE) & ((1 << BITS) - 1));
}

// hmask[32], qs[64], scales[12], d. Bit i of hmask's byte l is the third bit of column 32 i + l.
void read_q3_k(const uint8_t *in, Block &b) {
  read_two_bits(in + 32, b);
  for (int i = 0; i < 8; ++i)
    for (int l = 0; l < 32; ++l) b.codes[32 * i + l] |= (uint8_t)((in[l] >> i & 1) << 2);
  memcpy(b.scales, in + 96, 12);
  b.halves[0] = read<uint16_t>(in + 108);
}

// scales[16], qs[64], d, dmin
void read_q2_k(const uint8_t *in, Block &b) {
  memcpy(b.scales, in, 16);
  read_two_bits(in + 16, b);
  memcpy(b.halves, in + 80, 4);
}

// qs[48], qh[4], d: five digits of base 3 in a byte of qs, four in one of qh. A byte is a fraction of 256, whose digits
// come out of multiplications by 3.
void read_tq1_0(const uint8_t *in, Block &b) {
  const auto digit = [in](int byte, int n) {
    uint8_t x = in[byte];
    for (int i = 0; i < n; ++i) x = (uint8_t)(3 * x);
    return (uint8_t)(3 * x >> 8);
  };
  for (int n = 0; n < 5; ++n) {
    for (int l = 0; l < 32; ++l) b.codes[32 * n + l] = digit(l, n);
    for (int l = 0; l < 16; ++l) b.codes[160 + 16 * n + l] = digit(32 + l, n);
  }
  for (int n = 0; n < 4; ++n)
    for (int l = 0; l < 4; ++l) b.codes[240 + 4 * n + l] = digit(48 + l, n);
  b.halves[0] = read<uint16_t>(in + 52);
}

// Put number i of n scales' low 4 bits into a block.
void put_scale(Block &b, int n, int i, uint32_t x) {
  b.scales[i % (n / 2)] |= (uint8_t)((x & 15) << (i < n / 2 ? 0 : 4));
}
// The same for n scales of 4 bits, two to a byte of the file.
void read_scales(const uint8_t *in, int n, Block &b) {
  for (int i = 0; i < n; ++i) put_scale(b, n, i, (uint32_t)in[i / 2] >> 4 * (i % 2));
}

// d, two high bits of each scale (uint16), low bits of scales[4], qs[128]
void read_iq4_xs(const uint8_t *in, Block &b) {
  const uint32_t high = read<uint16_t>(in + 2);
  read_nibbles(in + 8, 8, b);
  read_scales(in + 4, 8, b);
  for (int i = 0; i < 8; ++i) b.scales[4 + i % 2] |= (uint8_t)((high >> 2 * i & 3) << i / 2 * 2);
  b.halves[0] = read<uint16_t>(in);
}

// Write the codes of an entry of a grid. Bit i of `signs` is the sign of number i; `sign` is where a code has it.
void put_entry(const Grid &grid, uint32_t entry, uint32_t signs, int sign, uint8_t *codes) {
  for (int i = 0; i < grid.elements; ++i) codes[i] = (uint8_t)(grid.at(entry, i) | (int32_t)(signs >> i & 1) << sign);
}

// Eight signs from seven bits: the number of negative ones is even.
uint32_t eight_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  return seven | ((parity ^ parity >> 1) & 1) << 7;
}

// d, qs[64] for each 4 columns, 8 x (4 x 7 bits of signs, scale)
void read_iq3_xxs(const uint8_t *in, Block &b) {
  const Grid &grid = grid_of(IQ3_XXS);
  for (int s = 0; s < 8; ++s) {
    const uint32_t word = read<uint32_t>(in + 66 + 4 * s);
    put_scale(b, 8, s, word >> 28);
    for (int k = 0; k < 4; ++k) {
      const uint32_t signs = eight_signs(word >> 7 * k & 127);
      const int g = 8 * s + 2 * k;
      put_entry(grid, in[2 + g], signs, 3, b.codes + 4 * g);
      put_entry(grid, in[3 + g], signs >> 4, 3, b.codes + 4 * g + 4);
    }
  }
}

// d, qs[64] for each 4 columns, a ninth bit of each (qh[8]), signs[32], scales[4]
void read_iq3_s(const uint8_t *in, Block &b) {
  const Grid &grid = grid_of(IQ3_S);
  for (int g = 0; g < 64; ++g) {
    const uint32_t entry = in[2 + g] | (in[66 + g / 8] >> g % 8 & 1u) << 8;
    put_entry(grid, entry, (uint32_t)in[74 + g / 2] >> 4 * (g % 2), 3, b.codes + 4 * g);
  }
  read_scales(in + 106, 8, b);
}

// d, 8 x (4 entries, 4 x 7 bits of signs, scale)
void read_iq2_xxs(const uint8_t *in, Block &b) {
  for (int s = 0; s < 8; ++s) {
    const uint8_t *entries = in + 2 + 8 * s;
    const uint32_t word = read<uint32_t>(entries + 4);
    put_scale(b, 8, s, word >> 28);
    for (int k = 0; k < 4; ++k)
      put_entry(grid_of(IQ2_XXS), entries[k], eight_signs(word >> 7 * k & 127), 2, b.codes + 32 * s + RUN * k);
  }
}

// d, 32 x (9 bits of entry, 7 bits of signs), scales[8]
void read_iq2_xs(const uint8_t *in, Block &b) {
  for (int k = 0; k < 32; ++k) {
    const uint32_t word = read<uint16_t>(in + 2 + 2 * k);
    put_entry(grid_of(IQ2_XS), word & 511, eight_signs(word >> 9), 2, b.codes + RUN * k);
  }
  read_scales(in + 66, 16, b);
}

// d, qs[32], signs[32], two more bits of each entry (qh[8]), scales[8]
void read_iq2_s(const uint8_t *in, Block &b) {
  for (int k = 0; k < 32; ++k) {
    const uint32_t entry = in[2 + k] | (in[66 + k / 4] >> 2 * (k % 4) & 3u) << 8;
    put_entry(grid_of(IQ2_S), entry, in[34 + k], 2, b.codes + RUN * k);
  }
  read_scales(in + 74, 16, b);
}

// d, qs[32], 8 x (3 more bits of 4 entries, scale of 3 bits, sign of the shift)
void read_iq1_s(const uint8_t *in, Block &b) {
  for (int s = 0; s < 8; ++s) {
    const uint32_t word = read<uint16_t>(in + 34 + 2 * s);
    put_scale(b, 8, s, word >> 12 & 7);
    for (int k = 0; k < 4; ++k)
      put_entry(grid_of(IQ1_S), in[2 + 4 * s + k] | (word >> 3 * k & 7) << 8, word >> 15 != 0 ? 255 : 0, 2,
                b.codes + 32 * s + RUN * k);
  }
}

// qs[32], qh[16] with 3 more bits and the sign of the shift of each entry, 4 x (4 scales of 3 bits, 4 bits of d)
void read_iq1_m(const uint8_t *in, Block &b) {
  for (int k = 0; k < 32; ++k) {
    const uint32_t high = in[32 + k / 2] >> 4 * (k % 2) & 15u;
    put_entry(grid_of(IQ1_M), in[k] | (high & 7) << 8, (high & 8) != 0 ? 255 : 0, 2, b.codes + RUN * k);
  }
  for (int i = 0; i < 16; ++i) put_scale(b, 16, i, (uint32_t)read<uint16_t>(in + 48 + 2 * (i / 4)) >> 3 * (i % 4) & 7);
  for (int i = 0; i < 4; ++i) b.halves[0] |= (uint16_t)((in[49 + 2 * i] >> 4) << 4 * i);
}

// The types whose block begins with d read it here.
void read_block(int32_t type, const uint8_t *in, Block &b) {
  b = {};
  if (type != IQ1_M) b.halves[0] = read<uint16_t>(in);
  switch (type) {
    case Q2_K: return read_q2_k(in, b);
    case Q3_K: return read_q3_k(in, b);
    case TQ1_0: return read_tq1_0(in, b);
    case TQ2_0: b.halves[0] = read<uint16_t>(in + 64); return read_two_bits(in, b);
    case MXFP4: b.scales[0] = in[0]; return read_nibbles(in + 1, 1, b);
    case Q1_0: return read_in_order<1>(in, 128, b);
    case Q2_0: return read_in_order<2>(in, 64, b);
    case IQ4_NL: return read_nibbles(in + 2, 1, b);
    case IQ4_XS: return read_iq4_xs(in, b);
    case IQ3_XXS: return read_iq3_xxs(in, b);
    case IQ3_S: return read_iq3_s(in, b);
    case IQ2_XXS: return read_iq2_xxs(in, b);
    case IQ2_XS: return read_iq2_xs(in, b);
    case IQ2_S: return read_iq2_s(in, b);
    case IQ1_S: return read_iq1_s(in, b);
    default: return read_iq1_m(in, b);
  }
}

// --- tiles
// -----------------------------------------------------------------------------------------------------------------

// Write s of each 16 or 32 columns of row r, and for Q2_K each m.
void scales_of(const Coding &c, const uint8_t *tile, int r, int8_t *scales, int8_t *minimums) {
  int8_t s[16][TILE_ROWS], m[16][TILE_ROWS] = {};
  const uint8_t *in = tile + scales_at(c);
  if (c.scales == ScaleBytes::Q2) unpack_scales<ScaleBytes::Q2, 16>(in, *s, *m);
  else if (c.scales == ScaleBytes::SIX && c.by_16) unpack_scales<ScaleBytes::SIX, 16>(in, *s, *m);
  else if (c.scales == ScaleBytes::SIX) unpack_scales<ScaleBytes::SIX, 8>(in, *s, *m);
  else if (c.scales == ScaleBytes::FOUR && c.by_16) unpack_scales<ScaleBytes::FOUR, 16>(in, *s, *m);
  else if (c.scales == ScaleBytes::FOUR) unpack_scales<ScaleBytes::FOUR, 8>(in, *s, *m);
  else memset(s, 1, sizeof s);
  for (int i = 0; i < (c.by_16 ? 16 : 8); ++i) scales[i] = s[i][r], minimums[i] = m[i][r];
}

}  // namespace

void pack_coded(int32_t type, const uint8_t *in, uint8_t *tile, int r) {
  const Coding c = coding(type);
  Block b;
  read_block(type, in, b);
  for (int i = 0; i < c.columns; i += 32) put_codes(c.bits, tile + i / 32 * code_bytes(c), r, b.codes + i);
  for (int i = 0; i < c.scale_bytes; ++i) tile[scales_at(c) + TILE_ROWS * i + r] = b.scales[i];
  for (int i = 0; halves_at(c) + 2 * TILE_ROWS * i < coded_bytes(c); ++i)
    memcpy(tile + halves_at(c) + 2 * TILE_ROWS * i + 2 * r, &b.halves[i], 2);
}

void dequantize_coded(int32_t type, const uint8_t *tile, int r, float *out) {
  const Coding c = coding(type);
  const uint8_t *halves = tile + halves_at(c) + 2 * r;
  const bool exponent = c.scales == ScaleBytes::EXPONENT, minimum = c.scales == ScaleBytes::Q2;
  const float d = exponent ? half_of_exponent(tile[scales_at(c) + r]) : c.factor * read_half(halves);
  const float dmin = minimum ? read_half(halves + 2 * TILE_ROWS) : 0.0f;
  int8_t scales[16], minimums[16];
  scales_of(c, tile, r, scales, minimums);
  for (int i = 0; i < c.columns; ++i) {
    const uint32_t code = get_code(c.bits, tile + i / 32 * code_bytes(c), r, i % 32);
    const int number = (int)(c.numbers != nullptr ? c.numbers[code] : code) - c.bias, group = i / (c.by_16 ? 16 : 32);
    const float weight = d * (float)scales[group] * (float)number;
    out[i] = minimum ? weight - dmin * (float)minimums[group] : weight;
  }
}

}  // namespace edgedec

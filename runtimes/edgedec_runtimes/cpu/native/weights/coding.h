// Types whose tiles hold codes of 4, 3, 2 or 1 bits: what a code stands for, and what scales it.
//
//   weight = d * factor * s * (number[code] - bias) - dmin * m
//
// s and m are small integers of 16 or 32 columns. `number` is a table of 16, or the code itself. The tile of a block of
// these types has, for each 32 columns, the codes of 16 rows, and then the scales of all its columns:
//
//   codes   4 bits: nibbles; 3 bits: two bits from bit 0, and the third as "fifth bits" are; 2 bits: two bits from
//           bit 0; 1 bit: as "fifth bits" are (tiles.h has these vectors)
//   scales  scale_bytes vectors of 16 bytes, d[16], dmin[16] (float16, as many as there are)
#pragma once
#include "weights/tensor_types.h"

namespace edgedec {

// What `scales` holds for a row. Of n small integers, the low 4 bits of number j are in the low half of byte j, those
// of number j + n / 2 in its high half; two high bits of number p * n / 4 + k are in byte n / 2 + k from bit 2 p.
enum class ScaleBytes : int32_t {
  NONE,      // d scales all columns of the block
  EXPONENT,  // one byte e: d is 2^(e - 128)
  FOUR,      // s = 2 x + 1, for x of 4 bits
  SIX,       // s = x - 32, for x of 6 bits
  Q2,        // s in the low and m in the high half of byte i
};

struct Coding {
  int32_t columns;         // of a block
  int32_t bits;            // of a code
  int32_t bias;            // 0, 1, 4, 16, 64 or 128
  const uint8_t *numbers;  // [16], at most 2 * bias; nullptr: a code is its number
  ScaleBytes scales;
  int32_t scale_bytes;     // of a row
  bool by_16;              // 16 columns have a scale of their own, not 32
  float factor;
};

// The numbers have the bias added, so that none is negative. Those of the formats: IQ4_NL's and IQ4_XS's levels, E2M1
// doubled, magnitudes of grids, eighths of -1, 0 and 1 plus or minus 1/8, and -1 and 1. Of those of 4 and 3 bits the
// highest bit of a code is a sign.
constexpr uint8_t FOUR_BITS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t E2M1[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr uint8_t ODD[16] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1};
constexpr uint8_t EIGHT[16] = {68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2};
constexpr uint8_t THREE[16] = {72, 89, 107, 64, 56, 39, 21, 64, 64, 64, 64, 64, 64, 64, 64, 64};
constexpr uint8_t EIGHTHS[16] = {9, 17, 25, 16, 7, 15, 23, 16, 16, 16, 16, 16, 16, 16, 16, 16};

constexpr uint8_t SIGNS[16] = {0, 2};

constexpr Coding coding(int32_t type) {
  switch (type) {
    case IQ4_NL: return {32, 4, 128, FOUR_BITS, ScaleBytes::NONE, 0, false, 1.0f};
    case IQ4_XS: return {256, 4, 128, FOUR_BITS, ScaleBytes::SIX, 6, false, 1.0f};
    case MXFP4: return {32, 4, 16, E2M1, ScaleBytes::EXPONENT, 1, false, 1.0f};
    case Q3_K: return {256, 3, 4, nullptr, ScaleBytes::SIX, 12, true, 1.0f};
    case Q2_K: return {256, 2, 0, nullptr, ScaleBytes::Q2, 16, true, 1.0f};
    case TQ1_0: case TQ2_0: return {256, 2, 1, nullptr, ScaleBytes::NONE, 0, false, 1.0f};
    case Q2_0: return {64, 2, 1, nullptr, ScaleBytes::NONE, 0, false, 1.0f};
    case Q1_0: return {128, 1, 1, SIGNS, ScaleBytes::NONE, 0, false, 1.0f};
    case IQ3_S: return {256, 4, 16, ODD, ScaleBytes::FOUR, 4, false, 1.0f};
    case IQ3_XXS: return {256, 4, 64, EIGHT, ScaleBytes::FOUR, 4, false, 0.25f};
    case IQ2_XXS: return {256, 3, 64, THREE, ScaleBytes::FOUR, 4, false, 0.125f};
    case IQ2_XS: case IQ2_S: return {256, 3, 64, THREE, ScaleBytes::FOUR, 8, true, 0.125f};
    case IQ1_S: return {256, 3, 16, EIGHTHS, ScaleBytes::FOUR, 4, false, 0.125f};
    case IQ1_M: return {256, 3, 16, EIGHTHS, ScaleBytes::FOUR, 8, true, 0.125f};
    default: return {0, 0, 0, nullptr, ScaleBytes::NONE, 0, false, 0.0f};
  }
}

// Where the parts of such a block of a tile begin.
constexpr int32_t code_bytes(const Coding &c) { return 64 * c.bits; }  // of 32 columns
constexpr int32_t scales_at(const Coding &c) { return c.columns / 32 * code_bytes(c); }
constexpr int32_t halves_at(const Coding &c) { return scales_at(c) + TILE_ROWS * c.scale_bytes; }
constexpr int32_t coded_bytes(const Coding &c) {
  return halves_at(c) + 2 * TILE_ROWS * (c.scales == ScaleBytes::EXPONENT ? 0 : c.scales == ScaleBytes::Q2 ? 2 : 1);
}

// Eight bytes at once, of which `mask` keeps some bits.
static inline uint64_t eight_bytes(const uint8_t *in, int word, int shift, uint8_t mask) {
  uint64_t x;
  memcpy(&x, in + 8 * word, 8);
  return x >> shift & mask * 0x0101010101010101u;
}

// Write the n small integers s of a block, [n][16 rows], and for Q2_K the m. `in` is where the scales begin. The
// function is internal to each file (see kernels/kernels.cpp).
template <ScaleBytes SCALES, int N>
static inline void unpack_scales(const uint8_t *in, int8_t *scales, [[maybe_unused]] int8_t *minimums) {
  constexpr uint64_t ones = 0x0101010101010101u;
  for (int p = 0; p < 4; ++p)
    for (int w = 0; w < N / 2; ++w) {
      const int to = p * N / 2 + w;
      uint64_t s = ones;
      if constexpr (SCALES == ScaleBytes::FOUR) s |= eight_bytes(in, p % 2 * N / 2 + w, p / 2 * 4, 15) << 1;
      if constexpr (SCALES == ScaleBytes::SIX) {
        const uint64_t x = eight_bytes(in, p % 2 * N / 2 + w, p / 2 * 4, 15) | eight_bytes(in, N + w, 2 * p, 3) << 4;
        s = ((x | 128 * ones) - 32 * ones) ^ 128 * ones;
      }
      if constexpr (SCALES == ScaleBytes::Q2) {
        const uint64_t m = eight_bytes(in, to, 4, 15);
        memcpy(minimums + 8 * to, &m, 8);
        s = eight_bytes(in, to, 0, 15);
      }
      memcpy(scales + 8 * to, &s, 8);
    }
}

// Write the codes of 32 columns of row r, or read that of one. Lane r of a vector has 4 bytes, for a group of 4
// columns.
static inline void put_codes(int bits, uint8_t *tile, int r, const uint8_t *codes) {
  tile += 4 * r;
  for (int k = 0; k < 4; ++k, ++codes, ++tile) {
    if (bits == 4) {
      for (int j = 0; j < 4; ++j) tile[64 * j] = (uint8_t)(codes[4 * j] | codes[16 + 4 * j] << 4);
      continue;
    }
    uint32_t twos = 0, last = 0;  // the highest bit of a code
    for (int g = 0; g < 8; ++g) {
      twos |= (codes[4 * g] & 3u) << 2 * g;
      last |= (codes[4 * g] >> (bits - 1) & 1u) << g;
    }
    if (bits == 1) {
      tile[0] = (uint8_t)last;
      continue;
    }
    tile[0] = (uint8_t)twos;
    tile[64] = (uint8_t)(twos >> 8);
    if (bits == 3) tile[128] = (uint8_t)last;
  }
}

static inline uint32_t get_code(int bits, const uint8_t *tile, int r, int column) {
  const int g = column / 4, at = 4 * r + column % 4;
  if (bits == 4) return tile[64 * (g % 4) + at] >> 4 * (g / 4) & 15u;
  if (bits == 1) return tile[at] >> g & 1u;
  const uint32_t two = tile[64 * (g / 4) + at] >> 2 * (g % 4) & 3u;
  return bits == 2 ? two : two | (tile[128 + at] >> g & 1u) << 2;
}

static inline float read_half(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return half_to_float(h);
}

// The scale of a block of MXFP4, 2^(e - 128): half of E8M0, as its numbers are doubled.
static inline float half_of_exponent(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Write the block `in` of row r (0 to 15) to a block of a tile.
void pack_coded(int32_t type, const uint8_t *in, uint8_t *tile, int r);
// Write row r of a block of a tile to out, dequantized as by ggml.
void dequantize_coded(int32_t type, const uint8_t *tile, int r, float *out);

}  // namespace edgedec

// The tensor types that have tiles: ggml's numbers and block layouts.
#pragma once
#include <stdint.h>
#include <string.h>

namespace edgedec {

enum TensorType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ2_XXS = 16,
  IQ2_XS = 17,
  IQ3_XXS = 18,
  IQ1_S = 19,
  IQ4_NL = 20,
  IQ3_S = 21,
  IQ2_S = 22,
  IQ4_XS = 23,
  IQ1_M = 29,
  BF16 = 30,
  TQ1_0 = 34,
  TQ2_0 = 35,
  MXFP4 = 39,
  Q1_0 = 41,
  Q2_0 = 42,
};

constexpr int TILE_ROWS = 16;

struct BlockLayout {
  int32_t columns;  // elements of a block
  int32_t bytes;    // of a block of one row, in a file
};

// Return the columns and bytes of one block; {0, 0} for a type without tiles.
static inline BlockLayout block_layout(int32_t type) {
  switch (type) {
    case F32: return {1, 4};
    case F16: case BF16: return {1, 2};
    case Q4_0: return {32, 18};
    case Q4_1: return {32, 20};
    case Q5_0: return {32, 22};
    case Q5_1: return {32, 24};
    case Q8_0: return {32, 34};
    case Q4_K: return {256, 144};
    case Q5_K: return {256, 176};
    case Q6_K: return {256, 210};
    case Q2_K: return {256, 84};
    case Q3_K: return {256, 110};
    case IQ1_S: return {256, 50};
    case IQ1_M: return {256, 56};
    case IQ2_XXS: return {256, 66};
    case IQ2_XS: return {256, 74};
    case IQ2_S: return {256, 82};
    case IQ3_XXS: return {256, 98};
    case IQ3_S: return {256, 110};
    case IQ4_NL: return {32, 18};
    case IQ4_XS: return {256, 136};
    case TQ1_0: return {256, 54};
    case TQ2_0: return {256, 66};
    case MXFP4: return {32, 17};
    case Q1_0: return {128, 18};
    case Q2_0: return {64, 18};
    default: return {0, 0};
  }
}

static inline bool is_float_type(int32_t type) { return type == F32 || type == F16 || type == BF16; }

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: exact in float
    const float f = (float)mantissa * (1.0f / 16777216.0f);
    memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; a number that is too large becomes the largest finite one.
static inline uint16_t float_to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7bff);  // infinity, not a number, or rounds beyond 65504
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 puts the rounded mantissa into the low bits
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  const uint32_t odd = (bits >> 13) & 1;
  return (uint16_t)(sign | ((bits - 0x38000000u + 0xfff + odd) >> 13));
}

static inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = (uint32_t)b << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

}  // namespace edgedec

// AVX-512 with VNNI: 16 lanes.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd_x86.h"

namespace {

constexpr int LANES = 16;
constexpr int MAX_ROWS = 8;  // the most activations that a kernel takes at once
using Bytes = __m512i;
using Ints = __m512i;
using Floats = __m512;

inline Bytes load_bytes(const void *p) { return _mm512_loadu_si512(p); }
inline Bytes mask_bytes(Bytes x, uint8_t mask) { return _mm512_and_si512(x, _mm512_set1_epi8((char)mask)); }
inline Bytes or_bytes(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
// Shift 16-bit elements left (or right for N < 0); the caller masks what crosses a byte's border.
template <int N>
inline Bytes shift_bytes(Bytes x) {
  if constexpr (N > 0) return _mm512_slli_epi16(x, N);
  else if constexpr (N < 0) return _mm512_srli_epi16(x, -N);
  else return x;
}

// In each byte the number of a table of 16 with that index, from 0 to 15.
inline Bytes load_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
inline Bytes look_up(Bytes table, Bytes indices) { return _mm512_shuffle_epi8(table, indices); }

inline Ints set_ints(int32_t x) { return _mm512_set1_epi32(x); }
// Shift left, or for N < 0 right with the sign.
template <int N>
inline Ints shift_ints(Ints x) { return N == 0 ? x : N > 0 ? _mm512_slli_epi32(x, N) : _mm512_srai_epi32(x, -N); }
inline Ints load_groups(const int8_t *a, int g) {
  int32_t four;
  memcpy(&four, a + 4 * g, 4);
  return _mm512_set1_epi32(four);
}

// sums[m] += the products of G groups of 4 columns with row m of the activations. Weights are unsigned, of BITS bits;
// activations are signed, 32 bytes from row to row. The inner loop is over rows, so that N sums run at the same time.
template <int BITS, int G, int N>
inline void dots(Ints *sums, const Bytes *w, const int8_t *a) {
  UNROLL for (int g = 0; g < G; ++g)
    UNROLL for (int m = 0; m < N; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], w[g], load_groups(a + 32 * m, g));
}

// The same with signed weights of 8 bits and 8 groups; the caller starts from -128 times the sums of the activations.
constexpr bool SIGNED_NEEDS_SUM = true;
template <int N>
inline void dots_signed(Ints *sums, const Bytes *w, const int8_t *a) {
  const Bytes sign = _mm512_set1_epi8((char)0x80);
  UNROLL for (int g = 0; g < 8; ++g) {
    const Bytes biased = _mm512_xor_si512(w[g], sign);
    UNROLL for (int m = 0; m < N; ++m) sums[m] = _mm512_dpbusd_epi32(sums[m], biased, load_groups(a + 32 * m, g));
  }
}

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats set(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
// The greater of two floats that are not negative; NaN is greater than all numbers.
inline Floats max_magnitude(Floats a, Floats b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats round_even(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats load_halves(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline Floats load_bfloats(const void *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Floats load_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// The low or the high halves of bytes, minus 8.
inline Floats load_low4(const uint8_t *p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(15)), _mm512_set1_epi32(8)));
}
inline Floats load_high4(const uint8_t *p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(wide, 4), _mm512_set1_epi32(8)));
}
inline Floats load_s8(const void *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// edgedec::half_of_exponent of each byte.
inline Floats load_exponents(const uint8_t *p) {
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __mmask16 low = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
  return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(bits, low, _mm512_set1_epi32(0x00200000), e));
}
// Round floats from -127 to 127 to int8.
inline void store_s16(int16_t *p, Floats x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
// In each lane, sum plus the products of two numbers of 16 bits.
inline Ints add_pairs(Ints sum, Bytes w, Ints a) { return _mm512_dpwssd_epi32(sum, w, a); }
inline void store_s8(int8_t *p, Floats x) {
  _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// 2^x for whole numbers x from -126 to 127.
inline Floats power_of_two(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127)), 23));
}

inline float sum_lanes(Floats x) {
  return sum_lanes(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
inline float max_lanes(Floats x) {
  return max_lanes(_mm256_max_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x)));
}
// The greatest of lanes that are not negative, as in max_magnitude.
inline float max_magnitude_lanes(Floats x) {
  const __m512i bits = _mm512_castps_si512(x);
  return max_magnitude_lanes(_mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1)));
}
// In each lane a where x < 0, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), b, a);
}
// Round to halves, as edgedec::float_to_half does: what is too large becomes the largest finite number.
inline void store_halves(uint16_t *p, Floats x) {
  const __m512i sign = _mm512_set1_epi32((int)0x80000000u);
  const __m512 size = _mm512_min_ps(_mm512_abs_ps(x), _mm512_set1_ps(65504.0f));  // the second one where x is NaN
  const __m512i bits = _mm512_or_si512(_mm512_castps_si512(size), _mm512_and_si512(_mm512_castps_si512(x), sign));
  _mm256_storeu_si256((__m256i *)p,
                      _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace

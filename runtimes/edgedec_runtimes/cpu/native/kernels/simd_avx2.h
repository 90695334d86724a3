// AVX2 with FMA and F16C, and AVX-VNNI where EDGEDEC_SIMD is 4: 8 lanes.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/simd_x86.h"

namespace {

constexpr int LANES = 8;
constexpr int MAX_ROWS = 8;  // activations that a kernel takes at once
using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;

inline Bytes load_bytes(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline Bytes mask_bytes(Bytes x, uint8_t mask) { return _mm256_and_si256(x, _mm256_set1_epi8((char)mask)); }
inline Bytes or_bytes(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
template <int N>
inline Bytes shift_bytes(Bytes x) {
  if constexpr (N > 0) return _mm256_slli_epi16(x, N);
  else if constexpr (N < 0) return _mm256_srli_epi16(x, -N);
  else return x;
}

inline Bytes load_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
inline Bytes look_up(Bytes table, Bytes indices) { return _mm256_shuffle_epi8(table, indices); }

inline Ints set_ints(int32_t x) { return _mm256_set1_epi32(x); }
template <int N>
inline Ints shift_ints(Ints x) { return N == 0 ? x : N > 0 ? _mm256_slli_epi32(x, N) : _mm256_srai_epi32(x, -N); }
inline Ints load_groups(const int8_t *a, int g) {
  int32_t four;
  memcpy(&four, a + 4 * g, 4);
  return _mm256_set1_epi32(four);
}

#if EDGEDEC_SIMD == 4
// sums[m] += the products of G groups of 4 columns with row m of the activations: weights unsigned, activations signed,
// 32 bytes from row to row.
template <int BITS, int G, int N>
inline void dots(Ints *sums, const Bytes *w, const int8_t *a) {
  UNROLL for (int g = 0; g < G; ++g)
    UNROLL for (int m = 0; m < N; ++m) sums[m] = _mm256_dpbusd_avx_epi32(sums[m], w[g], load_groups(a + 32 * m, g));
}

// One group of one row, and the signs of bytes turned for it (`matmul_halves.inl`).
inline Ints add_dots(Ints sum, Bytes w, Ints a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
inline Bytes flip_signs(Bytes x) { return _mm256_xor_si256(x, _mm256_set1_epi8((char)0x80)); }
// Shift 16-bit elements left by n bits, or right where n is negative; the compiler knows n after unrolling.
inline Bytes shift_bytes_by(Bytes x, int n) {
  return n > 0 ? _mm256_slli_epi16(x, n) : n < 0 ? _mm256_srli_epi16(x, -n) : x;
}

// The same with signed weights of 8 bits, 8 groups; the caller starts from -128 times the sums of the activations.
constexpr bool SIGNED_NEEDS_SUM = true;
template <int N>
inline void dots_signed(Ints *sums, const Bytes *w, const int8_t *a) {
  UNROLL for (int g = 0; g < 8; ++g) {
    const Bytes biased = flip_signs(w[g]);
    UNROLL for (int m = 0; m < N; ++m) sums[m] = _mm256_dpbusd_avx_epi32(sums[m], biased, load_groups(a + 32 * m, g));
  }
}
#else
// sums[m] += the products of G groups of 4 columns with row m of the activations (32 bytes from row to row). Products
// of two columns are summed in 16 bits, over as many groups as can't overflow them, and then widened.
template <int BITS, int G, int N>
inline void dots(Ints *sums, const Bytes *w, const int8_t *a) {
  constexpr int MOST = BITS <= 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1, RUN = MOST < G ? MOST : G;
  static_assert(RUN * 2 * ((1 << BITS) - 1) * 127 <= 32767 && G % RUN == 0, "16 bits overflow");
  UNROLL for (int g = 0; g < G; g += RUN)
    UNROLL for (int m = 0; m < N; ++m) {
      Ints pairs = _mm256_maddubs_epi16(w[g], load_groups(a + 32 * m, g));
      UNROLL for (int i = 1; i < RUN; ++i)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[g + i], load_groups(a + 32 * m, g + i)));
      sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
}

// The same with signed weights of 8 bits and 8 groups: |w| <= 128 and |a| <= 127, so that two products fit 16 bits.
constexpr bool SIGNED_NEEDS_SUM = false;
template <int N>
inline void dots_signed(Ints *sums, const Bytes *w, const int8_t *a) {
  UNROLL for (int g = 0; g < 8; ++g) {
    const Bytes size = _mm256_abs_epi8(w[g]);
    UNROLL for (int m = 0; m < N; ++m) {
      const Ints pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load_groups(a + 32 * m, g), w[g]));
      sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
}
#endif

#if EDGEDEC_SIMD == 2
// Products of two neighbouring columns each, unsigned weights and signed activations, in 16 bits; sums of such; and
// sums of such in 32 bits (`matmul_unpacked.inl`).
inline Ints in_turn(Ints sum) {
#if defined(__GNUC__)
  __asm__("" : "+x"(sum));  // or else GCC makes all products first, and then keeps sums in memory
#endif
  return sum;
}
inline Ints short_pairs(Bytes w, Ints a) { return _mm256_maddubs_epi16(w, a); }
inline Ints add_shorts(Ints a, Ints b) { return in_turn(_mm256_add_epi16(a, b)); }
inline Ints add_widened(Ints sum, Ints shorts) {
  return in_turn(_mm256_add_epi32(sum, _mm256_madd_epi16(shorts, _mm256_set1_epi16(1))));
}
#endif

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats set(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats abs(Floats a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
// The greater of two floats that are not negative; NaN is greater than all numbers.
inline Floats max_magnitude(Floats a, Floats b) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fnma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats round_even(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats load_halves(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline Floats load_bfloats(const void *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats load_u8(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Floats load_low4(const uint8_t *p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(15)), _mm256_set1_epi32(8)));
}
inline Floats load_high4(const uint8_t *p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(wide, 4), _mm256_set1_epi32(8)));
}
inline Floats load_s8(const void *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Floats load_exponents(const uint8_t *p) {
  const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i low = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, low, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
inline void store_s8(int8_t *p, Floats x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
inline void store_s16(int16_t *p, Floats x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}
// In each lane, sum plus the products of two numbers of 16 bits.
inline Ints add_pairs(Ints sum, Bytes w, Ints a) {
#if EDGEDEC_SIMD == 4
  return _mm256_dpwssd_avx_epi32(sum, w, a);
#else
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, a));
#if defined(__GNUC__)
  __asm__ volatile("" : "+x"(sum));  // one after another: GCC makes all products first, and then keeps sums in memory
#endif
  return sum;
#endif
}
inline Floats power_of_two(Floats x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
}

inline float max_magnitude_lanes(Floats x) { return max_magnitude_lanes(_mm256_castps_si256(x)); }
// In each lane a where x < 0, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ));
}
// Round to halves, as edgedec::float_to_half does: what is too large becomes the largest finite number.
inline void store_halves(uint16_t *p, Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  // The minimum is the second one where x is NaN.
  const __m256 size = _mm256_min_ps(_mm256_andnot_ps(sign, x), _mm256_set1_ps(65504.0f));
  const __m256 rounded = _mm256_or_ps(size, _mm256_and_ps(x, sign));
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(rounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

}  // namespace

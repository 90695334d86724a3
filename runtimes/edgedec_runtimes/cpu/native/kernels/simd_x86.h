// What AVX2 and AVX-512 share: one number from the lanes of a vector, and fetching. Both headers include
// this file.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

EDGEDEC_INLINE void prefetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }
EDGEDEC_INLINE void prefetch_to_l2(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

// One number from the lanes of a vector: lanes i and i + LANES / 2 are joined first, then half of those, and so on.
inline float sum_lanes(__m128 x) {
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float max_lanes(__m128 x) {  // a pair with NaN gives its first element
  x = _mm_max_ps(_mm_movehl_ps(x, x), x);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(x), x));
}
inline float max_magnitude_lanes(__m128i x) {
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1))));
}
inline float sum_lanes(__m256 x) {
  return sum_lanes(_mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
inline float max_lanes(__m256 x) {
  return max_lanes(_mm_max_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x)));
}
// The greatest of lanes that are not negative, as in max_magnitude.
inline float max_magnitude_lanes(__m256i x) {
  return max_magnitude_lanes(_mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
// The sum of 16 int8.
inline int32_t sum_s8(const int8_t *p) {
  const __m128i bytes = _mm_xor_si128(_mm_loadu_si128((const __m128i *)p), _mm_set1_epi8((char)0x80));
  const __m128i sums = _mm_sad_epu8(bytes, _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}

}  // namespace

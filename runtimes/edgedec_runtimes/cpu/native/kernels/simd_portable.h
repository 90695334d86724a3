// Plain C++ for every processor: 4 lanes, which compilers put into vectors where they can.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "weights/coding.h"

namespace {

constexpr int LANES = 4;
constexpr int MAX_ROWS = 4;
struct Bytes { uint8_t v[16]; };
struct Ints { int32_t v[4]; };
struct Floats { float v[4]; };

inline Bytes load_bytes(const void *p) {
  Bytes x;
  memcpy(x.v, p, 16);
  return x;
}
inline Bytes mask_bytes(Bytes x, uint8_t mask) {
  for (int i = 0; i < 16; ++i) x.v[i] &= mask;
  return x;
}
inline Bytes or_bytes(Bytes a, Bytes b) {
  for (int i = 0; i < 16; ++i) a.v[i] |= b.v[i];
  return a;
}
template <int N>
inline Bytes shift_bytes(Bytes x) {
  for (int i = 0; i < 16; ++i) {
    if constexpr (N > 0) x.v[i] = (uint8_t)(x.v[i] << N);
    else if constexpr (N < 0) x.v[i] = (uint8_t)(x.v[i] >> -N);
  }
  return x;
}

inline Bytes load_table(const uint8_t *p) { return load_bytes(p); }
inline Bytes look_up(Bytes table, Bytes indices) {
  for (int i = 0; i < 16; ++i) indices.v[i] = table.v[indices.v[i]];
  return indices;
}

inline Ints set_ints(int32_t x) { return {{x, x, x, x}}; }
template <int N>
inline Ints shift_ints(Ints x) {
  for (int i = 0; i < 4; ++i) {
    if constexpr (N >= 0) x.v[i] *= 1 << N;
    else x.v[i] >>= -N;
  }
  return x;
}

// sums[m] += the products of G groups of 4 columns with row m of the activations (32 bytes from row to row).
template <class Weight, int G, int N>
inline void dots_of(Ints *sums, const Bytes *w, const int8_t *a) {
  for (int g = 0; g < G; ++g)
    for (int m = 0; m < N; ++m)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 4; ++k) sums[m].v[i] += (Weight)w[g].v[4 * i + k] * a[32 * m + 4 * g + k];
}
template <int BITS, int G, int N>
inline void dots(Ints *sums, const Bytes *w, const int8_t *a) {
  dots_of<uint8_t, G, N>(sums, w, a);
}
constexpr bool SIGNED_NEEDS_SUM = false;
template <int N>
inline void dots_signed(Ints *sums, const Bytes *w, const int8_t *a) {
  dots_of<int8_t, 8, N>(sums, w, a);
}

#define EACH(expression)                              \
  Floats r;                                           \
  for (int i = 0; i < 4; ++i) r.v[i] = (expression);  \
  return r;
inline Floats zero() { return {{0, 0, 0, 0}}; }
inline Floats set(float x) { return {{x, x, x, x}}; }
inline Floats load(const float *p) { EACH(p[i]) }
inline void store(float *p, Floats x) { memcpy(p, x.v, 16); }
inline Floats add(Floats a, Floats b) { EACH(a.v[i] + b.v[i]) }
inline Floats sub(Floats a, Floats b) { EACH(a.v[i] - b.v[i]) }
inline Floats mul(Floats a, Floats b) { EACH(a.v[i] * b.v[i]) }
inline Floats div(Floats a, Floats b) { EACH(a.v[i] / b.v[i]) }
inline Floats max(Floats a, Floats b) { EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
inline Floats min(Floats a, Floats b) { EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]) }
inline Floats abs(Floats a) { EACH(fabsf(a.v[i])) }
// The greater of two floats that are not negative; NaN is greater than all numbers.
inline Floats max_magnitude(Floats a, Floats b) {
  int32_t x[LANES], y[LANES];  // their order is that of their bits, as integers
  memcpy(x, a.v, sizeof x);
  memcpy(y, b.v, sizeof y);
  for (int i = 0; i < LANES; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
  memcpy(a.v, x, sizeof x);
  return a;
}
inline Floats fma(Floats a, Floats b, Floats c) { EACH(a.v[i] * b.v[i] + c.v[i]) }
inline Floats fnma(Floats a, Floats b, Floats c) { EACH(c.v[i] - a.v[i] * b.v[i]) }
inline Floats round_even(Floats x) { EACH(nearbyintf(x.v[i])) }
inline Floats to_floats(Ints x) { EACH((float)x.v[i]) }
inline uint16_t sixteen(const void *p, int i) {
  uint16_t x;
  memcpy(&x, (const uint8_t *)p + 2 * i, 2);
  return x;
}
inline Floats load_halves(const void *p) { EACH(edgedec::half_to_float(sixteen(p, i))) }
inline Floats load_bfloats(const void *p) { EACH(edgedec::bfloat_to_float(sixteen(p, i))) }
inline Floats load_u8(const uint8_t *p) { EACH((float)p[i]) }
inline Floats load_low4(const uint8_t *p) { EACH((float)((p[i] & 15) - 8)) }
inline Floats load_high4(const uint8_t *p) { EACH((float)((p[i] >> 4) - 8)) }
inline Floats load_s8(const void *p) { EACH((float)((const int8_t *)p)[i]) }
inline Floats load_exponents(const uint8_t *p) { EACH(edgedec::half_of_exponent(p[i])) }
// A whole number as an integer; what is none, or too large for one, is the least integer, as on x86.
inline int32_t integer(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? (int32_t)x : INT32_MIN; }
inline void store_s8(int8_t *p, Floats x) {
  for (int i = 0; i < 4; ++i) p[i] = (int8_t)integer(nearbyintf(x.v[i]));
}
inline Floats power_of_two(Floats x) { EACH(ldexpf(1.0f, integer(x.v[i]))) }
EDGEDEC_INLINE void prefetch(const void *) {}
EDGEDEC_INLINE void prefetch_to_l2(const void *) {}

// --- one number from the lanes of a vector: lanes i and i + 2 are joined first ---

inline float sum_lanes(Floats x) { return (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]); }
inline float max_lanes(Floats x) {  // a pair with NaN gives its first element
  const float a = x.v[2] > x.v[0] ? x.v[2] : x.v[0], b = x.v[3] > x.v[1] ? x.v[3] : x.v[1];
  return b > a ? b : a;
}
// The greatest of lanes that are not negative, as in max_magnitude.
inline float max_magnitude_lanes(Floats x) {
  Floats y = {{x.v[2], x.v[3], x.v[0], x.v[1]}};
  x = max_magnitude(x, y);
  y = {{x.v[1], x.v[0], x.v[3], x.v[2]}};
  return max_magnitude(x, y).v[0];
}
// The sum of 16 int8.
inline int32_t sum_s8(const int8_t *p) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += p[i];
  return sum;
}
// In each lane a where x < 0, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) { EACH(x.v[i] < 0 ? a.v[i] : b.v[i]) }
inline void store_halves(uint16_t *p, Floats x) {
  for (int i = 0; i < 4; ++i) p[i] = edgedec::float_to_half(x.v[i]);
}
#undef EACH

}  // namespace

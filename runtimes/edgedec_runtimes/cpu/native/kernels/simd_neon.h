// NEON with the dot products of Armv8.2, and with i8mm where EDGEDEC_SIMD is 5: 4 lanes. matmul_neon.inl has the
// products.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr int LANES = 4;
constexpr int MAX_ROWS = 16;  // the most activations that a kernel takes at once
using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;

inline Bytes load_bytes(const void *p) { return vld1q_u8((const uint8_t *)p); }
inline Bytes mask_bytes(Bytes x, uint8_t mask) { return vandq_u8(x, vdupq_n_u8(mask)); }

inline Ints set_ints(int32_t x) { return vdupq_n_s32(x); }
template <int N>
inline Ints shift_ints(Ints x) { return N == 0 ? x : vshlq_n_s32(x, N); }

inline Floats zero() { return vdupq_n_f32(0); }
inline Floats set(float x) { return vdupq_n_f32(x); }
inline Floats load(const float *p) { return vld1q_f32(p); }
inline void store(float *p, Floats x) { vst1q_f32(p, x); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats div(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats min(Floats a, Floats b) { return vminq_f32(a, b); }
inline Floats abs(Floats a) { return vabsq_f32(a); }
// The greater of two floats that are not negative; NaN is greater than all numbers.
inline Floats max_magnitude(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats fnma(Floats a, Floats b, Floats c) { return vfmsq_f32(c, a, b); }
inline Floats round_even(Floats x) { return vrndnq_f32(x); }
inline Floats to_floats(Ints x) { return vcvtq_f32_s32(x); }
inline Floats load_halves(const void *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}
inline Floats load_bfloats(const void *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16));
}
inline Floats load_u8(const uint8_t *p) {
  const float four[4] = {(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
  return vld1q_f32(four);
}
inline Floats load_low4(const uint8_t *p) {
  const int32_t four[4] = {(p[0] & 15) - 8, (p[1] & 15) - 8, (p[2] & 15) - 8, (p[3] & 15) - 8};
  return vcvtq_f32_s32(vld1q_s32(four));
}
inline Floats load_high4(const uint8_t *p) {
  const int32_t four[4] = {(p[0] >> 4) - 8, (p[1] >> 4) - 8, (p[2] >> 4) - 8, (p[3] >> 4) - 8};
  return vcvtq_f32_s32(vld1q_s32(four));
}
inline Floats load_s8(const void *bytes) {
  const int8_t *p = (const int8_t *)bytes;
  const float four[4] = {(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
  return vld1q_f32(four);
}
inline Floats load_exponents(const uint8_t *p) {
  const int32x4_t e = {p[0], p[1], p[2], p[3]};
  const int32x4_t bits = vshlq_n_s32(vsubq_s32(e, vdupq_n_s32(1)), 23), low = vshlq_s32(vdupq_n_s32(0x00200000), e);
  return vreinterpretq_f32_s32(vbslq_s32(vcltq_s32(e, vdupq_n_s32(2)), low, bits));
}
inline void store_s8(int8_t *p, Floats x) {
  const int32x4_t whole = vcvtnq_s32_f32(x);
  p[0] = (int8_t)vgetq_lane_s32(whole, 0);
  p[1] = (int8_t)vgetq_lane_s32(whole, 1);
  p[2] = (int8_t)vgetq_lane_s32(whole, 2);
  p[3] = (int8_t)vgetq_lane_s32(whole, 3);
}
inline Floats power_of_two(Floats x) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
}
EDGEDEC_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
EDGEDEC_INLINE void prefetch_to_l2(const void *p) { __builtin_prefetch(p, 0, 2); }

// --- one number from the lanes of a vector: lanes i and i + 2 are joined first ---

inline float sum_lanes(Floats x) {
  const float32x2_t half = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(half, 0) + vget_lane_f32(half, 1);
}
inline float max_lanes(Floats x) {  // a pair with NaN gives its first element
  const float32x2_t low = vget_low_f32(x), high = vget_high_f32(x), half = vbsl_f32(vcgt_f32(high, low), high, low);
  const float a = vget_lane_f32(half, 0), b = vget_lane_f32(half, 1);
  return b > a ? b : a;
}
// The greatest of lanes that are not negative, as in max_magnitude: floats are ordered as their bits are as integers.
inline float max_magnitude_lanes(Floats x) {
  return vgetq_lane_f32(vreinterpretq_f32_s32(vdupq_n_s32(vmaxvq_s32(vreinterpretq_s32_f32(x)))), 0);
}
// The sum of 16 int8.
inline int32_t sum_s8(const int8_t *p) { return vaddlvq_s8(vld1q_s8(p)); }
// In each lane a where x < 0, else b.
inline Floats where_negative(Floats x, Floats a, Floats b) { return vbslq_f32(vcltzq_f32(x), a, b); }
// Round to halves, as edgedec::float_to_half does: what is too large becomes the largest finite number.
inline void store_halves(uint16_t *p, Floats x) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  const float32x4_t size = vminnmq_f32(vabsq_f32(x), vdupq_n_f32(65504.0f));  // the second one where x is NaN
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(vbslq_f32(sign, x, size))));
}

}  // namespace

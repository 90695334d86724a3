// The kernels of the instruction set EDGEDEC_SIMD. This file is compiled once for each set, with that set's compiler
// flags. Everything has internal linkage, as no other file may call a function that was compiled with those flags.
#include "kernels/kernels.h"

#include <math.h>
#include <string.h>

#include <utility>

#include "edgedec_cpu.h"
#include "weights/coding.h"
#include "weights/tensor_types.h"

#define UNROLL _Pragma("GCC unroll 16")

#define EDGEDEC_INLINE __attribute__((always_inline)) inline

// EDGEDEC_SIMD: 0 portable, 1 NEON, 2 AVX2, 3 AVX-512 with VNNI, 4 AVX2 with AVX-VNNI, 5 NEON with i8mm
#define EDGEDEC_NEON (EDGEDEC_SIMD == 1 || EDGEDEC_SIMD == 5)
#if EDGEDEC_SIMD == 3
#include "kernels/simd_avx512.h"
#elif EDGEDEC_SIMD == 2 || EDGEDEC_SIMD == 4
#include "kernels/simd_avx2.h"
#elif EDGEDEC_NEON
#include "kernels/simd_neon.h"
#else
#include "kernels/simd_portable.h"
#endif

#if EDGEDEC_NEON
#include "kernels/arm_features.h"
#elif EDGEDEC_SIMD == 2 || EDGEDEC_SIMD == 4
#include <cpuid.h>
#endif

namespace {

using edgedec::ActivationBlock;
using edgedec::Activations;
using edgedec::Ahead;
using edgedec::AttentionWork;
using edgedec::Function;
using edgedec::GROUP_ROWS;
using edgedec::hash_of;
using edgedec::Matrix;
using edgedec::MAX_QUERIES;
using edgedec::PairsWork;
using edgedec::PanelWork;
using edgedec::QUERY_GROUP;

constexpr bool ROWS_IN_PAIRS = EDGEDEC_SIMD == 5;  // of the activations (kernels.h)

#include "kernels/elementwise.inl"
#include "kernels/matmul.inl"
#include "kernels/attention.inl"
#include "kernels/row.inl"
#include "kernels/state.inl"
#include "kernels/panels.inl"

#if EDGEDEC_SIMD == 2 || EDGEDEC_SIMD == 4
// F16C is bit 29 of ECX in CPUID's leaf 1, AVX-VNNI bit 4 of EAX in its leaf 7.1; __builtin_cpu_supports of clang 16
// does not know the first, and not every compiler's knows the other.
bool has_halves_and_dpbusd() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 29)) == 0) return false;
  return EDGEDEC_SIMD == 2 || (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0);
}
#endif

bool supported() {
#if EDGEDEC_SIMD == 3
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#elif EDGEDEC_SIMD == 2 || EDGEDEC_SIMD == 4
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_halves_and_dpbusd();
#elif EDGEDEC_NEON
  return edgedec::has_dots() && (EDGEDEC_SIMD == 1 || edgedec::has_i8mm());
#else
  return true;
#endif
}

}  // namespace

namespace edgedec {

#if EDGEDEC_SIMD == 3
#define EDGEDEC_NAME "avx512vnni"
const Kernels *avx512_kernels() {
#elif EDGEDEC_SIMD == 4
#define EDGEDEC_NAME "avxvnni"
const Kernels *avxvnni_kernels() {
#elif EDGEDEC_SIMD == 2
#define EDGEDEC_NAME "avx2"
const Kernels *avx2_kernels() {
#elif EDGEDEC_SIMD == 5
#define EDGEDEC_NAME "i8mm"
const Kernels *i8mm_kernels() {
#elif EDGEDEC_SIMD == 1
#define EDGEDEC_NAME "neon"
const Kernels *neon_kernels() {
#else
#define EDGEDEC_NAME "portable"
const Kernels *portable_kernels() {
#endif
  static const Kernels kernels = {
      EDGEDEC_NAME, supported, matmul,     quantize,   rms_norm,   rope,    gated,       add_rows,
      softcap,      to_halves, map,        multiply_by_sigmoid,    fold_state, step_state,  attend,
      weigh,        join_spans,   panel,      pairs,     to_pairs,   widen,   layer_norm,  exp_row,
      row_maxima,   row_sum,    row_chances,           ROWS_IN_PAIRS};
  return &kernels;
}

}  // namespace edgedec

// The kernels of every instruction set that was compiled for this family of processors, the best first.
#pragma once
#include "kernels/kernels.h"

namespace edgedec {

// Returns an array that ends with nullptr; a set in it may be one that this processor does not support.
inline const Kernels *const *all_kernels() {
  static const Kernels *const kernels[] = {
#if defined(EDGEDEC_HAS_X86)
      avx512_kernels(),
#if defined(EDGEDEC_HAS_AVXVNNI)
      avxvnni_kernels(),
#endif
      avx2_kernels(),
#endif
#if defined(EDGEDEC_HAS_NEON)
#if defined(EDGEDEC_HAS_I8MM)
      i8mm_kernels(),
#endif
      neon_kernels(),
#endif
      portable_kernels(), nullptr};
  return kernels;
}

}  // namespace edgedec

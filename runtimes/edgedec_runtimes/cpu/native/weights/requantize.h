// Rounding rows of any type to Q4_0, for matrices whose speed counts for more than their last bits.
#pragma once
#include <stdint.h>

namespace edgedec {

// Write rows, as a GGUF has them in `type`, as rows of Q4_0. n_cols is a multiple of 32 and fits the type. Each block gets
// the scale with the least squared error of a few around the one that ggml would choose.
void rows_to_q4_0(int32_t type, int64_t n_rows, int64_t n_cols, const uint8_t *source, uint8_t *out);

}  // namespace edgedec

// Searching one row of logits over the whole vocabulary, for sampling.
#pragma once
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

namespace edgedec {

// Whether all values are finite: no exponent has all its bits set.
inline bool all_finite(const float *values, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    found |= (uint32_t)((bits & 0x7f800000u) == 0x7f800000u);
  }
  return found == 0;
}

// Set `most` to the greatest value and return the sum of exp(x - most), NaN where a value is not finite.
double row_total(const Kernels &k, const float *x, int64_t n, float *most);

// Return the index of the greatest value, of equal ones the lowest; any index where a value is NaN.
int64_t row_argmax(const Kernels &k, const float *x, int64_t n);

// Write the indices of values that are at least `threshold`, ascending and at most `capacity` of them, and return how
// many there are.
int64_t row_above(const Kernels &k, const float *x, int64_t n, float threshold, int64_t *ids, int64_t capacity);

// Write the indices of the `top_k` greatest values, ascending; of equal values those with the lowest indices.
void row_top_k(const Kernels &k, const float *x, int64_t n, int64_t top_k, int64_t *ids);

// Write the indices of the fewest greatest values whose exponentials sum to at least top_p of the whole (Holtzman et
// al. 2020, arXiv:1904.09751), ascending; of equal values those with the lowest indices. `capacity` as in row_above.
int64_t row_nucleus(const Kernels &k, const float *x, int64_t n, double top_p, int64_t *ids, int64_t capacity);

// Write a few indices, ascending, one of which is argmax over i of x[i] / temperature + G(key, i). G is the Gumbel
// noise -log(-log(u)), and u the hash of key and index (see edgedec/sampling.py). `capacity` as in row_above.
int64_t row_contenders(const Kernels &k, const float *x, int64_t n, float temperature, uint64_t key, int64_t *ids,
                       int64_t capacity);

}  // namespace edgedec

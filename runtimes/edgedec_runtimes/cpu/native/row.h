// What sampling asks of one row of logits over the whole vocabulary.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace edgedec {

// The greatest value, and the sum of exp(x - most): not a number where a value is not finite.
double row_total(const Kernels &k, const float *x, int64_t n, float *most);

// The indices, ascending, of values that are at least `threshold`; how many there are, of which at most `capacity` are
// written.
int64_t row_above(const Kernels &k, const float *x, int64_t n, float threshold, int64_t *ids, int64_t capacity);

// The indices, ascending, of the `top_k` greatest values; of equal ones those of the lowest indices.
void row_top_k(const Kernels &k, const float *x, int64_t n, int64_t top_k, int64_t *ids);

// The indices, ascending, of the fewest greatest values whose exponentials sum to at least top_p of the whole (Holtzman
// et al. 2020, arXiv:1904.09751); of equal ones those of the lowest indices. As row_above for `capacity`.
int64_t row_nucleus(const Kernels &k, const float *x, int64_t n, double top_p, int64_t *ids, int64_t capacity);

// The indices, ascending, among which argmax over i of x[i] / temperature + G(key, i) lies; G is the Gumbel noise
// -log(-log(u)), u the hash of key and index (see edgedec/sampling.py). As row_above for `capacity`.
int64_t row_contenders(const Kernels &k, const float *x, int64_t n, float temperature, uint64_t key, int64_t *ids,
                       int64_t capacity);

}  // namespace edgedec

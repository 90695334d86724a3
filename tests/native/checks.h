// What the checks of the kernels share: random inputs, comparisons, and the count of failures.
#pragma once
#include <stdint.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace checks {

using Floats = std::vector<float>;

extern int n_checked, n_failed;

// Count a check; print what failed.
void expect(bool holds, const edgedec::Kernels &kernels, const std::string &what);
bool same_bits(const float *a, const float *b, size_t n);
inline bool same_bits(const Floats &a, const Floats &b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

Floats normal(std::mt19937 &random, size_t n, float spread = 1.0f);

// attention_checks.cpp
void check_attention(const edgedec::Kernels &kernels);

// state_checks.cpp
void check_states(const edgedec::Kernels &kernels);

// panel_checks.cpp
void check_panels(const edgedec::Kernels &kernels);

// group_checks.cpp
void check_groups();

// recurrence_checks.cpp
void check_recurrence();

}  // namespace checks

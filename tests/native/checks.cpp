#include "checks.h"

#include <stdio.h>
#include <string.h>

namespace checks {

int n_checked = 0, n_failed = 0;

void expect(bool holds, const edgedec::Kernels &kernels, const std::string &what) {
  ++n_checked;
  if (holds) return;
  if (++n_failed <= 40) printf("FAILED  %s: %s\n", kernels.name, what.c_str());
}

bool same_bits(const float *a, const float *b, size_t n) { return memcmp(a, b, n * sizeof(float)) == 0; }

Floats normal(std::mt19937 &random, size_t n, float spread) {
  std::normal_distribution<float> distribution(0.0f, spread);
  Floats values(n);
  for (float &value : values) value = distribution(random);
  return values;
}

}  // namespace checks

// Products with panels, norms and softmax rows of picture encoders against double precision; and the same bits for a row
// whatever rows are beside it.
#include <math.h>

#include <algorithm>

#include "checks.h"
#include "weights/tensor_types.h"

namespace checks {
namespace {

using edgedec::Kernels;
using edgedec::TILE_ROWS;

constexpr int64_t COLUMNS = 96, ROWS = 13;
constexpr size_t WIDTH = (size_t)TILE_ROWS;

double off(double found, double exact) { return std::abs(found - exact); }

void check_panel(const Kernels &kernels, std::mt19937 &random) {
  const Floats weights = normal(random, COLUMNS * WIDTH), x = normal(random, ROWS * COLUMNS);
  const Floats before = normal(random, ROWS * WIDTH);
  Floats y = before, alone = before;
  kernels.panel({weights.data(), COLUMNS, ROWS, x.data(), COLUMNS, y.data(), TILE_ROWS, true});
  double worst = 0;
  for (size_t row = 0; row < ROWS; ++row) {
    float *one = alone.data() + row * WIDTH;
    kernels.panel({weights.data(), COLUMNS, 1, x.data() + row * COLUMNS, COLUMNS, one, TILE_ROWS, true});
    for (size_t i = 0; i < WIDTH; ++i) {
      double exact = (double)before[row * WIDTH + i];
      for (size_t c = 0; c < COLUMNS; ++c) exact += (double)x[row * COLUMNS + c] * (double)weights[c * WIDTH + i];
      worst = std::max(worst, off((double)y[row * WIDTH + i], exact));
    }
  }
  expect(worst < 2e-4, kernels, "products with a panel");
  expect(same_bits(y, alone), kernels, "a row of a panel's products has other bits alone");
}

void check_pairs(const Kernels &kernels, std::mt19937 &random) {
  if (kernels.pairs == nullptr) return;
  const Floats x = normal(random, ROWS * COLUMNS), scales = normal(random, COLUMNS / 32 * WIDTH, 0.01f);
  std::vector<int16_t> weights(COLUMNS * WIDTH), whole(ROWS * COLUMNS);
  for (int16_t &w : weights) w = (int16_t)((int)(random() % 256) - 128);
  weights[0] = -128;
  Floats x_scales(ROWS), y(ROWS * WIDTH), alone(ROWS * WIDTH);
  for (size_t row = 0; row < ROWS; ++row)
    x_scales[row] = kernels.to_pairs(x.data() + row * COLUMNS, COLUMNS, whole.data() + row * COLUMNS);
  const auto multiply = [&](size_t row, int64_t n, Floats &out) {
    kernels.pairs({weights.data(), scales.data(), COLUMNS, n, whole.data() + row * COLUMNS, COLUMNS,
                   x_scales.data() + row, 1, out.data() + row * WIDTH, TILE_ROWS, false});
  };
  multiply(0, ROWS, y);
  double worst = 0;
  for (size_t row = 0; row < ROWS; ++row) {
    multiply(row, 1, alone);
    for (size_t i = 0; i < WIDTH; ++i) {
      double exact = 0;
      for (size_t c = 0; c < COLUMNS; ++c)
        exact += (double)x[row * COLUMNS + c] * (double)scales[c / 32 * WIDTH + i] *
                 (double)weights[c / 2 * 2 * WIDTH + 2 * i + c % 2];
      worst = std::max(worst, off((double)y[row * WIDTH + i], exact));
    }
  }
  expect(worst < 2e-3, kernels, "products of pairs");  // of numbers of about 10, rounded to 1 / 16000
  expect(same_bits(y, alone), kernels, "a row of products of pairs has other bits alone");
}

void check_rows(const Kernels &kernels, std::mt19937 &random) {
  for (size_t n : {1, 16, 75}) {
    const Floats x = normal(random, n, 3.0f), weight = normal(random, n), bias = normal(random, n);
    Floats out(n), e = x;
    kernels.layer_norm(x.data(), weight.data(), bias.data(), 1e-6f, (int64_t)n, out.data());
    double mean = 0, square = 0, sum = 0, worst = 0, most = (double)*std::max_element(x.begin(), x.end());
    for (float v : x) mean += (double)v / (double)n;
    for (float v : x) square += ((double)v - mean) * ((double)v - mean) / (double)n;
    for (size_t i = 0; i < n; ++i)
      worst = std::max(worst, off((double)out[i], ((double)x[i] - mean) / sqrt(square + 1e-6) * (double)weight[i] +
                                                      (double)bias[i]));
    expect(worst < 1e-5, kernels, "the norm of " + std::to_string(n) + " numbers");
    float greatest = -INFINITY;
    const double total = (double)kernels.exp_row(e.data(), (int64_t)n, &greatest);
    for (float v : x) sum += exp((double)v - most);
    expect((double)greatest == most && off(total, sum) < 1e-5 * sum, kernels, "the sum of exponentials");
  }
}

}  // namespace

void check_panels(const Kernels &kernels) {
  std::mt19937 random(5);
  check_panel(kernels, random);
  check_pairs(kernels, random);
  check_rows(kernels, random);
}

}  // namespace checks

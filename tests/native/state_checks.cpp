// The steps of recurrent states against sums in double precision, and bit by bit however rows and lanes are cut.
#include <math.h>
#include <string.h>

#include <cmath>

#include "checks.h"

namespace checks {
namespace {

using edgedec::Function;
using edgedec::Kernels;
using edgedec::STATE_LANES;

constexpr int64_t N_TOKENS = 9;
constexpr size_t LANES = (size_t)STATE_LANES;

// A tile, and what some tokens bring; with `corrects` their updates are found by the delta rule.
struct Text {
  int64_t n;
  bool corrects;
  Floats tile, keys, values, queries, decays, gains;

  Text(std::mt19937 &random, int64_t n_rows, bool delta)
      : n(n_rows), corrects(delta), tile(normal(random, (size_t)n * LANES)) {
    keys = normal(random, (size_t)(N_TOKENS * n), 1.0f / sqrtf((float)n));
    values = normal(random, N_TOKENS * LANES);
    queries = normal(random, (size_t)(N_TOKENS * n));
    for (int64_t t = 0; t < N_TOKENS; ++t) {
      decays.push_back(1.0f / (1.0f + (float)(random() % 1000) / 100.0f));
      gains.push_back((float)(random() % 1000) / 1000.0f);
    }
  }

  // Step on, and return the update of the token; its result goes to `out`.
  Floats step(const Kernels &kernels, Floats &state, int64_t t, float *out) const {
    const float *value = values.data() + t * STATE_LANES;
    Floats update(value, value + STATE_LANES);
    kernels.step_state(state.data(), n, keys.data() + t * n, queries.data() + t * n, update.data(), decays[(size_t)t],
                       gains[(size_t)t], corrects, out);
    return update;
  }
};

void check_steps(const Kernels &kernels, const Text &text) {
  const std::string what = "a state of " + std::to_string(text.n) + " rows";
  std::vector<double> exact(text.tile.begin(), text.tile.end());
  Floats state = text.tile, folded = text.tile, out(LANES);
  double worst = 0;
  for (int64_t t = 0; t < N_TOKENS; ++t) {
    const float *key = text.keys.data() + t * text.n, *query = text.queries.data() + t * text.n;
    const double decay = (double)text.decays[(size_t)t], gain = (double)text.gains[(size_t)t];
    const Floats update = text.step(kernels, state, t, out.data());
    kernels.fold_state(folded.data(), text.n, key, update.data(), text.decays[(size_t)t]);
    expect(same_bits(state, folded), kernels, what + ": folding a token leaves other bits than the step");
    for (size_t lane = 0; lane < LANES; ++lane) {
      double known = 0, value = (double)text.values[(size_t)t * LANES + lane], sum = 0;
      for (int64_t i = 0; i < text.n; ++i) known += exact[(size_t)i * LANES + lane] * (double)key[i];
      if (text.corrects) value = gain * (value - decay * known);
      for (int64_t i = 0; i < text.n; ++i) {
        double &element = exact[(size_t)i * LANES + lane];
        element = decay * element + (double)key[i] * value;
        sum += element * (double)query[i];
      }
      worst = fmax(worst, fabs(sum - (double)out[lane]) / sqrt((double)text.n));
      worst = fmax(worst, fabs(value - (double)update[lane]));
    }
  }
  expect(worst < 1e-5, kernels, what + ": it is " + std::to_string(worst) + " off");
}

// Each lane has the bits that it has where it is the only one that is not 0.
void check_lanes(const Kernels &kernels, const Text &text) {
  Floats whole = text.tile, out(LANES);
  text.step(kernels, whole, 0, out.data());
  for (size_t lane = 0; lane < LANES; lane += 5) {
    Text alone = text;
    for (size_t i = 0; i < alone.tile.size(); ++i)
      if (i % LANES != lane) alone.tile[i] = 0.0f;
    for (size_t i = 0; i < LANES; ++i)
      if (i != lane) alone.values[i] = 0.0f;
    Floats state = alone.tile, found(LANES);
    alone.step(kernels, state, 0, found.data());
    expect(same_bits(&found[lane], &out[lane], 1), kernels, "a lane of a state depends on others");
  }
}

double exact(Function function, double x) {
  switch (function) {
    case Function::silu: return x / (1 + exp(-x));
    case Function::sigmoid: return 1 / (1 + exp(-x));
    case Function::softplus: return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
    default: return exp(x);
  }
}

void check_maps(const Kernels &kernels, std::mt19937 &random) {
  for (Function function : {Function::silu, Function::sigmoid, Function::softplus, Function::exp})
    for (size_t n : {1, 3, 8, 24, 50}) {
      Floats x = normal(random, n, 12.0f);
      for (float &value : x)
        if (function == Function::exp) value = -fabsf(value);
      Floats found = x;
      kernels.map(function, found.data(), (int64_t)n);
      for (size_t i = 0; i < n; ++i) {
        const double expected = exact(function, (double)x[i]);
        const std::string what = "function " + std::to_string((int)function) + " of " + std::to_string(x[i]);
        expect(fabs((double)found[i] - expected) <= 1e-6 * fabs(expected), kernels, what);
        kernels.map(function, &x[i], 1);
        expect(same_bits(&x[i], &found[i], 1), kernels, what + " depends on its place");
      }
      float odd = NAN;
      kernels.map(function, &odd, 1);
      expect(std::isnan(odd), kernels, "a function hides what is no number");
    }
}

}  // namespace

void check_states(const Kernels &kernels) {
  std::mt19937 random(11);
  for (int64_t n : {1, 2, 7, 40, 128, 256})
    for (bool corrects : {false, true}) {
      const Text text(random, n, corrects);
      check_steps(kernels, text);
      check_lanes(kernels, text);
    }
  check_maps(kernels, random);
}

}  // namespace checks

#include "forward/experts.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace edgedec {
namespace {

constexpr float LEAST_SUM = 6.103515625e-5f;  // that shares are divided by; the same as llama.cpp's

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Write e^(x - max) / sum to out.
void softmax(const float *x, int32_t n, float *out) {
  float most = x[0], sum = 0;
  for (int32_t i = 1; i < n; ++i) most = std::max(most, x[i]);
  for (int32_t i = 0; i < n; ++i) sum += out[i] = expf(x[i] - most);
  for (int32_t i = 0; i < n; ++i) out[i] /= sum;
}

// Return the index of the greatest value, of equals the first; those that are taken are left out.
int32_t greatest(const float *values, const uint8_t *taken, int32_t n) {
  int32_t best = -1;
  for (int32_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

}  // namespace

int64_t most_groups(int64_t n_rows, const ec_config &config) {
  const int64_t n_pairs = n_rows * config.n_expert_used;
  return std::min(n_pairs, config.n_expert + n_pairs / MAX_IN_GROUP);
}

int64_t most_slots(int64_t n_rows, const ec_config &config) {
  return n_rows * config.n_expert_used + most_groups(n_rows, config) * (GROUP_ROWS - 1);
}

void Routing::reserve(int64_t n_rows, const ec_config &config) {
  const size_t n_pairs = (size_t)(n_rows * config.n_expert_used);
  chosen.resize(n_pairs);
  shares.resize(n_pairs);
  shared.resize((size_t)n_rows);
  rows.resize(n_pairs);
  weights.resize(n_pairs);
  groups.reserve((size_t)most_groups(n_rows, config));
}

void Routing::choose_positive(int64_t row, const float *scores, const ec_config &c) {
  int32_t *experts = chosen.data() + row * c.n_expert;
  float *out = shares.data() + row * c.n_expert, sum = 0;
  for (int32_t i = 0; i < c.n_expert; ++i) {
    experts[i] = i;
    out[i] = scores[i] > 0 ? scores[i] : 0.0f;
    sum += out[i] * out[i];
  }
  const float factor = c.expert_scale / sqrtf(sum / (float)c.n_expert + c.rms_epsilon);
  for (int32_t i = 0; i < c.n_expert; ++i) out[i] *= factor;
}

void Routing::choose(int64_t row, const float *scores, const float *bias, const ec_config &c) {
  if (c.expert_gating == EC_GATING_RELU) return choose_positive(row, scores, c);
  float gates[MAX_EXPERTS], biased[MAX_EXPERTS];
  uint8_t taken[MAX_EXPERTS] = {};
  const bool after = c.expert_gating == EC_GATING_CHOSEN;
  if (c.expert_gating == EC_GATING_SOFTMAX) softmax(scores, c.n_expert, gates);
  else
    for (int32_t i = 0; i < c.n_expert; ++i) gates[i] = after ? scores[i] : sigmoid(scores[i]);
  for (int32_t i = 0; i < c.n_expert; ++i) biased[i] = gates[i] + (bias != nullptr ? bias[i] : 0.0f);
  int32_t *experts = chosen.data() + row * c.n_expert_used;
  float *out = shares.data() + row * c.n_expert_used, sum = 0;
  for (int32_t k = 0; k < c.n_expert_used; ++k) {
    experts[k] = greatest(biased, taken, c.n_expert);
    taken[experts[k]] = 1;
    sum += out[k] = gates[experts[k]];
  }
  if (after) softmax(out, c.n_expert_used, out);
  for (int32_t k = 0; k < c.n_expert_used; ++k) {
    if (c.norm_experts) out[k] /= std::max(sum, LEAST_SUM);
    out[k] *= c.expert_scale;
  }
}

void Routing::scale(int64_t row, const float *scales, const ec_config &c) {
  for (int64_t i = row * c.n_expert_used; i < (row + 1) * c.n_expert_used; ++i)
    shares[(size_t)i] *= scales[chosen[(size_t)i]];
}

void Routing::group(int64_t n_rows, const ec_config &c) {
  int32_t ends[MAX_EXPERTS + 1] = {};  // of the rows of each expert, while they are written
  const int64_t n_pairs = n_rows * c.n_expert_used;
  const bool skips = c.expert_gating == EC_GATING_RELU;
  const auto counts = [&](int64_t i) { return !skips || shares[(size_t)i] != 0.0f; };
  for (int64_t i = 0; i < n_pairs; ++i) ends[chosen[(size_t)i] + 1] += counts(i);
  for (int32_t e = 0; e < c.n_expert; ++e) ends[e + 1] += ends[e];
  groups.clear();
  most_in_group = 0;
  int32_t slot = 0;
  for (int32_t e = 0; e < c.n_expert; ++e)
    for (int32_t first = ends[e]; first < ends[e + 1]; first += MAX_IN_GROUP) {
      const int32_t n = std::min(MAX_IN_GROUP, ends[e + 1] - first);
      groups.push_back({e, n, first, slot});
      slot += (n + GROUP_ROWS - 1) / GROUP_ROWS * GROUP_ROWS;
      most_in_group = std::max(most_in_group, n);
    }
  for (int64_t i = 0; i < n_pairs; ++i) {
    if (!counts(i)) continue;
    const int32_t to = ends[chosen[(size_t)i]]++;
    rows[(size_t)to] = (int32_t)(i / c.n_expert_used);
    weights[(size_t)to] = shares[(size_t)i];
  }
}

uint64_t Routing::n_touched() const {
  uint64_t n = 0;
  for (size_t i = 0; i < groups.size(); ++i) n += i == 0 || groups[i].expert != groups[i - 1].expert;
  return n;
}

void copy_activations(const Activations &from, int64_t row, const Activations &to, int64_t to_row, bool in_pairs) {
  if (to.x != nullptr) memcpy(to.x + to_row * to.n, from.x + row * from.n, (size_t)to.n * sizeof(float));
  if (to.blocks == nullptr) return;
  const int r = (int)(row % GROUP_ROWS), t = (int)(to_row % GROUP_ROWS);
  const ActivationBlock *source = from.blocks + row / GROUP_ROWS * (from.n / 32);
  ActivationBlock *target = to.blocks + to_row / GROUP_ROWS * (to.n / 32);
  for (int64_t i = 0; i < to.n / 32; ++i) {
    for (int column = 0; column < 32; column += 8)
      memcpy((int8_t *)target[i].q + index_in_block(in_pairs, t, column),
             (const int8_t *)source[i].q + index_in_block(in_pairs, r, column), 8);
    target[i].scale[t] = source[i].scale[r];
    target[i].sum[t] = source[i].sum[r];
    target[i].minus8[t] = source[i].minus8[r];
    for (int half = 0; half < 2; ++half) target[i].minus32[half][t] = source[i].minus32[half][r];
  }
}

}  // namespace edgedec

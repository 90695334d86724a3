// A layer with the gated delta rule (Yang et al. 2024, arXiv:2412.06464): the stages around its recurrence
// (state_stages.cpp).
//
// A row of m_.mix is what the convolution goes over (queries, keys, values), a gate for each element of the result, and
// two numbers for each head: of how much the state forgets, and of how much it learns.
#include <math.h>

#include <algorithm>

#include "forward/run.h"

namespace edgedec {

// Make the records of rows, their queries, and how much they learn. A piece is one key head of a row, and as many heads
// of values as share it.
void Run::make_delta_records(int thread, const Layer &layer, const std::vector<int32_t> &rows) {
  const int64_t n_key_head = m_.recurrent.n_key_head;
  stages_.each(thread, (int64_t)rows.size() * n_key_head, [&](int64_t piece) {
    const int64_t i = piece / n_key_head;
    make_delta_record(layer, plan_.rows[(size_t)rows[(size_t)i]], i, piece % n_key_head);
  });
}

void Run::make_delta_record(const Layer &layer, const RowInfo &row, int64_t i, int64_t key_head) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t n_key = shape.n_key, n_value = shape.n_value, n_keys = shape.n_key_head * n_key;
  const int64_t per_key = shape.n_head / shape.n_key_head, first = key_head * per_key;
  const float *products = m_.mix.data() + i * layer.mix_width;
  float *record = record_of(layer, row, i), *query = m_.queries.data() + i * n_keys + key_head * n_key,
        *key = record + shape.keys() + key_head * n_key;
  // Convolve n elements from `begin` on, and keep what the convolutions of later rows read.
  const auto convolve = [&](int64_t begin, int64_t n, float *out) {
    convolve_columns(layer, row, i, begin, n, out);
    k_.map(Function::silu, out, n);
    std::copy_n(products + begin, n, record + begin);
  };
  convolve(key_head * n_key, n_key, query);
  convolve(n_keys + key_head * n_key, n_key, key);
  // x / sqrt(sum of squares + epsilon), as a norm by the mean
  const float epsilon = c_.rms_epsilon / (float)n_key;
  k_.rms_norm(query, m_.query_weight.data(), epsilon, n_key, query);
  k_.rms_norm(key, m_.key_weight.data(), epsilon, n_key, key);
  for (int64_t h = first; h < first + per_key; ++h) {
    float *value = record + shape.updates() + h * shape.n_lanes();
    convolve(2 * n_keys + h * n_value, n_value, value);
    std::fill(value + n_value, value + shape.n_lanes(), 0.0f);
  }
  set_delta_gates(layer, products + shape.n_column + shape.n_head * n_value, first, per_key, record + shape.decays(),
                  m_.gains.data() + i * shape.n_head);
}

// Set decays and gains of the heads [first, first + n). `scores` are those of decays, then those of gains; where one
// matrix makes both, they are, for each key head, the gains and then the decays of its heads.
void Run::set_delta_gates(const Layer &layer, const float *scores, int64_t first, int64_t n, float *decays,
                          float *gains) const {
  const bool joined = layer.matrices[EC_MIX_BETA].n_rows == 0;
  const float *of_gains = joined ? scores + 2 * first : scores + m_.recurrent.n_head + first;
  const float *of_decays = joined ? of_gains + n : scores + first;
  const float *bias = layer.vectors[EC_STATE_BIAS].data() + first, *rate = layer.vectors[EC_STATE_RATE].data() + first;
  std::copy_n(of_gains, n, gains + first);
  k_.map(Function::sigmoid, gains + first, n);
  for (int64_t h = 0; h < n; ++h) decays[first + h] = of_decays[h] + bias[h];
  k_.map(Function::softplus, decays + first, n);
  for (int64_t h = 0; h < n; ++h) decays[first + h] *= rate[h];
  k_.map(Function::exp, decays + first, n);
}

// Normalize each head of the results of the rows that go on, and multiply it by the SiLU of its gate.
void Run::gate_results(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const RecurrentShape &shape = m_.recurrent;
  const int64_t n_value = shape.n_value, n_together = n_value % 32 == 0 ? 1 : shape.n_head;  // blocks are quantized
  const Activations to = mixed();
  stages_.each(thread, (int64_t)rows.size() * (shape.n_head / n_together), [&](int64_t piece) {
    const int64_t i = piece / (shape.n_head / n_together), first = piece % (shape.n_head / n_together) * n_together;
    const int64_t query = (int64_t)plan_.query_of(l, (size_t)i);
    const float *gates = m_.mix.data() + query * layer.mix_width + shape.n_column;
    const float *results = m_.scanned.data() + query * shape.n_head * shape.n_lanes();
    for (int64_t h = first; h < first + n_together; ++h) {
      float *out = memory + (h - first) * n_value;
      k_.rms_norm(results + h * shape.n_lanes(), layer.vectors[EC_STATE_NORM].data(), c_.rms_epsilon, n_value, out);
      k_.gated(gates + h * n_value, out, n_value, false, out);
    }
    k_.quantize(to, i, first * n_value, n_together * n_value, memory);
  });
}

}  // namespace edgedec

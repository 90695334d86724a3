// A Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060): the stages around its recurrence (state_stages.cpp).
//
// A row's products are what the convolution goes over (the values of all heads, then keys and queries of each group of
// heads), a gate for each element of the result, and a number for each head, which becomes its step of time: the state
// decays by e^(time * rate), and takes in the value times the time.
#include <algorithm>

#include "forward/run.h"

namespace edgedec {

// Make the records of rows and their queries. What was convolved stays in m_.convolved_rows.
void Run::make_space_records(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t n_column = shape.n_column, n_inner = shape.n_head * (int64_t)shape.n_value,
                n_keys = shape.n_key_head * (int64_t)shape.n_key;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    const float *products = m_.mix.data() + i * layer.mix_width;
    float *record = record_of(layer, row, i), *values = m_.convolved_rows.data() + i * n_column;
    convolve_columns(layer, row, i, 0, n_column, values);
    k_.add(values, layer.vectors[EC_CONVOLUTION_BIAS].data(), 1.0f, n_column);
    k_.map(Function::silu, values, n_column);
    std::copy_n(products, n_column, record);
    std::copy_n(values + n_inner, n_keys, record + shape.keys());
    std::copy_n(values + n_inner + n_keys, n_keys, m_.queries.data() + i * n_keys);
    set_times(layer, products + n_column + n_inner, memory, record + shape.decays());
    float *update = record + shape.updates();
    for (int64_t h = 0; h < shape.n_head; ++h, update += shape.n_lanes(), values += shape.n_value) {
      for (int64_t j = 0; j < shape.n_value; ++j) update[j] = values[j] * memory[h];
      std::fill(update + shape.n_value, update + shape.n_lanes(), 0.0f);
    }
  });
  end_stage(thread, EC_OP_ROPE);
}

// Set the step of time of each head by its number, and what its state is multiplied by then.
void Run::set_times(const Layer &layer, const float *numbers, float *times, float *decays) const {
  const int64_t n = m_.recurrent.n_head;
  const float *bias = layer.vectors[EC_STATE_BIAS].data(), *rate = layer.vectors[EC_STATE_RATE].data();
  for (int64_t h = 0; h < n; ++h) times[h] = numbers[h] + bias[h];
  k_.map(Function::softplus, times, n);
  for (int64_t h = 0; h < n; ++h) decays[h] = times[h] * rate[h];
  k_.map(Function::exp, decays, n);
}

// Add a part of the values themselves to the results of the rows that go on, multiply them by the SiLU of their gates,
// and normalize each group, where there is a norm.
void Run::pass_results(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const RecurrentShape &shape = m_.recurrent;
  const std::vector<float> &norm = layer.vectors[EC_STATE_NORM], &passed = layer.vectors[EC_STATE_PASSED];
  const int64_t n_value = shape.n_value, n_inner = shape.n_head * n_value, n_group = n_inner / shape.n_key_head;
  const Activations to = mixed();
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const int64_t query = (int64_t)plan_.query_of(l, (size_t)i);
    const float *values = m_.convolved_rows.data() + query * shape.n_column;
    const float *results = m_.scanned.data() + query * shape.n_head * shape.n_lanes();
    float *out = memory, *normed = memory + n_inner;
    for (int64_t h = 0; h < shape.n_head; ++h) {
      std::copy_n(results + h * shape.n_lanes(), n_value, out + h * n_value);
      k_.add(out + h * n_value, values + h * n_value, passed[(size_t)h], n_value);
    }
    k_.gated(m_.mix.data() + query * layer.mix_width + shape.n_column, out, n_inner, EC_SILU, out);
    for (int64_t begin = 0; !norm.empty() && begin < n_inner; begin += n_group)
      k_.rms_norm(out + begin, norm.data() + begin, c_.rms_epsilon, n_group, normed + begin);
    k_.quantize(to, i, 0, n_inner, norm.empty() ? out : normed);
  });
  end_stage(thread, EC_OP_ATTENTION);
}

}  // namespace edgedec

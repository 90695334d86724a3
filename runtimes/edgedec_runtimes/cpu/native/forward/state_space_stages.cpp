// A Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060): the stages around its recurrence (state_stages.cpp).
//
// A row's products are what the convolution goes over (the values of all heads, then keys and queries of each group of
// heads), a gate for each element of the result, and a number for each head, which becomes its step of time: the state
// decays by e^(time * rate), and takes in the value times the time.
#include <algorithm>

#include "forward/run.h"

namespace edgedec {
namespace {

constexpr int64_t PIECE_ELEMENTS = 1024;  // of a row's values, about

}  // namespace

// Make the records of rows and their queries. A piece is some heads of a row, or the keys and queries of all of them.
void Run::make_space_records(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t together = std::max<int64_t>(1, PIECE_ELEMENTS / shape.n_value),
                n_pieces = (shape.n_head + together - 1) / together + 1;
  stages_.each(thread, (int64_t)rows.size() * n_pieces, [&](int64_t piece) {
    const int64_t i = piece / n_pieces, first = piece % n_pieces * together;
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    if (first < shape.n_head) make_space_heads(layer, row, i, first, std::min(together, shape.n_head - first), memory);
    else make_space_keys(layer, row, i);
  });
}

// Convolve n elements of row i from `begin` on, which go to m_.convolved_rows, and keep what the convolutions of later
// rows read. Return the first of them.
const float *Run::convolve_space(const Layer &layer, const RowInfo &row, int64_t i, int64_t begin, int64_t n) {
  float *out = m_.convolved_rows.data() + i * m_.recurrent.n_column + begin;
  convolve_columns(layer, row, i, begin, n, out);
  k_.add(out, layer.vectors[EC_CONVOLUTION_BIAS].data() + begin, 1.0f, n);
  k_.map(Function::silu, out, n);
  std::copy_n(m_.mix.data() + i * layer.mix_width + begin, n, record_of(layer, row, i) + begin);
  return out;
}

void Run::make_space_keys(const Layer &layer, const RowInfo &row, int64_t i) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t n = shape.n_key_head * (int64_t)shape.n_key, n_inner = shape.n_head * (int64_t)shape.n_value;
  const float *keys = convolve_space(layer, row, i, n_inner, 2 * n);
  std::copy_n(keys, n, record_of(layer, row, i) + shape.keys());
  std::copy_n(keys + n, n, m_.queries.data() + i * n);
}

// Make what the heads [first, first + n) of row i are multiplied by and take in.
void Run::make_space_heads(const Layer &layer, const RowInfo &row, int64_t i, int64_t first, int64_t n, float *times) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t n_value = shape.n_value, n_inner = shape.n_head * n_value;
  float *record = record_of(layer, row, i), *decays = record + shape.decays() + first,
        *update = record + shape.updates() + first * shape.n_lanes();
  const float *values = convolve_space(layer, row, i, first * n_value, n * n_value);
  const float *numbers = m_.mix.data() + i * layer.mix_width + shape.n_column + n_inner + first;
  const float *bias = layer.vectors[EC_STATE_BIAS].data() + first, *rate = layer.vectors[EC_STATE_RATE].data() + first;
  for (int64_t h = 0; h < n; ++h) times[h] = numbers[h] + bias[h];
  k_.map(Function::softplus, times, n);
  for (int64_t h = 0; h < n; ++h) decays[h] = times[h] * rate[h];
  k_.map(Function::exp, decays, n);
  for (int64_t h = 0; h < n; ++h, update += shape.n_lanes(), values += n_value) {
    for (int64_t j = 0; j < n_value; ++j) update[j] = values[j] * times[h];
    std::fill(update + n_value, update + shape.n_lanes(), 0.0f);
  }
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
}

}  // namespace edgedec

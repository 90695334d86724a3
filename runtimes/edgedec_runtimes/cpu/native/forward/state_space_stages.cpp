// A Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060): what makes the records of its rows, and what its results become.
#include <string.h>

#include <algorithm>

#include "forward/run.h"

namespace edgedec {

size_t state_space_scratch(const ec_model &model) { return 2 * (size_t)model.config.n_inner; }

// Make the records of the rows of a layer. What its matrix gives for a row is a gate, the column, and a number for each
// head. The column is convolved; it holds the heads' values, then keys and queries of each group of heads. The number
// becomes the head's step of time: its state decays by e^(time * rate), and takes in the value times the time.
void Run::write_state_space(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const RecurrentShape &shape = m_.recurrent;
  const int64_t d = c_.n_inner, n_keys = (int64_t)shape.n_key_head * shape.n_key;
  const auto *v = layer.vectors;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    const float *column = m_.qkv.data() + i * m_.qkv_width(layer) + m_.column_begin(layer);
    float *record = record_of(layer, row, i), *mixed = m_.mixed.data() + i * shape.n_column, *times = memory;
    convolve_columns(layer, row, i, 0, shape.n_column, mixed);
    k_.add(mixed, v[EC_CONVOLUTION_BIAS].data(), 1.0f, shape.n_column);
    k_.map(Function::silu, mixed, shape.n_column);
    memcpy(record, column, (size_t)shape.n_column * sizeof(float));
    memcpy(record + shape.keys(), mixed + d, (size_t)n_keys * sizeof(float));
    memcpy(m_.queries.data() + i * n_keys, mixed + d + n_keys, (size_t)n_keys * sizeof(float));
    memcpy(times, column + shape.n_column, (size_t)shape.n_head * sizeof(float));
    k_.add(times, v[EC_TIME_BIAS].data(), 1.0f, shape.n_head);
    k_.map(Function::softplus, times, shape.n_head);
    float *decays = record + shape.decays(), *update = record + shape.updates();
    for (int32_t h = 0; h < shape.n_head; ++h) decays[h] = times[h] * v[EC_RATES][(size_t)h];
    k_.map(Function::exp, decays, shape.n_head);
    for (int32_t h = 0; h < shape.n_head; ++h, update += shape.n_lanes(), mixed += shape.n_value) {
      for (int32_t j = 0; j < shape.n_value; ++j) update[j] = mixed[j] * times[h];
      std::fill(update + shape.n_value, update + shape.n_lanes(), 0.0f);
    }
  });
  end_stage(thread, EC_OP_ROPE);
}

// Read the results of the scan: each gets a part of the value itself, and is gated before it is normalized.
void Run::read_state_space(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const RecurrentShape &shape = m_.recurrent;
  const std::vector<float> &norm = layer.vectors[EC_STATE_NORM], &passed = layer.vectors[EC_PASSED];
  const int64_t d = c_.n_inner, n_group = d / shape.n_key_head;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t number) {
    const int64_t i = (int64_t)plan_.query_of(l, (size_t)number);
    const float *gate = m_.qkv.data() + i * m_.qkv_width(layer) + m_.column_begin(layer) - d;
    const float *scanned = m_.scanned.data() + i * shape.n_head * shape.n_lanes();
    const float *values = m_.mixed.data() + i * shape.n_column;
    float *y = memory, *normed = memory + d;
    for (int64_t h = 0; h < shape.n_head; ++h) {
      memcpy(y + h * shape.n_value, scanned + h * shape.n_lanes(), (size_t)shape.n_value * sizeof(float));
      k_.add(y + h * shape.n_value, values + h * shape.n_value, passed[(size_t)h], shape.n_value);
    }
    k_.gated(gate, y, d, false, y);
    for (int64_t begin = 0; !norm.empty() && begin < d; begin += n_group)
      k_.rms_norm(y + begin, norm.data() + begin, c_.rms_epsilon, n_group, normed + begin);
    k_.quantize(m_.state_output.view(), number, 0, d, norm.empty() ? y : normed);
  });
  end_stage(thread, EC_OP_ATTENTION);
}

}  // namespace edgedec

// The short convolution of a layer: what it does between its products (attention.cpp).
#include "forward/run.h"

namespace edgedec {

// Multiply B and x, which gives a row's column, and keep it.
void Run::write_columns(int thread, const Layer &layer, const std::vector<int32_t> &rows) {
  const int64_t n = c_.n_embd;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    const float *b = m_.qkv.data() + i * 3 * n + n, *x = b + n;
    float *column = plan_.items[row.item].session->columns.at(row.slot, layer.number);
    for (int64_t j = 0; j < n; ++j) column[j] = b[j] * x[j];
  });
}

// Return the slot of the token at a position, which is at most the row's own.
int32_t Run::slot_of(const RowInfo &row, int32_t position) const {
  const int32_t n_past = plan_.items[row.item].n_past;
  if (plan_.items[row.item].parents == nullptr || position < n_past) return position;
  return plan_.paths[(size_t)(row.path_begin + position - n_past)];
}

// Convolve the columns of each row and of the tokens before it, and multiply the result by C. Each element of the
// result is summed up in the order of positions, without any fusing, so that it has the same bits on all processors.
void Run::convolve(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t n = c_.n_embd;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    const ColumnCache &columns = plan_.items[row.item].session->columns;
    for (int64_t j = 0; j < n; ++j) memory[j] = 0.0f;
    for (int32_t k = 0; k < m_.convolution_length; ++k) {
      const int32_t position = row.position - (m_.convolution_length - 1 - k);
      if (position < 0) continue;
      const float *kernel = layer.vectors[EC_CONVOLUTION].data() + k * n;
      const float *column = columns.at(slot_of(row, position), layer.number);
      for (int64_t j = 0; j < n; ++j) memory[j] += kernel[j] * column[j];
    }
    const float *c = m_.qkv.data() + (int64_t)plan_.query_of(l, (size_t)i) * 3 * n;
    for (int64_t j = 0; j < n; ++j) memory[j] *= c[j];
    k_.quantize(m_.convolved.view(), i, 0, n, memory);
  });
}

}  // namespace edgedec

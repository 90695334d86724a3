// What low-rank adapters add to products (adapters.h). Each row has the adapters of its session, so that sessions with
// different ones share a forward. A row's part depends on that row alone: A x is one product of whole rows, B (A x) is
// another, and both are added to the row's product in the order of the adapters.
#include <string.h>

#include <algorithm>

#include "edgedec_cpu.h"
#include "forward/run.h"

namespace edgedec {

// Return the floats of scratch memory that a thread needs for adapters.
size_t adapter_scratch(const ec_model &model) {
  if (model.adapters.n == 0) return 0;
  const int64_t rank = (model.adapters.most_rank + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  return (size_t)(BAND * std::max<int64_t>(3 * PANEL_ROWS, rank));
}

// Return what the session of a row multiplies an adapter's part by.
float Run::adapter_scale(int32_t row, int32_t adapter) const {
  const std::vector<float> &scales = plan_.items[plan_.rows[(size_t)row].item].session->adapter_scales;
  return (size_t)adapter < scales.size() ? scales[(size_t)adapter] : 0.0f;
}

bool Run::uses_adapter(const std::vector<int32_t> &rows, int64_t begin, int64_t end, int32_t adapter) const {
  return std::any_of(rows.begin() + begin, rows.begin() + end,
                     [&](int32_t row) { return adapter_scale(row, adapter) != 0.0f; });
}

// Multiply the A of the adapters of some matrices, which share their activations, with the rows that have them.
void Run::multiply_adapters(int thread, int operation, const Activations &a, const std::vector<int32_t> &rows,
                            const std::vector<const Matrix *> &matrices, float *memory) {
  const int64_t n_rows = (int64_t)rows.size(), n_bands = (n_rows + BAND - 1) / BAND;
  std::vector<const AdapterPair *> pairs;
  for (const Matrix *matrix : matrices)
    if (const std::vector<AdapterPair> *found = m_.adapters.of(matrix))
      for (const AdapterPair &pair : *found) pairs.push_back(&pair);
  if (pairs.empty()) return;
  stages_.each(thread, (int64_t)pairs.size() * n_bands, [&](int64_t piece) {
    const AdapterPair &pair = *pairs[(size_t)(piece / n_bands)];
    const int64_t begin = piece % n_bands * BAND, end = std::min(begin + BAND, n_rows), rank = pair.rank();
    if (!uses_adapter(rows, begin, end, pair.adapter)) return;
    const int64_t n_tiles = (rank + TILE_ROWS - 1) / TILE_ROWS, stride = n_tiles * TILE_ROWS;
    k_.matmul(pair.a, 0, n_tiles, a, begin, end, memory, stride);
    float *low = m_.adapters.low_of(pair, m_.max_rows);
    for (int64_t r = begin; r < end; ++r)
      memcpy(low + r * rank, memory + (r - begin) * stride, (size_t)rank * sizeof(float));
  });
  end_stage(thread, operation);
}

// Add the part of a matrix's adapters to the products of its tiles [tile, last) with the rows [begin, end), which lie
// at `out` as Kernels::matmul has left them. The tiles are those of a panel, and `memory` has room for its products.
void Run::add_adapters(const Matrix &matrix, int64_t tile, int64_t last, const std::vector<int32_t> &rows,
                       int64_t begin, int64_t end, float *out, int64_t stride, float *memory) const {
  const std::vector<AdapterPair> *pairs = adapted_ ? m_.adapters.of(&matrix) : nullptr;
  if (pairs == nullptr) return;
  for (const AdapterPair &pair : *pairs) {
    if (!uses_adapter(rows, begin, end, pair.adapter)) continue;
    const Activations low = {nullptr, m_.adapters.low_of(pair, m_.max_rows), pair.rank()};
    k_.matmul(pair.b, tile, last, low, begin, end, memory, PANEL_ROWS);
    for (int64_t r = begin; r < end; ++r)
      if (const float scale = adapter_scale(rows[(size_t)r], pair.adapter); scale != 0.0f)
        k_.add(out + (r - begin) * stride, memory + (r - begin) * PANEL_ROWS, scale * pair.factor,
               (last - tile) * TILE_ROWS);
  }
}

}  // namespace edgedec

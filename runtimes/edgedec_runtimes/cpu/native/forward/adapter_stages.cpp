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
  return (size_t)(3 * BAND * PANEL_ROWS);
}

// Return at least the number of pieces of any stage of adapters.
int64_t Run::most_adapter_pieces() const {
  int64_t n_tiles = 0;
  for (const auto &[layer, width] : m_.adapters.widths) n_tiles = std::max(n_tiles, width);  // a tile of each at most
  return n_tiles * ((std::max(plan_.n_rows, 1) + BAND - 1) / BAND);
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
void Run::multiply_adapters(int thread, const Activations &a, const std::vector<int32_t> &rows,
                            const std::vector<const Matrix *> &matrices, float *memory) {
  const int64_t n_rows = (int64_t)rows.size(), n_bands = (n_rows + BAND - 1) / BAND;
  struct Tile {
    const AdapterPair *pair;
    int64_t number;  // of the tiles of A
  };
  std::vector<Tile> tiles;
  for (const Matrix *matrix : matrices)
    if (const std::vector<AdapterPair> *found = m_.adapters.of(matrix))
      for (const AdapterPair &pair : *found)
        for (int64_t t = 0; t < pair.n_tiles(); ++t) tiles.push_back({&pair, t});
  if (tiles.empty()) return;
  const auto act_on = [&](int64_t piece, auto act) {
    const Tile &tile = tiles[(size_t)(piece / n_bands)];
    const int64_t begin = piece % n_bands * BAND, end = std::min(begin + BAND, n_rows);
    if (uses_adapter(rows, begin, end, tile.pair->adapter)) act(*tile.pair, tile.number, begin, end);
  };
  const auto compute = [&](const AdapterPair &pair, int64_t tile, int64_t begin, int64_t end) {
    k_.matmul(pair.a, tile, tile + 1, a, begin, end, memory, TILE_ROWS);
  };
  const auto write = [&](const AdapterPair &pair, int64_t tile, int64_t begin, int64_t end) {
    const int64_t rank = pair.rank(), first = tile * TILE_ROWS, n = std::min<int64_t>(TILE_ROWS, rank - first);
    float *low = m_.adapters.low_of(pair, m_.max_rows) + first;
    for (int64_t r = begin; r < end; ++r)
      memcpy(low + r * rank, memory + (r - begin) * TILE_ROWS, (size_t)n * sizeof(float));
  };
  stages_.each_of_two_parts(
      thread, (int64_t)tiles.size() * n_bands, 0.0, retake_, [&](int64_t piece) { act_on(piece, compute); },
      [&](int64_t piece) { act_on(piece, write); });
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

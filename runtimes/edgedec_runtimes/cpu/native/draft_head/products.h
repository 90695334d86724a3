// Products of matrices with rows of activations, outside of a forward.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "forward/run.h"

namespace edgedec {

// Throw Invalid where a matrix of a head is missing, or of another shape, or there although it should have no rows.
inline void require_head_matrix(const Matrix &m, const char *name, int64_t rows, int64_t cols) {
  require(m.n_rows == rows && (rows == 0 || m.n_cols == cols),
          std::string("the head's matrix ") + name + " is missing, has another shape or is not used");
}

// Multiply matrices with the n rows of activations that they share, on all threads of a pool. sink(m, row, column,
// products, count) gets the products of `count` rows of matrix m, from its row `column` on, with row `row` of the
// activations.
template <class Sink>
void multiply(Pool &pool, const Kernels &kernels, const std::vector<const Matrix *> &matrices, const Activations &a,
              int64_t n, Sink sink) {
  constexpr int64_t PIECES_PER_THREAD = 8, MOST_PANELS = 8;
  const auto panels = [](const Matrix &m) { return (m.n_rows + PANEL_ROWS - 1) / PANEL_ROWS; };
  int64_t n_panels = 0;
  for (const Matrix *matrix : matrices) n_panels += panels(*matrix);
  const int64_t each = std::max<int64_t>(1, std::min(MOST_PANELS, n_panels / (PIECES_PER_THREAD * pool.size())));
  const auto multiply_panel = [&](int64_t panel, float *products) {
    size_t m = 0;
    while (panel >= panels(*matrices[m])) panel -= panels(*matrices[m++]);
    const Matrix &w = *matrices[m];
    const int64_t tile = panel * PANEL_TILES,
                  last = std::min(tile + PANEL_TILES, (w.n_rows + TILE_ROWS - 1) / TILE_ROWS),
                  columns = std::min<int64_t>(PANEL_ROWS, w.n_rows - panel * PANEL_ROWS);
    for (int64_t begin = 0; begin < n; begin += BAND) {
      const int64_t end = std::min<int64_t>(begin + BAND, n);
      kernels.matmul(w, tile, last, a, begin, end, products, PANEL_ROWS);
      for (int64_t r = begin; r < end; ++r)
        sink(m, r, panel * PANEL_ROWS, products + (r - begin) * PANEL_ROWS, columns);
    }
  };
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    alignas(64) float products[BAND * PANEL_ROWS];
    for (int64_t first; (first = next.fetch_add(each, std::memory_order_relaxed)) < n_panels;)
      for (int64_t panel = first; panel < std::min(first + each, n_panels); ++panel) multiply_panel(panel, products);
  });
}

// Call work(i) for i from 0 to n - 1 on all threads of a pool.
template <class Work>
void each(Pool &pool, int64_t n, Work work) {
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
  });
}

}  // namespace edgedec

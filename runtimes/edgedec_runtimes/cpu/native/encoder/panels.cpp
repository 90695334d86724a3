// From rows of a matrix, as a GGUF has them, to the panels that kernels multiply.
#include <algorithm>

#include "encoder/encoder.h"

namespace edgedec {
namespace {

constexpr int64_t Q8_0_BYTES = 34;

}  // namespace

uint64_t row_matrix_bytes(int32_t type, int64_t n_rows, int64_t n_cols, bool transposed) {
  constexpr int64_t most = (int64_t)1 << 24;
  const BlockLayout block = block_layout(type);
  if (!(is_float_type(type) || (type == Q8_0 && !transposed)) || n_rows < 1 || n_cols < 1 || n_rows > most ||
      n_cols > most || n_cols % block.columns != 0)
    return 0;
  return (uint64_t)n_rows * (uint64_t)(n_cols / block.columns) * (uint64_t)block.bytes;
}

void unpack_panel(const Kernels &kernels, const RowMatrix &w, int64_t first, int64_t begin, int64_t end, float *scratch,
                  float *panel) {
  const BlockLayout block = block_layout(w.type);
  const int64_t n = end - begin, n_rows = std::min<int64_t>(TILE_ROWS, w.n_rows - first);
  if (n_rows < TILE_ROWS) std::fill(panel, panel + n * TILE_ROWS, 0.0f);
  for (int64_t c = 0; w.transposed && c < n; ++c)
    kernels.widen(w.type, w.data + ((begin + c) * w.n_rows + first) * block.bytes, n_rows, panel + c * TILE_ROWS);
  if (w.transposed) return;
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t at = ((first + r) * w.n_cols + begin) / block.columns * block.bytes;
    kernels.widen(w.type, w.data + at, n, scratch + r * PIECE_COLUMNS);
  }
  for (int64_t c = 0; c < n; ++c)
    for (int64_t r = 0; r < n_rows; ++r) panel[c * TILE_ROWS + r] = scratch[r * PIECE_COLUMNS + c];
}

void unpack_pairs(const RowMatrix &w, int64_t first, int64_t begin, int64_t end, int16_t *scratch, int16_t *panel,
                  float *scales) {
  const int64_t n = end - begin, n_rows = std::min<int64_t>(TILE_ROWS, w.n_rows - first);
  if (n_rows < TILE_ROWS) {
    std::fill(panel, panel + n * TILE_ROWS, (int16_t)0);
    std::fill(scales, scales + n / 32 * TILE_ROWS, 0.0f);
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    const uint8_t *p = w.data + ((first + r) * w.n_cols + begin) / 32 * Q8_0_BYTES;
    for (int64_t b = 0; b < n / 32; ++b, p += Q8_0_BYTES) {
      uint16_t half;
      memcpy(&half, p, 2);
      scales[b * TILE_ROWS + r] = half_to_float(half);
      for (int i = 0; i < 32; ++i) scratch[r * PIECE_COLUMNS + 32 * b + i] = (int8_t)p[2 + i];
    }
  }
  for (int64_t c = 0; c < n; c += 2)
    for (int64_t r = 0; r < n_rows; ++r) memcpy(panel + c * TILE_ROWS + 2 * r, scratch + r * PIECE_COLUMNS + c, 4);
}

}  // namespace edgedec

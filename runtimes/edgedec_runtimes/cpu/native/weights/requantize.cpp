#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "weights/tensor_types.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr int BLOCK = 32;
constexpr float ROUND = 12582912;  // 1.5 * 2^23
// Scales that are also tried, as multiples of the one that gives the largest number of a block the level -8.
constexpr float FACTORS[] = {0.88f, 0.91f, 0.94f, 0.97f, 1.03f, 1.06f, 1.09f, 1.12f};

struct Rounded {
  float error;
  uint16_t scale;
  uint8_t levels[BLOCK];
};

Rounded round_with(const float *x, float wanted) {
  Rounded found;
  found.scale = float_to_half(wanted);
  const float scale = half_to_float(found.scale), inverse = scale != 0 ? 1 / scale : 0;
  float errors[BLOCK];
  for (int i = 0; i < BLOCK; ++i) {
    // The sum has no fractional bits left, so it is rounded to the nearest whole number without a call. -8 of NaN.
    const float level = std::min(std::max(-8.0f, x[i] * inverse), 7.0f) + ROUND - ROUND;
    errors[i] = (level * scale - x[i]) * (level * scale - x[i]);
    found.levels[i] = (uint8_t)(level + 8);
  }
  found.error = 0;
  for (float error : errors) found.error += error;
  return found;
}

void write_block(const float *x, uint8_t *out) {
  float extreme = 0;
  for (int i = 0; i < BLOCK; ++i)
    if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
  Rounded best = round_with(x, extreme / -8);
  for (float factor : FACTORS) {
    const Rounded found = round_with(x, extreme / -8 * factor);
    if (found.error < best.error) best = found;
  }
  memcpy(out, &best.scale, sizeof best.scale);
  for (int i = 0; i < BLOCK / 2; ++i)
    out[sizeof best.scale + i] = (uint8_t)(best.levels[i] | best.levels[i + BLOCK / 2] << 4);
}

}  // namespace

void rows_to_q4_0(int32_t type, int64_t n_rows, int64_t n_cols, const uint8_t *source, uint8_t *out) {
  std::vector<uint8_t> tile(tile_bytes(type, TILE_ROWS, n_cols));
  std::vector<float> row((size_t)n_cols);
  const BlockLayout from = block_layout(type), to = block_layout(Q4_0);
  const int64_t bytes = n_cols / from.columns * from.bytes, out_bytes = n_cols / to.columns * to.bytes;
  for (int64_t first = 0; first < n_rows; first += TILE_ROWS) {
    const int64_t n = std::min<int64_t>(TILE_ROWS, n_rows - first);
    pack_tiles(type, n_cols, 0, n, source + first * bytes, tile.data());
    for (int64_t r = 0; r < n; ++r) {
      tile_row(type, n_cols, tile.data(), r, row.data());
      for (int64_t at = 0; at < n_cols; at += BLOCK)
        write_block(row.data() + at, out + (first + r) * out_bytes + at / BLOCK * to.bytes);
    }
  }
}

}  // namespace edgedec

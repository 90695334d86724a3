// What an instruction set implements. Every function's result for a row depends on that row alone: not on how many rows
// stand in the call, nor on how the work is cut.
#pragma once
#include <stdint.h>

namespace edgedec {

// 32 columns of 8 rows of activations as int8, all that products with quantized weights read of them.
constexpr int GROUP_ROWS = 8;
struct ActivationBlock {
  int8_t q[GROUP_ROWS][32];
  float scale[GROUP_ROWS];
  float sum[GROUP_ROWS];              // scale times the sum of q
  int32_t minus8[GROUP_ROWS];         // -8 times the sum of q
  int32_t minus32[2][GROUP_ROWS];     // -32 times the sums of q's halves
};

// Rows of activations, in groups of 8.
struct Activations {
  ActivationBlock *blocks;  // [rows / 8][n / 32], or nullptr where no weights are quantized
  float *x;                 // [rows][n] for float weights, or nullptr
  int64_t n;                // columns
};

struct Matrix {
  int32_t type;
  int64_t n_rows, n_cols;
  const uint8_t *tiles;
};

// Keys and values of one layer and one key-value head in the pages of a session.
//   float16  keys [64 / 16][head_dim][16], values [64][head_dim]
//   int8     keys the same as int8, values too; then float scales of keys [64 / 16][head_dim / 32][16] and of values
//            [64][head_dim / 32]
constexpr int PAGE_TOKENS = 64;
constexpr int KEY_BLOCK = 16;

constexpr int MAX_QUERIES = 8;

// Rows of logits are looked at in blocks of this many.
constexpr int64_t ROW_BLOCK = 256;

// Number `token` of the SplitMix64 generator (Steele, Lea and Flood 2014) that starts from `key`, as in edgedec/noise.py.
// Internal to each file, see kernels.cpp.
static inline uint64_t hash_of(uint64_t key, int64_t token) {
  uint64_t x = key + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Up to 8 queries of one key-value head. Query i sees the positions [start[i], visible[i]); a position below `n_prefix`
// lies in the slot of the same number, later ones in path[i][position - n_prefix].
struct AttentionWork {
  int32_t head_dim, n_queries, kv_int8;
  const uint8_t *const *pages;     // of the session
  int64_t offset;                  // of this layer and head in a page
  const float *query[MAX_QUERIES]; // [head_dim]
  float *out[MAX_QUERIES];         // [head_dim]
  int32_t start[MAX_QUERIES], visible[MAX_QUERIES], n_prefix;
  const int32_t *path[MAX_QUERIES];
  int32_t n_slots;  // slots to look at: the prefix and, for a tree, its rows
  float scale;
  float *scores;        // [n_queries][stride]
  int64_t stride;       // at least n_slots + 32
  float *tree_scratch;  // [at least n_slots - n_prefix]
  float *packed;        // [8 * the larger of head_dim and 64], queries and weights in the order they are used
};

struct Kernels {
  const char *name;
  bool (*supported)();

  // y[i][row] for the rows of tiles [tile_begin, tile_end) and the activations [row_begin, row_end): y is
  // [row_end - row_begin][stride], its first column the first row of tile_begin. row_begin is a multiple of 8.
  void (*matmul)(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                 int64_t row_end, float *y, int64_t stride);
  // Put n columns (a multiple of 32 for quantized weights) of one row into the activations, from column `begin`.
  void (*quantize)(const Activations &a, int64_t row, int64_t begin, int64_t n, const float *x);
  // out = x / rms(x) * weight
  void (*rms_norm)(const float *x, const float *weight, float epsilon, int64_t n, float *out);
  // Rotate n_rot / 2 pairs; cos_sin is [2][n_rot / 2].
  void (*rope)(float *x, const float *cos_sin, int32_t n_rot, bool interleaved);
  // out = activation(gate) * up
  void (*gated)(const float *gate, const float *up, int64_t n, bool gelu, float *out);
  void (*add)(float *x, const float *y, int64_t n);
  void (*attend)(const AttentionWork &work);

  // For row.cpp. The greatest value of each block of ROW_BLOCK; the last block may be shorter.
  void (*row_maxima)(const float *x, int64_t n, float *maxima);
  // The sum of exp(x - most); not a number where a value is not finite.
  double (*row_sum)(const float *x, int64_t n, float most);
  // Of the ROW_BLOCK tokens from `begin`, whose logits are x: out[i] = exp((x[i] - most) * factor) * bound - d, where d is
  // 1 - u in units of 2^-52 and u the hash of key and token. Returns the greatest.
  float (*row_chances)(const float *x, float most, float factor, float bound, uint64_t key, int64_t begin, float *out);
};

const Kernels *portable_kernels();
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *neon_kernels();

}  // namespace edgedec

// The functions that every instruction set implements. The result of each function for a row depends on that row alone:
// not on the other rows of the call, nor on how the work is cut.
#pragma once
#include <math.h>
#include <stdint.h>

namespace edgedec {

// 32 columns of 8 rows of activations as int8: all that a product with quantized weights reads of them.
constexpr int GROUP_ROWS = 8;
struct ActivationBlock {
  int8_t q[GROUP_ROWS][32];           // Kernels::rows_in_pairs says in what order
  float scale[GROUP_ROWS];
  float sum[GROUP_ROWS];              // scale times the sum of q
  int32_t minus8[GROUP_ROWS];         // -8 times the sum of q
  int32_t minus32[2][GROUP_ROWS];     // -32 times the sums of q's halves
};

// Return the index of a row's column in q. In pairs, 8 columns of an even row and 8 of the next one lie there in turn,
// which is what a product of 2 x 8 with 8 x 2 bytes takes. 8 columns, from a multiple of 8 on, are always together. The
// function is internal to each file (see kernels.cpp).
static constexpr int index_in_block(bool in_pairs, int row, int column) {
  return in_pairs ? 64 * (row / 2) + 16 * (column / 8) + 8 * (row % 2) + column % 8 : 32 * row + column;
}

// Rows of activations, in groups of 8.
struct Activations {
  ActivationBlock *blocks;  // [rows / 8][n / 32], or nullptr where no weights are quantized
  float *x;                 // [rows][n] for float weights, or nullptr
  int64_t n;                // columns
};

// How many bytes ahead of what is multiplied weights are fetched into the L1 cache and into the L2 cache; 0: they are
// not. Into the L2 cache they are asked for several times, each time l2 bytes nearer than before: a processor that has
// many requests under way drops others. No bit of a result depends on it.
struct Ahead {
  int32_t l1, l2, l2_times;
};
constexpr int32_t USUAL_AHEAD = -1;  // as l1: what the instruction set's kernels do by themselves
constexpr int32_t MOST_AHEAD = 1 << 16;
constexpr int AHEAD_ROWS = 16;

struct Matrix {
  int32_t type;
  int64_t n_rows, n_cols;
  const uint8_t *tiles;
  // [AHEAD_ROWS], for products with 1, 2, ... rows of activations, the last one also for more; nullptr: as is usual.
  const Ahead *ahead = nullptr;
};

// The layout of the keys and values of one layer and one key-value head in a page of 64 tokens. Numbers of keys are
// stored in blocks of 16 tokens, [64 / 16][n][16], numbers of values in rows, [64][n]:
//   float16  n = head_dim halves
//   int8     n = head_dim bytes; half scales, n = head_dim / 32
//   4 bit    n = head_dim / 2 bytes, 16 to a group of 32 elements: element i in the low half of byte i, element 16 + i
//            in the high one, plus 8; half scales as above; then n_outliers exact elements as halves, and their places
//            as bytes, counted from the last multiple of 256 elements (each 256 elements have 16 of them)
// Rotated keys and values are multiplied by a Hadamard matrix; of values, attention's result is rotated back. Where keys
// are stored without their bias, a page ends with the cosines and sines of its tokens' positions, [64 / 16][n_rot][16]
// floats: the bias is rotated and added when the keys are read.
constexpr int PAGE_TOKENS = 64;
constexpr int KEY_BLOCK = 16;
constexpr int UNPACKED_TOKENS = 32;  // most values that are unpacked at a time
constexpr int MAX_PACKED_HEAD = 512;  // most elements of a head whose keys and values have less than 16 bits
constexpr int OUTLIERS_OF = 16;       // one element of so many is kept exactly
constexpr int OUTLIER_ELEMENTS = 256;  // elements of which the places of those that are kept are counted together
constexpr int MAX_OUTLIERS = MAX_PACKED_HEAD / OUTLIERS_OF;

struct KVLayout {
  int32_t bits, value_bits;  // 16, 8 or 4, of keys and of values; 16 of both or of none
  int32_t n_groups, n_outliers;
  bool rotated, values_rotated;
  // Offsets from the keys on, and the size of all.
  int64_t values, key_scales, value_scales, key_outliers, value_outliers, key_places, value_places, bytes;
};

// Multiply `width` vectors, x[i * width], of d elements by the orthonormal Hadamard matrix, in pieces of the largest
// power of two that divides d. The matrix is its own inverse. The function is internal to each file (see kernels.cpp).
static inline void hadamard(float *x, int32_t d, int32_t width) {
  const int32_t size = d & -d;
  for (int32_t half = 1; half < size; half *= 2)
    for (int32_t begin = 0; begin < d; begin += 2 * half)
      for (int32_t i = begin * width; i < (begin + half) * width; ++i) {
        const float a = x[i], b = x[i + half * width];
        x[i] = a + b;
        x[i + half * width] = a - b;
      }
  const float factor = 1.0f / sqrtf((float)size);
  for (int32_t i = 0; i < d * width; ++i) x[i] *= factor;
}

// A head's recurrent state is cut into tiles of so many lanes of its values, [n_key][STATE_LANES].
constexpr int STATE_LANES = 32;

// What Kernels::map() makes of an element.
enum class Function { silu, sigmoid, softplus, exp };

constexpr int QUERY_GROUP = 6;  // queries that share what attention loads
constexpr int MAX_QUERIES = 10 * QUERY_GROUP;
constexpr int SPAN_TOKENS = 128;  // positions whose part of an attention's result is computed by itself

// Rows of logits are read in blocks of this many values.
constexpr int64_t ROW_BLOCK = 256;

// Return number `token` of the SplitMix64 generator (Steele, Lea and Flood 2014) that starts from `key`
// (edgedec/sampling.py). Internal to each file, see kernels.cpp.
static inline uint64_t hash_of(uint64_t key, int64_t token) {
  uint64_t x = key + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Up to MAX_QUERIES queries of one key-value head. Query i sees the positions [start[i], visible[i]). A position below
// `n_prefix` is in the slot of the same number, a later one in the slot path[i][position - n_prefix]; there are paths
// for all queries or for none, and without them n_prefix has no meaning.
struct AttentionWork {
  int32_t head_dim, n_queries;
  KVLayout layout;
  const float *key_bias;           // [head_dim], added to the keys when they are read; nullptr: none
  int64_t rotations;               // where a page has its cosines and sines
  int32_t n_rot;
  bool rope_interleaved;
  const uint8_t *const *pages;     // of the session
  int64_t offset;                  // of this layer and head in a page
  const float *query[MAX_QUERIES]; // [head_dim]
  float *out[MAX_QUERIES];         // [head_dim]
  int32_t start[MAX_QUERIES], visible[MAX_QUERIES], n_prefix;
  const int32_t *path[MAX_QUERIES];
  const float *sink[MAX_QUERIES];  // a score with a part in the softmax and no value; nullptr: none
  const float *distance_bias[MAX_QUERIES];  // EC_DISTANCE_BIAS of the query's head; nullptr: none
  int32_t position[MAX_QUERIES];            // the query's own, from which distances are counted
  int32_t n_slots;                 // slots of the prefix and of a tree
  float scale, softcap;            // scores are multiplied by scale, and then soft-capped where softcap is not 0
  int64_t span_begin, span_end;    // spans of SPAN_TOKENS positions to compute, or to join
  // A query's spans may be computed by several calls, one after another. What the calls so far have made is in `out`,
  // which is relative to the greatest score, and in state: [2], the greatest score and the sum of the weights.
  bool resumed;                    // there were calls before
  bool unfinished;                 // there are calls after this one
  float *state[MAX_QUERIES];       // not used where there is one call
  int64_t n_spans;                 // spans that `kept` has room for
  float *kept;     // [n_queries][n_spans][head_dim + 2]: each span's part of the results, to be joined; nullptr: all
                   // spans are computed here, and go to `out`
  // scratch memory
  float *packed;       // [MAX_QUERIES * head_dim], queries in the order they are used
  float *weights;      // [MAX_QUERIES * SPAN_TOKENS], of one span
  float *sums;         // [QUERY_GROUP * head_dim], of one span
  float *tree_scores;  // [QUERY_GROUP][tree_stride], the tree's slots in whole pages
  int64_t tree_stride;
  float *unpacked;     // [(SPAN_TOKENS + PAGE_TOKENS) * head_dim], for keys and values of less than 16 bits
};

// Rows times a panel of 16 rows of weights: y[row][i] = sum over c of x[row][c] * weights[c][i], added to what is there
// with `adds`.
struct PanelWork {
  const float *weights;  // [n_cols][TILE_ROWS]
  int64_t n_cols, n_rows;
  const float *x;
  int64_t x_stride;
  float *y;
  int64_t y_stride;
  bool adds;
};

// The same with whole numbers of 16 bits, for weights of Q8_0; n_cols is a multiple of 32.
struct PairsWork {
  const int16_t *weights;  // [n_cols / 2][TILE_ROWS][2]
  const float *scales;     // [n_cols / 32][TILE_ROWS]
  int64_t n_cols, n_rows;
  const int16_t *x;
  int64_t x_stride;
  const float *x_scales;   // of row i: x_scales[i * x_scales_stride]
  int64_t x_scales_stride;
  float *y;
  int64_t y_stride;
  bool adds;
};

struct Kernels {
  const char *name;
  bool (*supported)();

  // Compute y[i][row] for the rows of the tiles [tile_begin, tile_end) and the activations [row_begin, row_end). y is
  // [row_end - row_begin][stride]; its first column is the first row of tile_begin. row_begin is a multiple of 8.
  void (*matmul)(const Matrix &w, int64_t tile_begin, int64_t tile_end, const Activations &a, int64_t row_begin,
                 int64_t row_end, float *y, int64_t stride);
  // Write n columns (a multiple of 32 for quantized weights) of one row to the activations, from column `begin` on.
  void (*quantize)(const Activations &a, int64_t row, int64_t begin, int64_t n, const float *x);
  // out = x / rms(x) * weight
  void (*rms_norm)(const float *x, const float *weight, float epsilon, int64_t n, float *out);
  // Rotate n_rot / 2 pairs; cos_sin is [2][n_rot / 2].
  void (*rope)(float *x, const float *cos_sin, int32_t n_rot, bool interleaved);
  // out = activation(gate) * up, or activation(gate) where `up` is nullptr; the activation is EC_SILU ...
  void (*gated)(const float *gate, const float *up, int64_t n, int32_t activation, float *out);
  // x += factor * y
  void (*add)(float *x, const float *y, float factor, int64_t n);
  // x = cap * tanh(x / cap)
  void (*softcap)(float *x, float cap, int64_t n);
  // Round to halves; what is too large becomes the largest finite number.
  void (*to_halves)(const float *x, int64_t n, uint16_t *out);
  // x = f(x). Function::exp takes numbers of at most 0, and never returns less than e^-87.
  void (*map)(Function function, float *x, int64_t n);
  // x *= 1 / (1 + e^-gate)
  void (*multiply_by_sigmoid)(float *x, const float *gate, int64_t n);
  // A row of a recurrence, for one tile of a head's state: S = decay * S + key update^T, key is [n_key], update [32].
  void (*fold_state)(float *state, int64_t n_key, const float *key, const float *update, float decay);
  // The same for a row whose result is wanted, which is out = S^T query, [32]. With `corrects`, the update is found
  // first (the delta rule): it is the row's value before, and becomes gain * (value - decay * S^T key). A sum over keys
  // goes over the even ones and over the odd ones, which are added at the end: no bit depends on how lanes are cut.
  void (*step_state)(float *state, int64_t n_key, const float *key, const float *query, float *update, float decay,
                     float gain, bool corrects, float *out);
  void (*attend)(const AttentionWork &work);
  // Write the weight that each query gives to each position that it sees to weights[query][position]; with its sink's
  // they sum to 1. No query has a path. `stride` is a multiple of SPAN_TOKENS.
  void (*weigh)(const AttentionWork &work, float *weights, int64_t stride);
  // Join the spans [span_begin, span_end) of queries that calls of attend() have kept.
  void (*join_spans)(const AttentionWork &work);

  // For encoder/: products of many rows with a panel; pairs and to_pairs are nullptr where whole numbers are not faster.
  void (*panel)(const PanelWork &work);
  void (*pairs)(const PairsWork &work);
  // Round n numbers, a multiple of 32, to 16 bits; return what one is worth. `out` may be the beginning of x.
  float (*to_pairs)(const float *x, int64_t n, int16_t *out);
  // Write n numbers of a row of F32, F16, BF16 or Q8_0 as floats.
  void (*widen)(int32_t type, const uint8_t *row, int64_t n, float *out);
  // out = (x - mean(x)) / deviation(x) * weight + bias; `bias` may be nullptr, and out may be x
  void (*layer_norm)(const float *x, const float *weight, const float *bias, float epsilon, int64_t n, float *out);
  // Set *most to the greatest of itself and x, and x to exp(x - *most); return the sum.
  float (*exp_row)(float *x, int64_t n, float *most);

  // For row.cpp: the greatest value of each block of ROW_BLOCK values, the last of which may be shorter.
  void (*row_maxima)(const float *x, int64_t n, float *maxima);
  // Return the sum of exp(x - most), NaN where a value is not finite.
  double (*row_sum)(const float *x, int64_t n, float most);
  // For the ROW_BLOCK tokens from `begin` on, whose logits are x: out[i] = exp((x[i] - most) * factor) * bound - d,
  // where d is 1 - u in units of 2^-52 and u the hash of key and token. Return the greatest of them.
  float (*row_chances)(const float *x, float most, float factor, float bound, uint64_t key, int64_t begin, float *out);

  bool rows_in_pairs;  // in ActivationBlock::q
};

const Kernels *portable_kernels();
const Kernels *avx2_kernels();
const Kernels *avxvnni_kernels();
const Kernels *avx512_kernels();
const Kernels *neon_kernels();
const Kernels *i8mm_kernels();

}  // namespace edgedec

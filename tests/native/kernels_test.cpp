// Compares the kernels of each instruction set of this processor with plain sums in double precision and with the
// portable ones, and checks bit by bit that a row's result does not depend on what stands beside it.
//
//   kernels_test          prints the instruction sets and what failed; exits with 1 where anything did
//   kernels_test sets     prints the instruction sets of this processor
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "checks.h"
#include "forward/model.h"
#include "kernels/kernel_sets.h"
#include "weights/tensor_types.h"
#include "weights/tiles.h"

using namespace edgedec;
using namespace checks;

namespace {

const int32_t TYPES[] = {F32,    F16,    BF16, Q4_0, Q4_1,    Q5_0,  Q5_1,    Q8_0,   Q4_K,  Q5_K,  Q6_K,  Q2_K, Q3_K,
                         IQ4_NL, IQ4_XS, MXFP4, IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M, TQ1_0, TQ2_0,
                         Q2_0,   Q1_0};
constexpr int64_t N_ROWS = 20;  // activations; more than two groups

std::string text(const char *what, int32_t type, int64_t columns) {
  return std::string(what) + ", type " + std::to_string(type) + ", " + std::to_string(columns) + " columns";
}

// A random matrix in tiles; `scale` is the float16 number of every block where it is not 0.
struct TestMatrix {
  std::vector<uint8_t> tiles;
  Matrix view;

  TestMatrix(std::mt19937 &random, int32_t type, int64_t rows, int64_t columns, uint16_t scale) {
    const BlockLayout block = block_layout(type);
    std::vector<uint8_t> bytes((size_t)(rows * columns / block.columns * block.bytes));
    for (uint8_t &byte : bytes) byte = (uint8_t)random();
    for (size_t at = 0; at < bytes.size(); at += (size_t)block.bytes)
      set_scales(random, type, bytes.data() + at, scale);
    tiles.resize(tile_bytes(type, rows, columns));
    pack_tiles(type, columns, 0, rows, bytes.data(), tiles.data());
    view = {type, rows, columns, tiles.data()};
  }

  // Where d is in the blocks that don't begin with it.
  static int half_offset(int32_t type) {
    switch (type) {
      case Q6_K: return 208;
      case Q3_K: return 108;
      case Q2_K: return 80;
      case TQ2_0: return 64;
      case TQ1_0: return 52;
      default: return 0;
    }
  }

  static void set_scales(std::mt19937 &random, int32_t type, uint8_t *block, uint16_t scale) {
    const auto half = [&](int offset) {
      const uint16_t h = scale != 0 ? scale : float_to_half(0.01f + 0.001f * (float)(random() % 64));
      memcpy(block + offset, &h, 2);
    };
    if (type == F32) {
      const float value = normal(random, 1)[0];
      memcpy(block, &value, 4);
    } else if (type == F16 || type == BF16) {
      const uint16_t h = type == F16 ? float_to_half(normal(random, 1)[0]) : (uint16_t)(0x3f00 + (random() & 0x81ff));
      memcpy(block, &h, 2);
    } else if (type == MXFP4) {
      block[0] = (uint8_t)(scale != 0 ? 128 : 120 + random() % 4);
    } else if (type == IQ1_M) {  // a half in four pieces
      uint16_t h = scale;
      if (h == 0) half(0), memcpy(&h, block, 2);
      for (int i = 0; i < 4; ++i) block[49 + 2 * i] = (uint8_t)((block[49 + 2 * i] & 15) | (h >> 4 * i & 15) << 4);
    } else if (const int at = half_offset(type)) {
      half(at);
      if (type == Q2_K) half(at + 2);
    } else {
      half(0);
      if (type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K) half(2);
    }
  }
};

// Activations of N_ROWS rows, and the values that they stand for.
struct TestRows {
  ActivationBuffer buffer;
  std::vector<Floats> meant;

  TestRows(const Kernels &kernels, bool quantized, const std::vector<Floats> &rows) {
    const int64_t n = (int64_t)rows[0].size();
    buffer = ActivationBuffer((int64_t)rows.size(), n, quantized, !quantized);
    for (size_t i = 0; i < rows.size(); ++i) {
      kernels.quantize(buffer.view(), (int64_t)i, 0, n, rows[i].data());
      meant.push_back(quantized ? rounded(rows[i]) : rows[i]);
    }
  }

  // To int8 with a scale for every 32.
  static Floats rounded(Floats row) {
    for (size_t b = 0; b < row.size(); b += 32) {
      float peak = 0.0f;
      for (size_t i = b; i < b + 32; ++i) peak = std::max(peak, fabsf(row[i]));
      const float scale = peak / 127.0f, inverse = scale > 1e-37f ? 1.0f / scale : 0.0f;
      for (size_t i = b; i < b + 32; ++i) row[i] = scale * nearbyintf(row[i] * inverse);
    }
    return row;
  }
};

Floats multiply(const Kernels &kernels, const Matrix &w, const Activations &a, int64_t row_begin, int64_t row_end,
                int64_t tile_begin, int64_t tile_end) {
  const int64_t stride = (tile_end - tile_begin) * TILE_ROWS;
  Floats y((size_t)((row_end - row_begin) * stride), NAN);
  kernels.matmul(w, tile_begin, tile_end, a, row_begin, row_end, y.data(), stride);
  return y;
}

// Every element against the sum in double precision, within `tolerance` times the sum of the terms' magnitudes.
void compare_with_sums(const Kernels &kernels, const Matrix &w, const TestRows &rows, double tolerance,
                       const std::string &what) {
  const int64_t tiles = (w.n_rows + TILE_ROWS - 1) / TILE_ROWS, stride = tiles * TILE_ROWS;
  const Floats y = multiply(kernels, w, rows.buffer.view(), 0, (int64_t)rows.meant.size(), 0, tiles);
  Floats weights((size_t)w.n_cols);
  bool close = true;
  for (int64_t j = 0; j < w.n_rows; ++j) {
    tile_row(w.type, w.n_cols, w.tiles, j, weights.data());
    for (size_t i = 0; i < rows.meant.size(); ++i) {
      double sum = 0, size = 0;
      for (size_t k = 0; k < weights.size(); ++k) {
        const double term = (double)weights[k] * rows.meant[i][k];
        sum += term, size += fabs(term);
      }
      close = close && fabs(y[i * (size_t)stride + (size_t)j] - sum) <= tolerance * size;
    }
  }
  expect(close, kernels, what);
}

void check_cuts(const Kernels &kernels, const Matrix &w, const TestRows &rows, const std::string &what) {
  const Activations &a = rows.buffer.view();
  const int64_t tiles = (w.n_rows + TILE_ROWS - 1) / TILE_ROWS, stride = tiles * TILE_ROWS;
  const Floats whole = multiply(kernels, w, a, 0, N_ROWS, 0, tiles);
  for (int64_t begin : {0, 8, 16})
    for (int64_t end = begin + 1; end <= std::min(begin + 16, N_ROWS); ++end) {
      const Floats part = multiply(kernels, w, a, begin, end, 0, tiles);
      expect(same_bits(part.data(), whole.data() + begin * stride, part.size()), kernels,
             what + ": rows by themselves");
    }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Floats part = multiply(kernels, w, a, 0, N_ROWS, tile, tile + 1);
    bool same = true;
    for (int64_t i = 0; i < N_ROWS; ++i)
      same = same && same_bits(part.data() + i * TILE_ROWS, whole.data() + i * stride + tile * TILE_ROWS, TILE_ROWS);
    expect(same, kernels, what + ": tiles by themselves");
  }
}

// The same row in every place among others has one result.
void check_places(const Kernels &kernels, const Matrix &w, bool quantized, std::mt19937 &random,
                  const std::string &what) {
  const Floats row = normal(random, (size_t)w.n_cols);
  Floats first;
  for (size_t place = 0; place < 9; ++place) {
    std::vector<Floats> rows;
    for (size_t i = 0; i < 9; ++i) rows.push_back(i == place ? row : normal(random, (size_t)w.n_cols, 3.0f));
    const TestRows activations(kernels, quantized, rows);
    const Floats y = multiply(kernels, w, activations.buffer.view(), 0, 9, 0, 1);
    const Floats found(y.begin() + (long)place * TILE_ROWS, y.begin() + (long)(place + 1) * TILE_ROWS);
    if (place == 0) first = found;
    expect(same_bits(found, first), kernels, what + ": one row in every place");
  }
}

// The instruction set whose products have the same bits, or nullptr: i8mm only sums the integers in another order than
// NEON.
const Kernels *same_products(const Kernels &kernels) {
#if defined(EDGEDEC_HAS_I8MM)
  if (kernels.rows_in_pairs) return neon_kernels();
#endif
  (void)kernels;
  return nullptr;
}

void compare_with_set(const Kernels &kernels, const Kernels &other, const Matrix &w, const std::vector<Floats> &rows,
                      bool quantized, const std::string &what) {
  const int64_t tiles = (w.n_rows + TILE_ROWS - 1) / TILE_ROWS;
  const TestRows own(kernels, quantized, rows), others(other, quantized, rows);
  for (int64_t n = 1; n <= N_ROWS; ++n)
    expect(same_bits(multiply(kernels, w, own.buffer.view(), 0, n, 0, tiles),
                     multiply(other, w, others.buffer.view(), 0, n, 0, tiles)),
           kernels, what + ": the bits of " + other.name + " for " + std::to_string(n) + " rows");
}

// How far ahead weights are fetched, also beyond their end, changes no bit.
void check_ahead(const Kernels &kernels, Matrix w, const TestRows &rows, const std::string &what) {
  const int64_t tiles = (w.n_rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t n = 1; n <= N_ROWS; ++n) {
    w.ahead = nullptr;
    const Floats expected = multiply(kernels, w, rows.buffer.view(), 0, n, 0, tiles);
    for (const Ahead ahead :
         {Ahead{}, Ahead{1, 0, 0}, Ahead{0, 4608, 1}, Ahead{0, 64, 3}, Ahead{MOST_AHEAD, MOST_AHEAD, 1}}) {
      const std::vector<Ahead> by_rows((size_t)AHEAD_ROWS, ahead);
      w.ahead = by_rows.data();
      expect(same_bits(multiply(kernels, w, rows.buffer.view(), 0, n, 0, tiles), expected), kernels,
             what + ": weights fetched " + std::to_string(ahead.l1) + " and " + std::to_string(ahead.l2) + " ahead");
    }
  }
}

void check_products(const Kernels &kernels) {
  std::mt19937 random(1);
  for (int32_t type : TYPES) {
    const bool quantized = !is_float_type(type);
    const int64_t unit = std::max(block_layout(type).columns, quantized ? 32 : 16);
    for (int64_t columns : {unit, 3 * unit, !quantized ? 50 : unit == 32 ? 10 * unit : 4 * unit}) {
      const TestMatrix w(random, type, 40, columns, 0);
      std::vector<Floats> rows;
      for (int64_t i = 0; i < N_ROWS; ++i) rows.push_back(normal(random, (size_t)columns));
      const TestRows activations(kernels, quantized, rows);
      const std::string what = text("product", type, columns);
      compare_with_sums(kernels, w.view, activations, 3e-6, what);
      check_cuts(kernels, w.view, activations, what);
      check_ahead(kernels, w.view, activations, what);
      check_places(kernels, w.view, quantized, random, what);
      if (const Kernels *other = same_products(kernels))
        compare_with_set(kernels, *other, w.view, rows, quantized, what);
    }
  }
}

// Scales that are powers of two and activations that are whole numbers: nothing is rounded, so that every bit counts.
void check_integers(const Kernels &kernels) {
  std::mt19937 random(2);
  for (int32_t type : TYPES) {
    if (is_float_type(type)) continue;
    const int64_t columns = 256;
    const TestMatrix w(random, type, 40, columns, 0x3c00);  // 1.0
    for (int kind = 0; kind < 3; ++kind) {
      std::vector<Floats> rows((size_t)N_ROWS, Floats((size_t)columns));
      for (Floats &row : rows)
        for (size_t i = 0; i < row.size(); ++i)
          row[i] = i % 32 == 7 ? 127.0f : kind == 0 ? (float)(random() % 41) - 20.0f : kind == 1 ? -127.0f : 127.0f;
      const bool extreme = kind > 0;  // the sums of K-quants are then too long for a float
      const bool exact = !extreme || block_layout(type).columns == 32;
      compare_with_sums(kernels, w.view, TestRows(kernels, true, rows), exact ? 0.0 : 1e-6,
                        text("whole numbers", type, columns));
    }
  }
}

// Blocks of MXFP4 whose scales are the least there are, below the least normal float.
void check_least_exponents(const Kernels &kernels) {
  std::mt19937 random(8);
  TestMatrix w(random, MXFP4, 40, 96, 0);
  const size_t block = tile_bytes(MXFP4, TILE_ROWS, 32);
  for (size_t at = 0; at < w.tiles.size(); at += block)
    for (size_t row = 0; row < TILE_ROWS; ++row) w.tiles[at + 256 + row] = (uint8_t)(random() % 4);
  std::vector<Floats> rows;
  for (int64_t i = 0; i < N_ROWS; ++i) rows.push_back(normal(random, 96, 1e30f));
  compare_with_sums(kernels, w.view, TestRows(kernels, true, rows), 3e-6, "the least exponents");
}

// The blocks of activations with the rows one after another, as sets have them that don't keep rows in pairs.
std::vector<ActivationBlock> row_by_row(const Kernels &kernels, const ActivationBlock *blocks, size_t n_blocks) {
  std::vector<ActivationBlock> out(blocks, blocks + n_blocks);
  for (size_t i = 0; i < n_blocks; ++i)
    for (int row = 0; row < GROUP_ROWS; ++row)
      for (int column = 0; column < 32; ++column) {
        const int at = index_in_block(kernels.rows_in_pairs, row, column);
        out[i].q[row][column] = blocks[i].q[at / 32][at % 32];
      }
  return out;
}

void check_quantization(const Kernels &kernels) {
  std::mt19937 random(3);
  for (int64_t n : {32, 96, 256}) {
    std::vector<Floats> rows;
    for (float spread : {0.0f, 1e-45f, 1e-38f, 1e-30f, 1.0f, 1e30f}) rows.push_back(normal(random, (size_t)n, spread));
    rows.push_back(Floats((size_t)n, 0.5f));
    for (int i = 0; i < 9; ++i) rows.push_back(normal(random, (size_t)n));
    const TestRows found(kernels, true, rows), expected(*portable_kernels(), true, rows);
    const size_t n_blocks = (rows.size() + GROUP_ROWS - 1) / GROUP_ROWS * (size_t)n / 32;
    const ActivationBlock *b = expected.buffer.view().blocks;
    const auto equal = [&](const ActivationBlock *a) {
      return memcmp(row_by_row(kernels, a, n_blocks).data(), b, n_blocks * sizeof *b) == 0;
    };
    expect(equal(found.buffer.view().blocks), kernels, "quantized activations are the portable kernels' bits");
    // In two calls instead of one.
    ActivationBuffer halves((int64_t)rows.size(), n, true, false);
    for (size_t i = 0; i < rows.size(); ++i)
      for (int64_t begin = 0; begin < n; begin += 32)
        kernels.quantize(halves.view(), (int64_t)i, begin, 32, rows[i].data() + begin);
    expect(equal(halves.view().blocks), kernels, "quantized activations, block by block");
  }
}

bool close_to(const Floats &found, const std::vector<double> &expected, double tolerance) {
  for (size_t i = 0; i < found.size(); ++i)
    if (!(fabs(found[i] - expected[i]) <= tolerance * (fabs(expected[i]) + 1e-3))) return false;
  return true;
}

void check_norms(const Kernels &kernels) {
  std::mt19937 random(4);
  for (int64_t n : {16, 48, 64, 100, 577, 2048}) {
    const Floats x = normal(random, (size_t)n, 3.0f), weight = normal(random, (size_t)n);
    double squares = 0;
    for (float v : x) squares += (double)v * v;
    std::vector<double> expected;
    for (size_t i = 0; i < x.size(); ++i) expected.push_back(x[i] / sqrt(squares / (double)n + 1e-5) * weight[i]);
    Floats out((size_t)n);
    kernels.rms_norm(x.data(), weight.data(), 1e-5f, n, out.data());
    expect(close_to(out, expected, 2e-6), kernels, "norm of " + std::to_string(n));
    Floats sum = x;
    kernels.add(sum.data(), weight.data(), 1.0f, n);
    Floats scaled = x;
    kernels.add(scaled.data(), weight.data(), 0.22f, n);
    bool same = true;
    for (size_t i = 0; i < x.size(); ++i)
      same = same && sum[i] == x[i] + weight[i] && scaled[i] == x[i] + weight[i] * 0.22f;
    expect(same, kernels, "sum of " + std::to_string(n));
  }
}

void check_softcap(const Kernels &kernels) {
  std::mt19937 random(8);
  for (int64_t n : {1, 16, 17, 100})
    for (float cap : {5.0f, 50.0f}) {
      Floats x = normal(random, (size_t)n, 40.0f);
      const Floats extremes = {0.0f, -0.0f, 1e6f, -1e6f, 1e-20f, 1e-3f, -1e-3f};
      for (size_t i = 0; i < extremes.size() && i < x.size(); ++i) x[i] = extremes[i];
      Floats out = x;
      kernels.softcap(out.data(), cap, n);
      bool close = true;
      for (size_t i = 0; i < x.size(); ++i) close = close && fabs(out[i] - cap * tanh(x[i] / cap)) <= 3e-7 * cap;
      expect(close, kernels, "softcap of " + std::to_string(n));
    }
  Floats damaged(20, NAN);
  kernels.softcap(damaged.data(), 30.0f, 20);
  bool kept = true;
  for (float v : damaged) kept = kept && isnan(v);
  expect(kept, kernels, "softcap keeps NaN");
}

void check_rotation(const Kernels &kernels) {
  std::mt19937 random(5);
  for (int32_t n_rot : {2, 16, 48, 64, 128})
    for (bool interleaved : {false, true}) {
      const int32_t half = n_rot / 2;
      const Floats x = normal(random, (size_t)n_rot + 16), turns = normal(random, (size_t)half);
      Floats cos_sin((size_t)n_rot), out = x;
      std::vector<double> expected(x.begin(), x.end());
      for (int32_t i = 0; i < half; ++i) {
        const float c = cos_sin[(size_t)i] = cosf(turns[(size_t)i]),
                    s = cos_sin[(size_t)(half + i)] = sinf(turns[(size_t)i]);
        const size_t a = (size_t)(interleaved ? 2 * i : i), b = interleaved ? a + 1 : a + (size_t)half;
        expected[a] = (double)x[a] * c - (double)x[b] * s;
        expected[b] = (double)x[a] * s + (double)x[b] * c;
      }
      kernels.rope(out.data(), cos_sin.data(), n_rot, interleaved);
      bool close = true;
      for (size_t i = 0; i < out.size(); ++i) close = close && fabs(out[i] - expected[i]) < 1e-6;
      expect(close, kernels, "rotation of " + std::to_string(n_rot));
    }
}

void check_gates(const Kernels &kernels) {
  std::mt19937 random(6);
  for (int64_t n : {1, 17, 32, 100})
    for (int32_t activation : {EC_SILU, EC_GELU, EC_RELU, EC_RELU2}) {
      Floats gate = normal(random, (size_t)n, 4.0f);
      const Floats up = normal(random, (size_t)n), extremes = {0.0f, -0.0f, 100.0f, -100.0f, 1e-20f, 30.0f, -30.0f};
      for (size_t i = 0; i < extremes.size() && i < gate.size(); ++i) gate[i] = extremes[i];
      std::vector<double> expected;
      for (size_t i = 0; i < gate.size(); ++i) {
        const double g = gate[i];
        const double inner = activation == EC_GELU ? 2 * sqrt(2 / M_PI) * (g + 0.044715 * g * g * g) : g;
        const double positive = std::max(g, 0.0), smooth = g / (1 + exp(-inner));
        const double active = activation == EC_RELU    ? positive
                              : activation == EC_RELU2 ? positive * positive
                                                       : smooth;
        expected.push_back(active * up[i]);
      }
      Floats out((size_t)n), alone((size_t)n);
      kernels.gated(gate.data(), up.data(), n, activation, out.data());
      const std::string what = " of " + std::to_string(n) + " by activation " + std::to_string(activation);
      expect(close_to(out, expected, 3e-6), kernels, "gates" + what);
      for (int64_t i = 0; i < n; ++i) kernels.gated(&gate[(size_t)i], &up[(size_t)i], 1, activation, &alone[(size_t)i]);
      expect(same_bits(out, alone), kernels, "gates one by one" + what);
      const Floats ones((size_t)n, 1.0f);
      kernels.gated(gate.data(), ones.data(), n, activation, out.data());
      kernels.gated(gate.data(), nullptr, n, activation, alone.data());
      expect(same_bits(out, alone), kernels, "activations without a gate" + what);
      const Floats none((size_t)n, NAN);
      kernels.gated(none.data(), up.data(), n, activation, out.data());
      expect(std::all_of(out.begin(), out.end(), [](float x) { return isnan(x); }), kernels, "NaN kept" + what);
    }
}

// Numbers of every size, halfway between two halves, too large, infinite or none: the bits of float_to_half.
void check_halves(const Kernels &kernels) {
  std::mt19937 random(7);
  Floats x = {0.0f,     -0.0f,     65504.0f, 65519.0f, 65520.0f, -65520.0f, 1e30f,
              INFINITY, -INFINITY, NAN,      -NAN,     1e-8f,    2.98e-8f};
  for (int i = 0; i < 4000; ++i) x.push_back(ldexpf((float)((int)(random() % 8192) - 4096), (int)(random() % 40) - 32));
  std::vector<uint16_t> found(x.size());
  kernels.to_halves(x.data(), (int64_t)x.size(), found.data());
  bool same = true;
  for (size_t i = 0; i < x.size(); ++i) same = same && found[i] == float_to_half(x[i]);
  expect(same, kernels, "numbers rounded to halves");
}

}  // namespace

int main(int argc, char **argv) {
  const bool only_names = argc == 2 && strcmp(argv[1], "sets") == 0;
  for (const Kernels *const *k = all_kernels(); *k != nullptr; ++k) {
    const Kernels &kernels = **k;
    if (only_names) {
      if (kernels.supported()) puts(kernels.name);
      continue;
    }
    if (!kernels.supported()) {
      printf("%-12s not on this processor\n", kernels.name);
      continue;
    }
    const int before = n_checked;
    check_products(kernels);
    check_integers(kernels);
    check_least_exponents(kernels);
    check_quantization(kernels);
    check_norms(kernels);
    check_rotation(kernels);
    check_gates(kernels);
    check_softcap(kernels);
    check_halves(kernels);
    check_attention(kernels);
    check_states(kernels);
    check_panels(kernels);
    printf("%-12s %d checks\n", kernels.name, n_checked - before);
  }
  if (!only_names) check_groups(), check_recurrence();
  if (!only_names) printf("%d of %d checks failed\n", n_failed, n_checked);
  return n_failed != 0;
}

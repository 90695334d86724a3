// A picture, or a tile of one, on its way through an encoder.
#include <math.h>

#include <algorithm>
#include <atomic>

#include "encoder/encoder.h"

namespace edgedec {
namespace {

int64_t round_up(int64_t n) { return pieces_of(n, TILE_ROWS) * TILE_ROWS; }

float at(const std::vector<float> &bias, int64_t i) { return bias.empty() ? 0.0f : bias[(size_t)i]; }

}  // namespace

Encoding::Sizes::Sizes(const ec_encoder &encoder, int64_t n) {
  const ec_encoder_config &c = encoder.config;
  const int64_t head_dim = encoder.head_dim(), n_rows = n / (c.merge * c.merge), band = std::min(n, PIECE_ROWS);
  const RowMatrix &second = encoder.once.matrices[EC_ENCODER_PROJECTION_2];
  const int64_t middle = second.data != nullptr ? second.n_cols : 0;
  states = n * c.n_embd;
  keys = c.n_head * round_up(n) * head_dim;
  values = c.n_head * round_up(head_dim) * n;
  work = std::max({states + keys + values, (int64_t)c.n_ff, n_rows * middle});
  scales = std::max({n * pieces_of(c.n_embd, PIECE_COLUMNS), n * pieces_of(c.n_ff, PIECE_COLUMNS),
                     n_rows * pieces_of(middle, PIECE_COLUMNS)});
  const int64_t product = (band + PIECE_COLUMNS) * PIECE_TILES * TILE_ROWS + TILE_ROWS * PIECE_COLUMNS +
                          PIECE_TILES * PIECE_COLUMNS / 32 * TILE_ROWS;
  scratch = std::max(product, QUERIES_TOGETHER * (KEYS_TOGETHER + round_up(head_dim) + 2));
}

uint64_t Encoding::Sizes::bytes(const ec_encoder &encoder) const {
  return (uint64_t)(2 * states + work + scales + encoder.pool.size() * scratch) * sizeof(float);
}

Encoding::Encoding(const ec_encoder &encoder, int32_t n_x, int32_t n_y, const volatile int32_t *cancel)
    : e_(encoder), c_(encoder.config), kernels_(encoder.kernels), n_x_(n_x), n_((int64_t)n_x * n_y),
      cancel_(cancel), sizes_(encoder, n_), memory_(new uint8_t[sizes_.bytes(encoder)]) {
  x_ = reinterpret_cast<float *>(memory_.get());
  h_ = x_ + sizes_.states;
  q_ = h_ + sizes_.states;
  keys_ = q_ + sizes_.states;
  values_ = keys_ + sizes_.keys;
  scales_ = q_ + sizes_.work;
  scratch_ = scales_ + sizes_.scales;
}

void Encoding::each(int64_t n, const std::function<void(int64_t, float *)> &work) {
  std::atomic<int64_t> next{0};
  e_.pool.run([&](int thread) {
    for (int64_t i; !stopped() && (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
      work(i, scratch_ + thread * sizes_.scratch);
  });
}

EncoderRows Encoding::to_rows(float *x, int64_t n, int64_t n_cols, const RowMatrix &w) {
  if (!e_.takes_pairs(w)) return {x, n, n_cols, nullptr};
  const int64_t n_pieces = pieces_of(n_cols, PIECE_COLUMNS);
  each(n, [&](int64_t row, float *) {
    float *from = x + row * n_cols;
    for (int64_t piece = 0; piece < n_pieces; ++piece) {
      const int64_t begin = piece * PIECE_COLUMNS, end = std::min(begin + PIECE_COLUMNS, n_cols);
      scales_[row * n_pieces + piece] =
          kernels_.to_pairs(from + begin, end - begin, reinterpret_cast<int16_t *>(from) + begin);
    }
  });
  return {x, n, n_cols, scales_};
}

// Norm the states with a weight and the bias that follows it.
void Encoding::norm(const std::vector<float> *norms, float *out) {
  const float *bias = norms[1].empty() ? nullptr : norms[1].data();
  each(n_, [&](int64_t row, float *) {
    kernels_.layer_norm(x_ + row * c_.n_embd, norms[0].data(), bias, c_.epsilon, c_.n_embd, out + row * c_.n_embd);
  });
}

// A piece of products: some panels of a matrix, for some rows. Each piece of columns is unpacked once for all rows.
void Encoding::product_piece(const EncoderRows &a, const Piece &piece, float *scratch) const {
  const RowMatrix &w = *piece.matrix;
  const int64_t n_tiles = piece.last - piece.tile, stride = n_tiles * TILE_ROWS, panel_size = PIECE_COLUMNS * TILE_ROWS;
  const int64_t n_pieces = pieces_of(a.n_cols, PIECE_COLUMNS);
  float *panels = scratch + (piece.end - piece.row) * stride, *rows = panels + n_tiles * panel_size;
  float *scales = rows + TILE_ROWS * PIECE_COLUMNS;
  int16_t *pairs = reinterpret_cast<int16_t *>(panels), *pair_rows = reinterpret_cast<int16_t *>(rows);
  for (int64_t begin = 0; begin < a.n_cols; begin += PIECE_COLUMNS) {
    const int64_t end = std::min(begin + PIECE_COLUMNS, a.n_cols), n_blocks = PIECE_COLUMNS / 32 * TILE_ROWS;
    for (int64_t t = 0; t < n_tiles; ++t) {
      const int64_t first = (piece.tile + t) * TILE_ROWS;
      if (a.scales == nullptr) unpack_panel(kernels_, w, first, begin, end, rows, panels + t * panel_size);
      else unpack_pairs(w, first, begin, end, pair_rows, pairs + t * panel_size, scales + t * n_blocks);
    }
    for (int64_t row = piece.row; row < piece.end; row += ROWS_TOGETHER) {
      const int64_t n = std::min(ROWS_TOGETHER, piece.end - row);
      const float *x = a.x + row * a.n_cols;
      for (int64_t t = 0; t < n_tiles; ++t) {
        float *y = scratch + (row - piece.row) * stride + t * TILE_ROWS;
        if (a.scales == nullptr)
          kernels_.panel({panels + t * panel_size, end - begin, n, x + begin, a.n_cols, y, stride, begin != 0});
        else
          kernels_.pairs({pairs + t * panel_size, scales + t * n_blocks, end - begin, n,
                          reinterpret_cast<const int16_t *>(x) + begin, 2 * a.n_cols,
                          a.scales + row * n_pieces + begin / PIECE_COLUMNS, n_pieces, y, stride, begin != 0});
      }
    }
  }
}

void Encoding::products(const EncoderRows &a, const std::vector<const RowMatrix *> &matrices, const Sink &sink) {
  constexpr int64_t PIECES_PER_THREAD = 4;
  int64_t n_tiles = 0;
  for (const RowMatrix *w : matrices) n_tiles += pieces_of(w->n_rows, TILE_ROWS);
  const int64_t wanted = n_tiles * pieces_of(a.n, PIECE_ROWS) / (PIECES_PER_THREAD * e_.pool.size());
  const int64_t step = std::max<int64_t>(1, std::min(wanted, PIECE_TILES));
  std::vector<Piece> pieces;
  for (const RowMatrix *w : matrices)
    for (int64_t row = 0; row < a.n; row += PIECE_ROWS)
      for (int64_t tile = 0, n = pieces_of(w->n_rows, TILE_ROWS); tile < n; tile += step)
        pieces.push_back({w, tile, std::min(tile + step, n), row, std::min(row + PIECE_ROWS, a.n)});
  each((int64_t)pieces.size(), [&](int64_t i, float *scratch) {
    const Piece &piece = pieces[(size_t)i];
    product_piece(a, piece, scratch);
    const int64_t first = piece.tile * TILE_ROWS, stride = (piece.last - piece.tile) * TILE_ROWS;
    for (int64_t row = piece.row; row < piece.end; ++row)
      sink(*piece.matrix, row, first, scratch + (row - piece.row) * stride,
           std::min(stride, piece.matrix->n_rows - first));
  });
}

// Write queries, scaled, and the panels that attention multiplies: of keys [head][tile of 16 rows][head_dim][16], of
// values [head][tile of 16 numbers of a row][row][16].
void Encoding::attention_inputs(const EncoderLayer &layer) {
  const int64_t e = c_.n_embd, d = e_.head_dim(), n_tiles = pieces_of(d, TILE_ROWS);
  const float scale = 1.0f / sqrtf((float)d);
  const RowMatrix *const w = layer.matrices;
  std::fill(keys_, keys_ + sizes_.keys + sizes_.values, 0.0f);
  const EncoderRows a = to_rows(h_, n_, e, w[EC_ENCODER_Q]);
  products(a, {w + EC_ENCODER_Q, w + EC_ENCODER_K, w + EC_ENCODER_V},
           [&](const RowMatrix &matrix, int64_t row, int64_t column, const float *y, int64_t n) {
             const int64_t which = &matrix - (w + EC_ENCODER_Q);
             const std::vector<float> &bias = layer.vectors[EC_ENCODER_Q_BIAS + which];
             float *const key = keys_ + row / TILE_ROWS * d * TILE_ROWS + row % TILE_ROWS;
             float *const value = values_ + row * TILE_ROWS;
             int64_t head = column / d, k = column % d;
             for (int64_t i = 0; i < n; ++i) {
               const float made = y[i] + at(bias, column + i);
               if (which == 0) q_[row * e + column + i] = made * scale;
               else if (which == 1) key[head * round_up(n_) * d + k * TILE_ROWS] = made;
               else value[(head * n_tiles + k / TILE_ROWS) * n_ * TILE_ROWS + k % TILE_ROWS] = made;
               if (++k == d) k = 0, ++head;
             }
           });
}

// Write what each patch gives in a layer, before its queries are replaced. seen: [n_head][n], rounded up to tiles.
void Encoding::layer_flow(float *seen, float *flow) {
  const int64_t e = c_.n_embd, d = e_.head_dim(), n_tiles = pieces_of(d, TILE_ROWS), stride = round_up(n_);
  each(c_.n_head, [&](int64_t head, float *query) {
    std::fill(query, query + d, 0.0f);
    for (int64_t i = 0; i < n_; ++i) kernels_.add(query, q_ + i * e + head * d, 1.0f / (float)n_, d);
    float *const scores = seen + head * stride;
    for (int64_t i = 0; i < n_; i += TILE_ROWS)
      kernels_.panel({keys_ + (head * stride + i) * d, d, 1, query, d, scores + i, stride, false});
    float most = -INFINITY;
    const float total = kernels_.exp_row(scores, n_, &most) * (float)c_.n_head;
    for (int64_t i = 0; i < n_; ++i) scores[i] /= total;
  });
  each(n_, [&](int64_t i, float *value) {
    std::fill(value, value + d, 0.0f);
    float attention = 0, size = 0;
    for (int64_t head = 0; head < c_.n_head; ++head) {
      attention += seen[head * stride + i];
      for (int64_t k = 0; k < d; ++k)
        value[k] += values_[((head * n_tiles + k / TILE_ROWS) * n_ + i) * TILE_ROWS + k % TILE_ROWS];
    }
    for (int64_t k = 0; k < d; ++k) size += fabsf(value[k]);
    flow[i] = attention * size / (float)c_.n_head;
  });
}

// Replace some queries of a head by what attention makes of them: a softmax over all rows, block after block of keys.
// Where mass is not nullptr, the weights are made once more, and those of a key are added to its mass.
void Encoding::attend(int64_t head, int64_t first, float *scratch, float *mass) const {
  const int64_t e = c_.n_embd, d = e_.head_dim(), n_tiles = pieces_of(d, TILE_ROWS), width = n_tiles * TILE_ROWS;
  const int64_t n_queries = std::min(QUERIES_TOGETHER, n_ - first);
  float *const scores = scratch, *const out = scores + QUERIES_TOGETHER * KEYS_TOGETHER;
  float *const most = out + QUERIES_TOGETHER * width, *const total = most + QUERIES_TOGETHER;
  float *const queries = q_ + first * e + head * d;
  std::fill(out, out + n_queries * width, 0.0f);
  std::fill(most, most + n_queries, -INFINITY);
  std::fill(total, total + n_queries, 0.0f);
  const auto score = [&](int64_t key, int64_t n_keys) {
    for (int64_t i = 0; i < n_keys; i += TILE_ROWS)
      kernels_.panel({keys_ + (head * round_up(n_) + key + i) * d, d, n_queries, queries, e, scores + i, KEYS_TOGETHER,
                      false});
  };
  for (int64_t key = 0; key < n_; key += KEYS_TOGETHER) {
    const int64_t n_keys = std::min(KEYS_TOGETHER, n_ - key);
    score(key, n_keys);
    for (int64_t r = 0; r < n_queries; ++r) {
      float factor = most[r];
      const float sum = kernels_.exp_row(scores + r * KEYS_TOGETHER, n_keys, most + r);
      factor -= most[r];
      kernels_.map(Function::exp, &factor, 1);
      total[r] = total[r] * factor + sum;
      for (int64_t i = 0; i < width; ++i) out[r * width + i] *= factor;
    }
    for (int64_t t = 0; t < n_tiles; ++t)
      kernels_.panel({values_ + ((head * n_tiles + t) * n_ + key) * TILE_ROWS, n_keys, n_queries, scores, KEYS_TOGETHER,
                      out + t * TILE_ROWS, width, true});
  }
  for (int64_t key = 0; mass != nullptr && key < n_; key += KEYS_TOGETHER) {
    const int64_t n_keys = std::min(KEYS_TOGETHER, n_ - key);
    score(key, n_keys);
    for (int64_t r = 0; r < n_queries; ++r) {
      kernels_.exp_row(scores + r * KEYS_TOGETHER, n_keys, most + r);
      kernels_.add(mass + key, scores + r * KEYS_TOGETHER, 1.0f / total[r], n_keys);
    }
  }
  for (int64_t r = 0; r < n_queries; ++r)
    for (int64_t i = 0; i < d; ++i) queries[r * e + i] = out[r * width + i] / total[r];
}

// Rows go in bands whose inner rows fit into the memory of attention.
void Encoding::feed_forward(const EncoderLayer &layer) {
  const int64_t e = c_.n_embd, ff = c_.n_ff, n_bands = pieces_of(n_, sizes_.work / ff), band = pieces_of(n_, n_bands);
  const RowMatrix &up = layer.matrices[EC_ENCODER_UP], &down = layer.matrices[EC_ENCODER_DOWN];
  for (int64_t first = 0; first < n_ && !stopped(); first += band) {
    const int64_t n = std::min(band, n_ - first);
    products(to_rows(h_ + first * e, n, e, up), {&up},
             [&](const RowMatrix &, int64_t row, int64_t column, const float *y, int64_t count) {
               float *const out = q_ + row * ff + column;
               for (int64_t i = 0; i < count; ++i) out[i] = y[i] + at(layer.vectors[EC_ENCODER_UP_BIAS], column + i);
               kernels_.gated(out, nullptr, count, c_.activation, out);
             });
    add_products(to_rows(q_, n, ff, down), down, layer.vectors[EC_ENCODER_DOWN_BIAS], x_ + first * e);
  }
}

// Add the products of a matrix to the states.
void Encoding::add_products(const EncoderRows &a, const RowMatrix &w, const std::vector<float> &bias, float *states) {
  products(a, {&w}, [&](const RowMatrix &, int64_t row, int64_t column, const float *y, int64_t n) {
    float *const x = states + row * c_.n_embd + column;
    for (int64_t i = 0; i < n; ++i) x[i] += y[i] + at(bias, column + i);
  });
}

// Make one row of each square of merge x merge patches.
void Encoding::merge() {
  const int64_t e = c_.n_embd, s = c_.merge, n_x = n_x_ / s;
  each(n_ / (s * s), [&](int64_t i, float *) {
    float *const out = h_ + i * (c_.pools ? e : s * s * e);
    if (c_.pools) std::fill(out, out + e, 0.0f);
    for (int64_t part = 0; part < s * s; ++part) {
      const float *const from = x_ + ((i / n_x * s + part / s) * n_x_ + i % n_x * s + part % s) * e;
      if (c_.pools) kernels_.add(out, from, 1.0f / (float)(s * s), e);
      else std::copy(from, from + e, out + part * e);
    }
    const std::vector<float> &weight = e_.once.vectors[EC_ENCODER_MERGED_NORM],
                             &bias = e_.once.vectors[EC_ENCODER_MERGED_NORM_BIAS];
    const int64_t n = (int64_t)weight.size();
    if (c_.pools) kernels_.rms_norm(out, weight.data(), c_.merged_epsilon, n, out);
    else if (n != 0)
      kernels_.layer_norm(out, weight.data(), bias.empty() ? nullptr : bias.data(), c_.merged_epsilon, n, out);
  });
}

void Encoding::project(float *rows) {
  const RowMatrix &first = e_.once.matrices[EC_ENCODER_PROJECTION], &second = e_.once.matrices[EC_ENCODER_PROJECTION_2];
  const std::vector<float> *const vectors = e_.once.vectors;
  const int64_t n = n_ / (c_.merge * c_.merge);
  const auto write_to = [&](float *out, const std::vector<float> &bias, bool activates) {
    return [=, &bias](const RowMatrix &w, int64_t row, int64_t column, const float *y, int64_t count) {
      float *const to = out + row * w.n_rows + column;
      for (int64_t i = 0; i < count; ++i) to[i] = y[i] + at(bias, column + i);
      if (activates) kernels_.gated(to, nullptr, count, EC_GELU, to);
    };
  };
  const bool both = second.data != nullptr;
  products(to_rows(h_, n, first.n_cols, first), {&first},
           write_to(both ? q_ : rows, vectors[EC_ENCODER_PROJECTION_BIAS], both));
  if (both)
    products(to_rows(q_, n, second.n_cols, second), {&second},
             write_to(rows, vectors[EC_ENCODER_PROJECTION_2_BIAS], false));
}

bool Encoding::encode(const float *patches, const float *positions, float *rows, float *mass, float *flow) {
  const int64_t e = c_.n_embd, n_bands = pieces_of(n_, QUERIES_TOGETHER), stride = round_up(n_);
  std::vector<float> seen(mass != nullptr || flow != nullptr ? (size_t)(c_.n_head * stride) : 0);
  std::copy(positions, positions + n_ * e, x_);
  add_products({patches, n_, c_.n_patch, nullptr}, e_.once.matrices[EC_ENCODER_PATCH],
               e_.once.vectors[EC_ENCODER_PATCH_BIAS], x_);
  for (const EncoderLayer &layer : e_.layers) {
    if (stopped()) return false;
    norm(layer.vectors + EC_ENCODER_NORM_1, h_);
    attention_inputs(layer);
    if (flow != nullptr) layer_flow(seen.data(), flow + (&layer - e_.layers.data()) * n_);
    // A thread adds up the mass of a head, band after band, so that it has the same bits for any number of threads.
    const bool adds = mass != nullptr && &layer == &e_.layers.back();
    const int64_t together = adds ? n_bands : 1;
    if (adds) std::fill(seen.begin(), seen.end(), 0.0f);
    each(c_.n_head * n_bands / together, [&](int64_t piece, float *scratch) {
      for (int64_t i = piece * together; i < (piece + 1) * together && !stopped(); ++i)
        attend(i / n_bands, i % n_bands * QUERIES_TOGETHER, scratch,
               adds ? seen.data() + i / n_bands * stride : nullptr);
    });
    for (int64_t i = 0; adds && i < n_; ++i) {
      mass[i] = 0;
      for (int64_t head = 0; head < c_.n_head; ++head) mass[i] += seen[(size_t)(head * stride + i)];
      mass[i] /= (float)(c_.n_head * n_);
    }
    const RowMatrix &out = layer.matrices[EC_ENCODER_ATTN_OUT];
    add_products(to_rows(q_, n_, e, out), out, layer.vectors[EC_ENCODER_ATTN_OUT_BIAS], x_);
    norm(layer.vectors + EC_ENCODER_NORM_2, h_);
    feed_forward(layer);
  }
  norm(e_.once.vectors + EC_ENCODER_POST_NORM, x_);
  merge();
  project(rows);
  if (stopped()) return false;
  const int64_t n_numbers = n_ / (c_.merge * c_.merge) * c_.n_out;
  if (!std::all_of(rows, rows + n_numbers, [](float x) { return isfinite(x); }))
    throw NotFinite("a number of the picture's rows is infinite or NaN");
  return true;
}

}  // namespace edgedec

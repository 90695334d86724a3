// Products of matrices and rows of activations in a forward: how they are cut into pieces, and where their sums go.
#include <string.h>

#include <algorithm>

#include "forward/run.h"
#include "kernels/row.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr int PIECES_PER_THREAD = 4;  // at least
constexpr int64_t PIECE_BYTES = 128 * 1024;  // of tiles, at most; reading and multiplying them takes some 10 us
constexpr int64_t BAND_ELEMENTS = 1 << 18;  // the most elements of a band of activations: they stay in the L2 cache

int64_t band_rows(int64_t n_cols) {
  const int64_t rows = BAND_ELEMENTS / n_cols / GROUP_ROWS * GROUP_ROWS;
  return std::max<int64_t>(GROUP_ROWS, std::min<int64_t>(BAND, rows));
}

int64_t panels(const Matrix &w) { return (w.n_rows + PANEL_ROWS - 1) / PANEL_ROWS; }

}  // namespace

// Cut the products of n_matrices like w, of n_panels panels each, with n_rows rows. A piece takes some ten
// microseconds, so that threads end a stage together and none waits long for another.
Run::Pieces Run::cut(const Matrix &w, int n_matrices, int64_t n_panels, int64_t n_rows) const {
  const int64_t band = std::min(band_rows(w.n_cols), n_rows),
                bytes = (int64_t)tile_bytes(w.type, PANEL_ROWS, w.n_cols) * n_matrices;
  const int64_t most = std::min({PIECE_BYTES / bytes, BAND / band, n_panels / (PIECES_PER_THREAD * m_.pool.size())});
  const int64_t panels_each = std::max<int64_t>(1, most);
  return {n_panels, n_rows, panels_each, band, (double)(panels_each * bytes)};
}

// Call compute(piece) and write(piece), as Stages does.
template <class Compute, class Write>
void Run::each_piece(int thread, const Pieces &pieces, Compute compute, Write write) {
  const auto piece_of = [&](int64_t number) -> Piece {
    const int64_t first = number % pieces.in_band() * pieces.panels_each,
                  begin = number / pieces.in_band() * pieces.band;
    return {first, std::min(first + pieces.panels_each, pieces.n_panels), begin,
            std::min(begin + pieces.band, pieces.n_rows)};
  };
  stages_.each_of_two_parts(
      thread, pieces.count(), pieces.bytes, retake_, [&](int64_t number) { compute(piece_of(number)); },
      [&](int64_t number) { write(piece_of(number)); });
}

// Multiply several matrices with the activations that they share, panel by panel, and write or add the products.
void Run::products(int thread, const Activations &a, const std::vector<int32_t> &rows,
                   const Target *targets, int n_targets, float *memory, bool adds) {
  if (adapted_) {
    std::vector<const Matrix *> matrices;
    for (int t = 0; t < n_targets; ++t) matrices.push_back(targets[t].matrix);
    multiply_adapters(thread, a, rows, matrices, memory);
  }
  int64_t n_panels = 0;
  for (int t = 0; t < n_targets; ++t) n_panels += panels(*targets[t].matrix);
  const Pieces pieces = cut(*targets[0].matrix, 1, n_panels, (int64_t)rows.size());
  const int64_t stride = pieces.panels_each * PANEL_ROWS;
  const auto target_of = [&](int64_t *panel) {
    const Target *target = targets;
    while (*panel >= panels(*target->matrix)) *panel -= panels(*target++->matrix);
    return target;
  };
  const auto compute = [&](const Piece &piece) {
    for (int64_t p = piece.first; p < piece.last; ++p) {
      int64_t panel = p;
      const Matrix &w = *target_of(&panel)->matrix;
      const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (w.n_rows + 15) / 16);
      float *out = memory + (p - piece.first) * PANEL_ROWS;
      k_.matmul(w, tile, last, a, piece.begin, piece.end, out, stride);
      add_adapters(w, tile, last, rows, piece.begin, piece.end, out, stride, memory + 2 * BAND * PANEL_ROWS);
    }
  };
  const auto write = [&](const Piece &piece) {
    for (int64_t p = piece.first; p < piece.last; ++p) {
      int64_t panel = p;
      const Target *target = target_of(&panel);
      const int64_t columns = std::min<int64_t>(PANEL_ROWS, target->matrix->n_rows - panel * PANEL_ROWS);
      for (int64_t r = piece.begin; r < piece.end; ++r) {
        const float *from = memory + (r - piece.begin) * stride + (p - piece.first) * PANEL_ROWS;
        const int64_t row = adds ? rows[(size_t)r] : r;
        float *to = target->out + row * target->stride + panel * PANEL_ROWS;
        if (target->are_logits && !all_finite(from, columns)) finite.store(false, std::memory_order_relaxed);
        const float factor = target->factors != nullptr ? target->factors[r] : 1.0f;
        if (adds) k_.add(to, from, c_.residual_scale * factor, columns);
        else memcpy(to, from, (size_t)columns * sizeof(float));
        if (target->are_logits) finish_logits(to, columns);
      }
    }
  };
  each_piece(thread, pieces, compute, write);
}

// Scale and cap n logits, where the architecture does so.
void Run::finish_logits(float *logits, int64_t n) const {
  for (int64_t i = 0; c_.logit_scale != 1.0f && i < n; ++i) logits[i] *= c_.logit_scale;
  if (c_.logit_softcap != 0.0f) k_.softcap(logits, c_.logit_softcap, n);
}

// Add the product of a matrix to x, after a norm or a convolution where the architecture has one.
void Run::add_product(int thread, const Activations &a, const std::vector<int32_t> &rows,
                      const Matrix &w, const Behind &behind, float *memory) {
  if (behind.post_norm.empty() && !behind.convolution.is_used()) {
    const Target target = {&w, m_.x.data(), c_.n_embd};
    products(thread, a, rows, &target, 1, memory, true);
    return;
  }
  const Target target = {&w, m_.branch.data(), c_.n_embd};
  products(thread, a, rows, &target, 1, memory);
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    const float *branch = m_.branch.data() + i * c_.n_embd;
    float *x = m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd;
    if (behind.convolution.is_used()) convolve_row(behind.convolution, 1, rows, i, m_.branch.data(), memory);
    else k_.rms_norm(branch, behind.post_norm.data(), c_.rms_epsilon, c_.n_embd, memory);
    k_.add(x, memory, c_.residual_scale, c_.n_embd);
    scale_row(x, behind.scale);
  });
}

// Replace n gates by the gated activations; `ups` is changed. Without gates, `gates` holds what `up` gave.
void Run::activate(float *gates, float *ups, int64_t n) const {
  if (c_.glu_limit != 0.0f) {  // as SiLU of what is multiplied by the slope
    const float limit = c_.glu_limit, slope = c_.glu_slope;
    for (int64_t i = 0; i < n; ++i) {
      gates[i] = slope * std::min(gates[i], limit);
      ups[i] = (1.0f + std::max(-limit, std::min(ups[i], limit))) / slope;
    }
  }
  k_.gated(gates, c_.ungated == 0 ? ups : nullptr, n, c_.activation, gates);
}

// Multiply gate and up, or up alone where there is no gate. A panel of both gives 32 columns of the activations, one
// block to quantize.
void Run::gate_and_up(int thread, const Layer &layer, const Activations &normed, const std::vector<int32_t> &rows,
                      float *memory) {
  const bool is_gated = c_.ungated == 0;
  const Matrix &up = layer.matrices[EC_UP], &first = is_gated ? layer.matrices[EC_GATE] : up;
  const Activations out = gated(layer.matrices[EC_DOWN]);
  const Pieces pieces = cut(first, is_gated ? 2 : 1, panels(first), (int64_t)rows.size());
  const int64_t stride = pieces.panels_each * PANEL_ROWS;
  float *gates = memory, *ups = memory + BAND * PANEL_ROWS, *adapted = memory + 2 * BAND * PANEL_ROWS;
  if (adapted_) multiply_adapters(thread, normed, rows, {&layer.matrices[EC_GATE], &up}, memory);
  const auto columns = [&](const Piece &piece) {
    return std::min(piece.last * PANEL_ROWS, up.n_rows) - piece.first * PANEL_ROWS;
  };
  const auto compute = [&](const Piece &piece) {
    const int64_t tile = piece.first * PANEL_TILES, last = std::min(piece.last * PANEL_TILES, (up.n_rows + 15) / 16);
    for (int64_t t = tile; t < last; t += PANEL_TILES) {
      const int64_t end = std::min(t + PANEL_TILES, last), column = (t - tile) * TILE_ROWS;
      k_.matmul(first, t, end, normed, piece.begin, piece.end, gates + column, stride);
      add_adapters(first, t, end, rows, piece.begin, piece.end, gates + column, stride, adapted);
      if (!is_gated) continue;
      k_.matmul(up, t, end, normed, piece.begin, piece.end, ups + column, stride);
      add_adapters(up, t, end, rows, piece.begin, piece.end, ups + column, stride, adapted);
    }
    for (int64_t r = 0; r < piece.end - piece.begin; ++r)
      activate(gates + r * stride, ups + r * stride, columns(piece));
  };
  const auto write = [&](const Piece &piece) {
    for (int64_t r = piece.begin; r < piece.end; ++r)
      k_.quantize(out, r, piece.first * PANEL_ROWS, columns(piece), gates + (r - piece.begin) * stride);
  };
  each_piece(thread, pieces, compute, write);
}

}  // namespace edgedec

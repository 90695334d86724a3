// The C interface of fetching weights ahead of products, and how long products with a model's own weights take.
#include <algorithm>
#include <chrono>

#include "api_calls.h"
#include "forward/run.h"
#include "weights/tensor_types.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr uint64_t PIECE_BYTES = 128 * 1024;  // of tiles, about as much as a thread takes at once in a forward

struct TilePiece {
  const Matrix *matrix;
  int64_t first, last;  // tiles
  uint64_t bytes;
};

// Return the model's weights of a type that are in memory, in the order in which a forward reads them. An embedding
// matrix that is not the output matrix as well is not multiplied.
std::vector<TilePiece> pieces_of(const ec_model &model, int32_t type) {
  std::vector<TilePiece> pieces;
  const auto add = [&](const Matrix &w) {
    if (w.type != type || w.n_rows == 0 || w.tiles == nullptr) return;
    const uint64_t tile = tile_bytes(type, TILE_ROWS, w.n_cols);
    const int64_t n_tiles = (w.n_rows + TILE_ROWS - 1) / TILE_ROWS,
                  each = std::max<int64_t>(1, (int64_t)(PIECE_BYTES / tile / PANEL_TILES)) * PANEL_TILES;
    for (int64_t t = 0; t < n_tiles; t += each)
      pieces.push_back({&w, t, std::min(t + each, n_tiles), tile * (uint64_t)(std::min(t + each, n_tiles) - t)});
  };
  for (const Layer &layer : model.layers)
    for (const Matrix &matrix : layer.matrices) add(matrix);
  add(model.output);
  return pieces;
}

// Return so many bytes of pieces, from the one with byte `first_byte` on; the first one follows the last one.
std::vector<TilePiece> cut_out(const std::vector<TilePiece> &pieces, uint64_t first_byte, uint64_t n_bytes) {
  uint64_t all = 0, before = 0, taken = 0;
  for (const TilePiece &piece : pieces) all += piece.bytes;
  size_t i = 0;
  for (first_byte %= all; before + pieces[i].bytes <= first_byte; ++i) before += pieces[i].bytes;
  std::vector<TilePiece> found;
  for (; taken < std::min(n_bytes, all); i = (i + 1) % pieces.size()) {
    found.push_back(pieces[i]);
    taken += pieces[i].bytes;
  }
  return found;
}

// As ec_model_time_products. Throws Invalid where the model has no such weights in memory, std::bad_alloc.
double product_seconds(ec_model &model, int32_t type, int32_t n_rows, uint64_t first_byte, uint64_t n_bytes) {
  std::vector<TilePiece> pieces;
  if (!model.streamer.started()) pieces = pieces_of(model, type);
  if (pieces.empty()) throw Invalid("the model has no such weights in memory");
  pieces = cut_out(pieces, first_byte, n_bytes);
  int64_t most_cols = 0;
  for (const TilePiece &piece : pieces) most_cols = std::max(most_cols, piece.matrix->n_cols);
  const ActivationBuffer buffer(n_rows, most_cols, !is_float_type(type), is_float_type(type));
  const std::vector<float> ones((size_t)most_cols, 1.0f);
  for (int32_t i = 0; i < n_rows; ++i) model.kernels->quantize(buffer.view(), i, 0, most_cols, ones.data());
  std::vector<std::vector<float>> products((size_t)model.pool.size(),
                                           std::vector<float>((size_t)(n_rows * PANEL_ROWS)));
  Stages stages(cuts_by_speed(model.speeds), 1);
  const auto multiply = [&](int thread) {
    stages.each(thread, (int64_t)pieces.size(), [&](int64_t i) {
      const TilePiece &piece = pieces[(size_t)i];
      Activations rows = buffer.view();
      rows.n = piece.matrix->n_cols;
      for (int64_t t = piece.first; t < piece.last; t += PANEL_TILES)
        model.kernels->matmul(*piece.matrix, t, std::min(t + PANEL_TILES, piece.last), rows, 0, n_rows,
                              products[(size_t)thread].data(), PANEL_ROWS);
    });
  };
  const FaultsUnblocked unblocked;
  const auto start = std::chrono::steady_clock::now();
  model.pool.run(multiply);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
}  // namespace edgedec

using namespace edgedec;

int32_t ec_model_set_ahead(ec_model *model, int32_t type, int32_t n_rows, int32_t l1_bytes, int32_t l2_bytes,
                           int32_t l2_times) {
  return guarded([&] {
    require(block_layout(type).columns != 0 && n_rows >= 1 && n_rows <= AHEAD_ROWS, "no such products");
    require(l1_bytes >= USUAL_AHEAD && l1_bytes <= MOST_AHEAD && l2_bytes >= 0 && l2_times >= 0 &&
                (int64_t)l2_bytes * l2_times <= MOST_AHEAD,
            "weights are not fetched so far ahead");
    model->ahead_of(type)[n_rows - 1] = {l1_bytes, l2_bytes, l2_times};
  });
}

int32_t ec_model_time_products(ec_model *model, int32_t type, int32_t n_rows, uint64_t first_byte, uint64_t n_bytes,
                               double *seconds) {
  return guarded([&] {
    require(model->finished && n_rows >= 1 && n_rows <= AHEAD_ROWS && n_bytes >= 1, "there are no products to time");
    if (model->mapping != nullptr) model->mapping->check();
    *seconds = product_seconds(*model, type, n_rows, first_byte, n_bytes);
    if (model->mapping != nullptr) model->mapping->check();
  });
}

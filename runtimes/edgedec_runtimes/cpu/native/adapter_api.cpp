// The C interface of low-rank adapters.
#include <math.h>

#include <algorithm>

#include "api_calls.h"
#include "forward/model.h"
#include "weights/tensor_types.h"
#include "weights/tiles.h"

using namespace edgedec;

namespace {

constexpr int32_t MOST_ADAPTERS = 64;
constexpr int64_t MOST_RANK = 1 << 12;

// Return the matrix of a model that an adapter may change.
const Matrix &changeable(ec_model *model, int32_t which, int32_t layer) {
  const bool is_once = which == EC_PER_LAYER_PROJECTION;
  const bool is_of_layer = which >= EC_Q && which < EC_N_MATRICES && which != EC_PER_LAYER_ROWS &&
                           (which < EC_GATE_EXPERTS || which > EC_DOWN_EXPERTS);
  require(is_of_layer, "adapters do not change this matrix");
  require(layer >= 0 && layer < model->config.n_layer, "no such layer");
  const Matrix &matrix = is_once ? model->per_layer.projection : model->layers[(size_t)layer].matrices[which];
  require(matrix.n_rows != 0, "the model has no such matrix");
  return matrix;
}

}  // namespace

int32_t ec_model_adapt(ec_model *model, int32_t adapter, int32_t which, int32_t layer, int32_t type, int64_t rank,
                       float factor, const void *a, uint64_t a_bytes, const void *b, uint64_t b_bytes) {
  return guarded([&] {
    require(!model->finished && !model->of_head, "adapters come before the model is finished");
    require(adapter >= 0 && adapter < MOST_ADAPTERS, "there are too many adapters");
    require(is_float_type(type) && rank >= 1 && rank <= MOST_RANK, "the rank or the type of an adapter is out of range");
    require(isfinite(factor), "the factor of an adapter is not finite");
    const Matrix &matrix = changeable(model, which, layer);
    require(a_bytes == tile_bytes(type, rank, matrix.n_cols) && b_bytes == tile_bytes(type, matrix.n_rows, rank),
            "the tiles of an adapter have another size");
    Adapters &adapters = model->adapters;
    std::vector<AdapterPair> &pairs = adapters.pairs[&matrix];
    require(pairs.empty() || pairs.back().adapter < adapter, "an adapter changes a matrix twice, or is out of order");
    pairs.push_back({adapter,
                     {type, rank, matrix.n_cols, (const uint8_t *)a},
                     {type, matrix.n_rows, rank, (const uint8_t *)b},
                     factor,
                     adapters.widths[layer]});
    adapters.widths[layer] += rank;
    adapters.n = std::max(adapters.n, adapter + 1);
    return EC_OK;
  });
}

int32_t ec_session_adapt(ec_session *session, const float *scales, int32_t n) {
  return guarded([&] {
    require(n >= 0 && n <= session->model->adapters.n, "there are fewer adapters");
    for (int32_t i = 0; i < n; ++i) require(isfinite(scales[i]), "the scale of an adapter is not finite");
    session->adapter_scales.assign(scales, scales + n);
    return EC_OK;
  });
}

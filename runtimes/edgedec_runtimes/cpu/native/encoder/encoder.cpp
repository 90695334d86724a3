// The weights of an encoder: where they are kept, and whether they fit each other.
#include "encoder/encoder.h"

#include <math.h>

#include "api_calls.h"

using namespace edgedec;

namespace {

constexpr int32_t MOST_WIDTH = 1 << 16;

void check(const ec_encoder_config &c) {
  for (int32_t n : {c.n_patch, c.n_embd, c.n_ff, c.n_out})
    require(n >= 1 && n <= MOST_WIDTH, "a width of the encoder is out of range");
  require(c.n_layer >= 1 && c.n_layer <= 1024, "the number of the encoder's layers is out of range");
  require(c.n_head >= 1 && c.n_embd % c.n_head == 0 && c.n_embd / c.n_head <= 512,
          "the encoder's heads do not divide its width, or are too wide");
  require(c.activation == EC_SILU || c.activation == EC_GELU || c.activation == EC_GELU_QUICK,
          "the encoder's activation is none that is known");
  require(c.merge >= 1 && c.merge <= 16, "the number of patches that become one row is out of range");
  for (float epsilon : {c.epsilon, c.merged_epsilon})
    require(isfinite(epsilon) && epsilon >= 0, "a norm's epsilon is no number from 0 on");
}

}  // namespace

ec_encoder::ec_encoder(const ec_encoder_config &given, int n_threads, const Kernels &kernels)
    : config((check(given), given)), kernels(kernels), pool(Pool::shared(n_threads)), layers((size_t)given.n_layer) {}

RowMatrix &ec_encoder::matrix(int32_t which, int32_t layer) {
  require(!finished && which >= 0 && which < EC_ENCODER_N_MATRICES, "the encoder has no such matrix");
  if (which < EC_ENCODER_Q) return once.matrices[which];
  require(layer >= 0 && layer < config.n_layer, "the encoder has no such layer");
  return layers[(size_t)layer].matrices[which];
}

std::vector<float> &ec_encoder::vector(int32_t which, int32_t layer) {
  require(!finished && which >= 0 && which < EC_ENCODER_N_VECTORS, "the encoder has no such vector");
  if (which < EC_ENCODER_NORM_1) return once.vectors[which];
  require(layer >= 0 && layer < config.n_layer, "the encoder has no such layer");
  return layers[(size_t)layer].vectors[which];
}

void ec_encoder::finish() {
  const auto has = [](const RowMatrix &w, int64_t n_rows, int64_t n_cols) {
    require(w.data != nullptr && w.n_rows == n_rows && w.n_cols == n_cols,
            "a matrix of the encoder is missing, or has another shape");
  };
  const auto is = [](const std::vector<float> &v, int64_t n, bool may_lack) {
    require((may_lack && v.empty()) || (int64_t)v.size() == n,
            "a vector of the encoder is missing, or has another length");
  };
  const int64_t e = config.n_embd, merged = config.pools ? e : e * config.merge * config.merge;
  const RowMatrix &second = once.matrices[EC_ENCODER_PROJECTION_2];
  const int64_t middle = second.data != nullptr ? second.n_cols : config.n_out;
  has(once.matrices[EC_ENCODER_PATCH], e, config.n_patch);
  require(is_float_type(once.matrices[EC_ENCODER_PATCH].type), "the matrix of patches is not one of floats");
  has(once.matrices[EC_ENCODER_PROJECTION], middle, merged);
  if (second.data != nullptr) has(second, config.n_out, middle);
  is(once.vectors[EC_ENCODER_PATCH_BIAS], e, true);
  is(once.vectors[EC_ENCODER_POST_NORM], e, false);
  is(once.vectors[EC_ENCODER_POST_NORM_BIAS], e, true);
  is(once.vectors[EC_ENCODER_MERGED_NORM], merged, !config.pools);
  is(once.vectors[EC_ENCODER_MERGED_NORM_BIAS], merged, true);
  is(once.vectors[EC_ENCODER_PROJECTION_BIAS], middle, true);
  is(once.vectors[EC_ENCODER_PROJECTION_2_BIAS], config.n_out, true);
  for (const EncoderLayer &layer : layers) {
    for (int32_t i : {EC_ENCODER_Q, EC_ENCODER_K, EC_ENCODER_V, EC_ENCODER_ATTN_OUT}) has(layer.matrices[i], e, e);
    has(layer.matrices[EC_ENCODER_UP], config.n_ff, e);
    has(layer.matrices[EC_ENCODER_DOWN], e, config.n_ff);
    for (int32_t i : {EC_ENCODER_K, EC_ENCODER_V})
      require(takes_pairs(layer.matrices[i]) == takes_pairs(layer.matrices[EC_ENCODER_Q]),
              "the matrices of queries, keys and values have different types");
    for (int32_t i : {EC_ENCODER_NORM_1, EC_ENCODER_NORM_2}) {
      is(layer.vectors[i], e, false);
      is(layer.vectors[i + 1], e, true);
    }
    for (int32_t i : {EC_ENCODER_Q_BIAS, EC_ENCODER_K_BIAS, EC_ENCODER_V_BIAS, EC_ENCODER_ATTN_OUT_BIAS,
                      EC_ENCODER_DOWN_BIAS})
      is(layer.vectors[i], e, true);
    is(layer.vectors[EC_ENCODER_UP_BIAS], config.n_ff, true);
  }
  finished = true;
}

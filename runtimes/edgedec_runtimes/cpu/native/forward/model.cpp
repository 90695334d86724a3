#include "forward/model.h"

#include <math.h>

#include <algorithm>

#include "weights/tensor_types.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

void require(bool holds, const std::string &message) {
  if (!holds) throw Invalid(message);
}

std::string shape(int64_t rows, int64_t cols) { return std::to_string(rows) + " x " + std::to_string(cols); }

void require_matrix(const Matrix &m, const char *name, int64_t rows, int64_t cols) {
  require(m.n_rows != 0, std::string("the matrix ") + name + " is missing");
  require(m.n_rows == rows && m.n_cols == cols, std::string("the matrix ") + name + " is " + shape(m.n_rows, m.n_cols) +
                                                    ", expected " + shape(rows, cols));
}

void require_vector(const std::vector<float> &v, const char *name, int64_t n, bool optional) {
  require(optional || !v.empty(), std::string("the vector ") + name + " is missing");
  require(v.empty() || (int64_t)v.size() == n, std::string("the vector ") + name + " has " + std::to_string(v.size()) +
                                                   " elements, expected " + std::to_string(n));
}

void check_config(const ec_config &c) {
  require(
      c.n_vocab > 0 && c.n_embd > 0 && c.n_layer > 0 && c.n_head > 0 && c.n_head_kv > 0 && c.head_dim > 0 && c.n_ff > 0,
      "a size of the model is not positive");
  require(c.n_vocab < 1 << 24 && c.n_embd <= 1 << 17 && c.n_layer <= 1 << 12 && c.n_head <= 1 << 12 &&
              c.head_dim <= 1 << 12 && c.n_ff <= 1 << 20,
          "a size of the model is out of range");
  require(c.n_head % c.n_head_kv == 0, "the heads are no multiple of the key-value heads");
  require(c.head_dim % 16 == 0 && c.n_embd % 16 == 0, "head_dim and n_embd must be multiples of 16");
  require(c.n_rot > 0 && c.n_rot % 2 == 0 && c.n_rot <= c.head_dim, "n_rot must be even and at most head_dim");
  require(c.n_expert >= 0 && c.n_expert <= MAX_EXPERTS && c.n_expert_used >= (c.n_expert != 0) &&
              c.n_expert_used <= c.n_expert,
          "the experts are out of range");
  require(c.n_ff_expert >= 0 && c.n_ff_expert <= 1 << 20 && c.n_ff_expert % 32 == 0 &&
              (c.n_expert == 0 || c.n_ff_expert > 0) && c.n_ff_shared >= 0 && c.n_ff_shared <= 1 << 20,
          "the width of an expert is out of range, or no multiple of 32");
  require(c.n_expert == 0 || (isfinite(c.expert_scale) && c.expert_scale > 0),
          "the factor of experts is not a positive number");
  require(c.glu_limit == 0.0f || (isfinite(c.glu_slope) && c.glu_slope > 0),
          "the slope of gates is not a positive number");
  require(c.sliding_window >= 0 && c.temperature_tokens >= 0, "the sliding window or a number of tokens is negative");
  for (float f : {c.rms_epsilon, c.embedding_scale, c.residual_scale, c.logit_scale, c.attention_scale})
    require(isfinite(f) && f > 0, "a factor of the model is not a positive number");
  for (float f : {c.attention_softcap, c.logit_softcap, c.temperature_scale, c.glu_limit})
    require(isfinite(f) && f >= 0, "a bound of the model is not a number of at least 0");
}

}  // namespace

ActivationBuffer::ActivationBuffer(int64_t rows, int64_t n, bool quantized, bool floats) {
  const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS;
  if (quantized) blocks_.resize((size_t)(groups * (n / 32)));
  if (floats) floats_.resize((size_t)(rows * n));
  view_ = {quantized ? blocks_.data() : nullptr, floats ? floats_.data() : nullptr, n};
}

}  // namespace edgedec

using namespace edgedec;

ec_model::ec_model(const ec_config &c, int32_t n_threads, int32_t rows, const Kernels *k)
    : config(c),
      max_rows(rows),
      kernels(k),
      pool((check_config(c), Pool::shared(n_threads))),
      layers((size_t)c.n_layer) {}

void Rope::fill(float *cos_sin, int32_t position) const {
  const size_t half = frequencies.size();
  for (size_t i = 0; i < half; ++i) {
    cos_sin[i] = (float)(cos(frequencies[i] * position) * magnitude);
    cos_sin[half + i] = (float)(sin(frequencies[i] * position) * magnitude);
  }
}

Ahead *ec_model::ahead_of(int32_t type) {
  if (ahead_from != nullptr) return ahead_from->ahead_of(type);
  const auto [place, is_new] = ahead.try_emplace(type);
  if (is_new) place->second.fill({USUAL_AHEAD, 0, 0});
  return place->second.data();
}

// Check the matrices of a layer's experts but for those of a shared one.
void ec_model::check_experts(const Layer &layer) const {
  const ec_config &c = config;
  const Matrix *m = layer.matrices;
  require(c.n_expert != 0, "a layer has experts, and the model has none");
  require_matrix(m[EC_ROUTER], "ffn_gate_inp", c.n_expert, c.n_embd);
  require_matrix(m[EC_GATE_EXPERTS], "ffn_gate_exps", (int64_t)c.n_expert * c.n_ff_expert, c.n_embd);
  require_matrix(m[EC_UP_EXPERTS], "ffn_up_exps", (int64_t)c.n_expert * c.n_ff_expert, c.n_embd);
  require_matrix(m[EC_DOWN_EXPERTS], "ffn_down_exps", (int64_t)c.n_expert * c.n_embd, c.n_ff_expert);
  if (m[EC_SHARED_ROUTER].n_rows != 0) require_matrix(m[EC_SHARED_ROUTER], "ffn_gate_inp_shexp", 1, c.n_embd);
  require_vector(layer.vectors[EC_EXPERT_BIAS], "exp_probs_b", c.n_expert, true);
  require_vector(layer.vectors[EC_ROUTER_BIAS], "ffn_gate_inp.bias", c.n_expert, true);
  require_vector(layer.vectors[EC_GATE_EXPERTS_BIAS], "ffn_gate_exps.bias", (int64_t)c.n_expert * c.n_ff_expert, true);
  require_vector(layer.vectors[EC_UP_EXPERTS_BIAS], "ffn_up_exps.bias", (int64_t)c.n_expert * c.n_ff_expert, true);
  require_vector(layer.vectors[EC_DOWN_EXPERTS_BIAS], "ffn_down_exps.bias", (int64_t)c.n_expert * c.n_embd, true);
  require(layer.vectors[EC_POST_FFN_NORM].empty(), "a norm stands behind experts");
}

// Check the kernels of a layer's convolution, and lay them out as [length][n_embd].
void ec_model::finish_convolution(Layer &layer) {
  std::vector<float> &kernels = layer.vectors[EC_CONVOLUTION];
  const size_t n = (size_t)config.n_embd, length = kernels.size() / n;
  require(!paired && kernels.size() == length * n && length >= 2 && length <= MAX_CONVOLUTION,
          "the kernels of a convolution have another length than 2 to " + std::to_string(MAX_CONVOLUTION));
  require(convolution_length == 0 || convolution_length == (int32_t)length,
          "the convolutions of the layers differ in length");
  convolution_length = (int32_t)length;
  std::vector<float> by_place(kernels.size());
  for (size_t i = 0; i < n; ++i)
    for (size_t k = 0; k < length; ++k) by_place[k * n + i] = kernels[i * length + k];
  kernels.swap(by_place);
}

// Check the convolutions around a block of a layer.
void ec_model::check_row_convolution(const RowConvolution &convolution) const {
  const int64_t n = config.n_embd, length = row_conv_length;
  require(length >= 0 && length <= MAX_CONVOLUTION, "the convolutions over rows are too long");
  require(length == 0 || (row_conv_group > 0 && n % row_conv_group == 0), "n_embd is no multiple of conv_group");
  require((int64_t)convolution.base.size() == 2 * length * n, "the base of kernels is missing or has another length");
  if (length != 0) require_matrix(convolution.kernels, "kernels", n_row_kernels(), n);
}

ColumnShape ec_model::columns() const {
  const int32_t n =
      (int32_t)std::count_if(layers.begin(), layers.end(), [](const Layer &layer) { return layer.convolves(); });
  return {elsewhere ? 0 : n, config.n_layer, config.n_vocab, config.n_embd, convolution_length - 1};
}

void ec_model::finish() {
  const ec_config &c = config;
  if (!of_head) require_matrix(token_embd, "token_embd", c.n_vocab, c.n_embd);
  require(streamer.complete(), "matrices have places in a file, but no streaming was set up");
  if (output.n_rows == 0) output = token_embd;
  require_matrix(output, "output", c.n_vocab, c.n_embd);
  require_vector(output_norm, "output_norm", c.n_embd, of_head);
  for (int i = 0; i < 2; ++i) {
    const size_t n = rope[i].frequencies.size();
    require((i == 1 && n == 0) || n == (size_t)c.n_rot / 2,
            "the frequencies of rotations are missing or of another number");
  }
  const int64_t n_normed_q = c.wide_norms ? n_q() : c.head_dim, n_normed_k = c.wide_norms ? n_kv() : c.head_dim;
  // normed, attended, gated, pairs, those that experts read, and their gated, convolved
  bool quantized[7] = {}, floats[7] = {};
  int32_t n_of_kind[2] = {};  // layers with attention, with a convolution
  const auto note = [&](int which, const Matrix &m) {
    if (m.n_rows != 0) (is_float_type(m.type) ? floats : quantized)[which] = true;
  };
  note(0, output);
  for (Layer &layer : layers) {
    const Matrix *m = layer.matrices;
    layer.number = n_of_kind[layer.convolves()]++;
    if (layer.convolves()) finish_convolution(layer);
    if (layer.slides) layer.window = c.sliding_window;
    require_matrix(m[EC_Q], "attn_q", n_q(layer), n_input());
    require_matrix(m[EC_K], "attn_k", n_kv(layer), n_input());
    require_matrix(m[EC_V], "attn_v", n_kv(layer), n_input());
    require_matrix(m[EC_ATTN_OUT], "attn_output", c.n_embd, n_q(layer));
    if (layer.has_experts()) check_experts(layer);
    if (!layer.has_experts() || c.n_ff_shared != 0) {
      const int64_t n_ff = layer.has_experts() ? c.n_ff_shared : c.n_ff;
      require_matrix(m[EC_GATE], "ffn_gate", n_ff, c.n_embd);
      require_matrix(m[EC_UP], "ffn_up", n_ff, c.n_embd);
      require_matrix(m[EC_DOWN], "ffn_down", c.n_embd, n_ff);
    }
    for (int i : {EC_Q, EC_K, EC_V}) note(paired ? 3 : 0, m[i]);
    for (int i : {EC_GATE, EC_UP, EC_ROUTER, EC_SHARED_ROUTER, EC_GATE_EXPERTS, EC_UP_EXPERTS}) note(0, m[i]);
    for (int i : {EC_GATE_EXPERTS, EC_UP_EXPERTS}) note(4, m[i]);
    note(layer.convolves() ? 6 : 1, m[EC_ATTN_OUT]);
    for (const RowConvolution *convolution : {&layer.around_attention, &layer.around_ffn}) {
      check_row_convolution(*convolution);
      note(0, convolution->kernels);
    }
    note(2, m[EC_DOWN]);
    note(5, m[EC_DOWN_EXPERTS]);
    const std::vector<float> *v = layer.vectors;
    require_vector(v[EC_ATTN_NORM], "attn_norm", c.n_embd, !paired);
    require_vector(v[EC_EMBEDDING_NORM], "embedding_norm", c.n_embd, !paired);
    require_vector(v[EC_FFN_NORM], "ffn_norm", c.n_embd, true);
    require_vector(v[EC_Q_BIAS], "attn_q.bias", n_q(), true);
    require_vector(v[EC_K_BIAS], "attn_k.bias", n_kv(), true);
    require_vector(v[EC_V_BIAS], "attn_v.bias", n_kv(), true);
    require_vector(v[EC_Q_NORM], "attn_q_norm", n_normed_q, true);
    require_vector(v[EC_K_NORM], "attn_k_norm", n_normed_k, true);
    require(!c.wide_norms || (v[EC_Q_BIAS].empty() && v[EC_K_BIAS].empty()),
            "biases stand before norms over all heads");
    require_vector(v[EC_ATTN_OUT_BIAS], "attn_output.bias", c.n_embd, true);
    require_vector(v[EC_SINKS], "attn_sinks", c.n_head, true);
    require(v[EC_ATTN_OUT_BIAS].empty() || v[EC_POST_ATTN_NORM].empty(),
            "the bias of attn_output stands before a norm");
    require_vector(v[EC_POST_ATTN_NORM], "post_attention_norm", c.n_embd, true);
    require_vector(v[EC_POST_FFN_NORM], "post_ffw_norm", c.n_embd, true);
  }
  const size_t rows = (size_t)max_rows;
  x.resize(rows * (size_t)c.n_embd);
  branch.resize(rows * (size_t)c.n_embd);
  if (row_conv_length != 0) entering.resize(rows * (size_t)c.n_embd);
  kernels_of_rows.resize(rows * (size_t)n_row_kernels());
  qkv.resize(rows * (size_t)std::max<int64_t>(n_q() + 2 * n_kv(), n_of_kind[1] > 0 ? 3 * c.n_embd : 0));
  attention.resize(rows * (size_t)n_q());
  for (int i = 0; i < 2; ++i) cos_sin[i].resize(2 * rows * rope[i].frequencies.size());
  normed = ActivationBuffer(max_rows, c.n_embd, quantized[0], floats[0]);
  for (int i = 0; i < pool.size(); ++i) own_normed.emplace_back(GROUP_ROWS, c.n_embd, quantized[0], floats[0]);
  attended = ActivationBuffer(max_rows, n_q(), quantized[1], floats[1]);
  if (n_of_kind[1] > 0) convolved = ActivationBuffer(max_rows, c.n_embd, quantized[6], floats[6]);
  gated = ActivationBuffer(max_rows, std::max(c.n_ff, c.n_ff_shared), quantized[2], floats[2]);
  require(c.n_expert == 0 || !streamer.started() || experts.started(), "the experts are not set up for streaming");
  if (c.n_expert != 0) {
    routings.resize(layers.size());
    touched.resize(rows + 1);
    for (size_t i = 0; i < layers.size(); ++i)
      if (layers[i].has_experts()) routings[i].reserve(max_rows, c);
    scores.resize(rows * (size_t)(c.n_expert + 1));
    for (int i = 0; i < pool.size(); ++i) own_gathered.emplace_back(MAX_IN_GROUP, c.n_embd, quantized[4], floats[4]);
    expert_gated = ActivationBuffer(most_slots(max_rows, c), c.n_ff_expert, quantized[5], floats[5]);
  }
  if (paired) pairs = ActivationBuffer(max_rows, n_input(), quantized[3], floats[3]);
  thread_memory.resize((size_t)pool.size());
  speeds.assign((size_t)pool.size(), 1.0);
  finished = true;
}

// Checks of a model's matrices and vectors, layer by layer, before the first forward.
#include "forward/model.h"

using namespace edgedec;

void ec_model::require_gate(const Matrix &gate, const char *name, int64_t n_rows) const {
  if (config.ungated == 0) require_matrix(gate, name, n_rows, config.n_embd);
  else require(gate.n_rows == 0, std::string("there is ") + name + ", and blocks have no gates");
}

// Check the matrices of a layer's experts but for those of a shared one.
void ec_model::check_experts(const Layer &layer) const {
  const ec_config &c = config;
  const Matrix *m = layer.matrices;
  require(c.n_expert != 0, "a layer has experts, and the model has none");
  require_matrix(m[EC_ROUTER], "ffn_gate_inp", c.n_expert, c.n_embd);
  const int64_t n_together = m[EC_UP_EXPERTS].n_rows == 0 ? 2 : 1;
  require_gate(m[EC_GATE_EXPERTS], "ffn_gate_exps", n_together * c.n_expert * c.n_ff_expert);
  if (n_together == 1 || c.ungated != 0)
    require_matrix(m[EC_UP_EXPERTS], "ffn_up_exps", (int64_t)c.n_expert * c.n_ff_expert, c.n_embd);
  require_matrix(m[EC_DOWN_EXPERTS], "ffn_down_exps", (int64_t)c.n_expert * c.n_embd, c.n_ff_expert);
  require(!c.early_router || m[EC_SHARED_ROUTER].n_rows == 0, "a shared expert has a score, and routers are early");
  if (m[EC_SHARED_ROUTER].n_rows != 0) require_matrix(m[EC_SHARED_ROUTER], "ffn_gate_inp_shexp", 1, c.n_embd);
  require_vector(layer.vectors[EC_EXPERT_BIAS], "exp_probs_b", c.n_expert, true);
  require_vector(layer.vectors[EC_ROUTER_BIAS], "ffn_gate_inp.bias", c.n_expert, true);
  require_vector(layer.vectors[EC_GATE_EXPERTS_BIAS], "ffn_gate_exps.bias", (int64_t)c.n_expert * c.n_ff_expert, true);
  require_vector(layer.vectors[EC_UP_EXPERTS_BIAS], "ffn_up_exps.bias", (int64_t)c.n_expert * c.n_ff_expert, true);
  require_vector(layer.vectors[EC_DOWN_EXPERTS_BIAS], "ffn_down_exps.bias", (int64_t)c.n_expert * c.n_embd, true);
  const std::vector<float> *v = layer.vectors;
  require_vector(v[EC_EXPERT_SCALES], "ffn_down_exps.scale", c.n_expert, true);
  const bool is_normed = !v[EC_POST_EXPERTS_NORM].empty();
  for (int i : {EC_ROUTER_NORM, EC_EXPERTS_NORM, EC_POST_SHARED_NORM, EC_POST_EXPERTS_NORM})
    require_vector(v[i], "of experts' norms", c.n_embd, !is_normed);
  require(is_normed == !v[EC_POST_FFN_NORM].empty() && (!is_normed || layer.shape.n_ff != 0),
          "a norm stands behind experts, or behind a shared one that is absent");
}

// Check the convolutions around a block of a layer.
void ec_model::check_row_convolution(const RowConvolution &convolution) const {
  const int64_t n = config.n_embd, length = row_conv_length;
  require(length >= 0 && length <= MAX_CONVOLUTION, "the convolutions over rows are too long");
  require(length == 0 || (row_conv_group > 0 && n % row_conv_group == 0), "n_embd is no multiple of conv_group");
  require((int64_t)convolution.base.size() == 2 * length * n, "the base of kernels is missing or has another length");
  if (length != 0) require_matrix(convolution.kernels, "kernels", n_row_kernels(), n);
}

// Check the matrices and vectors of a layer with a recurrent state.
void ec_model::check_recurrence(const Layer &layer) const {
  const Matrix *m = layer.matrices;
  const std::vector<float> *v = layer.vectors;
  const int64_t n = recurrent.n_head, n_values = n * recurrent.n_value;
  require_matrix(m[EC_MIX], "ssm_mix", recurrent.n_column, config.n_embd);
  require_matrix(m[EC_MIX_GATE], "ssm_gate", n_values, config.n_embd);
  const bool is_space = config.state_rule == EC_RULE_SPACE, joined = !is_space && m[EC_MIX_BETA].n_rows == 0;
  require_matrix(m[EC_MIX_ALPHA], "ssm_alpha", joined ? 2 * n : n, config.n_embd);
  require(!is_space || m[EC_MIX_BETA].n_rows == 0, "there is ssm_beta, and the rule has none");
  if (m[EC_MIX_BETA].n_rows != 0) require_matrix(m[EC_MIX_BETA], "ssm_beta", n, config.n_embd);
  require_matrix(m[EC_MIX_OUT], "ssm_out", config.n_embd, n_values);
  require_vector(v[EC_ATTN_NORM], "attn_norm", config.n_embd, false);
  require_vector(v[EC_STATE_BIAS], "ssm_dt.bias", n, false);
  require_vector(v[EC_STATE_RATE], "ssm_a", n, false);
  for (float rate : v[EC_STATE_RATE]) require(rate <= 0, "a state would grow by itself");
  require_vector(v[EC_STATE_NORM], "ssm_norm", is_space ? n_values : recurrent.n_value, is_space);
  if (is_space) require_vector(v[EC_CONVOLUTION_BIAS], "ssm_conv1d.bias", recurrent.n_column, false);
  if (is_space) require_vector(v[EC_STATE_PASSED], "ssm_d", n, false);
  require_vector(v[EC_POST_ATTN_NORM], "post_attention_norm", config.n_embd, true);
}

// Check the attention or the convolution of a layer.
void ec_model::check_mixer(const Layer &layer) const {
  const ec_config &c = config;
  const Matrix *m = layer.matrices;
  const std::vector<float> *v = layer.vectors;
  if (!layer.mixes()) return;
  // What a layer has no place for would be multiplied beyond the place of what it has.
  const auto require_none = [&](bool holds, std::initializer_list<int> absent) {
    for (int i : absent) require(holds || m[i].n_rows == 0, "a layer has a matrix that its kind does not read");
  };
  require_none(layer.recurs(), {EC_MIX, EC_MIX_GATE, EC_MIX_ALPHA, EC_MIX_BETA, EC_MIX_OUT});
  require_none(n_q(layer) != 0, {EC_Q, EC_ATTN_OUT});
  require_none(n_kv(layer) != 0, {EC_K, EC_V});
  if (layer.recurs()) check_recurrence(layer);
  if (layer.recurs() && !layer.attends()) return;
  if (!layer.only_stores()) require_matrix(m[EC_Q], "attn_q", n_q(layer), n_input());
  if (n_kv(layer) != 0) {
    require_matrix(m[EC_K], "attn_k", n_kv(layer), n_input());
    if (c.value_norm == 0 || m[EC_V].n_rows != 0) require_matrix(m[EC_V], "attn_v", n_kv(layer), n_input());
  }
  if (!layer.only_stores())
    require_matrix(m[EC_ATTN_OUT], "attn_output", c.n_embd, layer.convolves() ? c.n_embd : layer.n_q());
  require_vector(v[EC_ATTN_NORM], "attn_norm", c.n_embd, !paired);
  require_vector(v[EC_EMBEDDING_NORM], "embedding_norm", c.n_embd, !paired);
  require_vector(v[EC_ATTN_OUT_BIAS], "attn_output.bias", c.n_embd, true);
  require_vector(v[EC_POST_ATTN_NORM], "post_attention_norm", c.n_embd, true);
  require(v[EC_ATTN_OUT_BIAS].empty() || v[EC_POST_ATTN_NORM].empty(), "the bias of attn_output stands before a norm");
  if (!layer.attends()) return;
  require(layer.unrotated || rope[rope_of(layer)].n_rot() <= layer.shape.head_dim, "more is rotated than a head has");
  require_vector(v[EC_Q_BIAS], "attn_q.bias", layer.n_q(), true);
  require_vector(v[EC_K_BIAS], "attn_k.bias", layer.n_kv(), true);
  require_vector(v[EC_V_BIAS], "attn_v.bias", layer.n_kv(), true);
  require_vector(v[EC_Q_NORM], "attn_q_norm", c.wide_norms ? layer.n_q() : layer.shape.head_dim, true);
  require_vector(v[EC_K_NORM], "attn_k_norm", c.wide_norms ? layer.n_kv() : layer.shape.head_dim, true);
  require(!c.wide_norms || (v[EC_Q_BIAS].empty() && v[EC_K_BIAS].empty()), "biases stand before norms over all heads");
  require_vector(v[EC_SINKS], "attn_sinks", layer.shape.n_head, true);
  require_vector(v[EC_DISTANCE_BIAS], "attn_rel_b", layer.shape.n_head * (2 * EC_MOST_DISTANCE + 1), true);
}

// Check the feed-forward block or the experts of a layer.
void ec_model::check_mlp(const Layer &layer) const {
  const Matrix *m = layer.matrices;
  if (!layer.has_mlp()) return;
  if (layer.has_experts()) check_experts(layer);
  if (const int64_t n_ff = layer.shape.n_ff; n_ff != 0) {
    require_gate(m[EC_GATE], "ffn_gate", n_ff);
    require_matrix(m[EC_UP], "ffn_up", n_ff, config.n_embd);
    require_matrix(m[EC_DOWN], "ffn_down", config.n_embd, n_ff);
  }
  require_vector(layer.vectors[EC_FFN_NORM], "ffn_norm", config.n_embd, true);
  require_vector(layer.vectors[EC_POST_FFN_NORM], "post_ffw_norm", config.n_embd, true);
  require_vector(layer.vectors[EC_LAYER_SCALE], "layer_output_scale", 1, true);
  require(layer.vectors[EC_LAYER_SCALE].empty() || !layer.vectors[EC_POST_FFN_NORM].empty(),
          "a layer is scaled behind a block without a norm");
}

// Check what makes of a token what the layers get of it, and what they make of that.
void ec_model::check_per_layer() const {
  const int64_t n = config.n_per_layer, n_all = n * config.n_layer;
  require(n >= 0 && n <= 1 << 17, "what a layer gets of a token is out of range");
  if (n == 0) return;
  require_matrix(per_layer.table, "per_layer_token_embd", (int64_t)config.n_layer * config.n_vocab, n);
  require_matrix(per_layer.projection, "per_layer_model_proj", n_all, config.n_embd);
  require_vector(per_layer.norm, "per_layer_proj_norm", n, false);
  for (const Layer &layer : layers) {
    require(layer.has_mlp(), "a layer gets something of a token, and has no feed-forward block");
    require_matrix(layer.matrices[EC_PER_LAYER_GATE], "inp_gate", n, config.n_embd);
    require_matrix(layer.matrices[EC_PER_LAYER_OUT], "proj", config.n_embd, n);
    require_vector(layer.vectors[EC_PER_LAYER_POST_NORM], "post_norm", config.n_embd, false);
  }
}

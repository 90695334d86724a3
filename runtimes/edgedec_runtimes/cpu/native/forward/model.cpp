#include "forward/model.h"

#include <math.h>

#include <algorithm>

#include "weights/tensor_types.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

void check_config(const ec_config &c) {
  require(c.n_vocab > 0 && c.n_embd > 0 && c.n_layer > 0, "a size of the model is not positive");
  require(c.n_vocab < 1 << 24 && c.n_embd <= 1 << 17 && c.n_layer <= 1 << 12, "a size of the model is out of range");
  require(c.n_embd % 16 == 0, "n_embd must be a multiple of 16");
  require(c.activation >= EC_SILU && c.activation <= EC_RELU2, "the activation of gates is none that is known");
  require(c.n_expert >= 0 && c.n_expert <= MAX_EXPERTS && c.n_expert_used >= (c.n_expert != 0) &&
              c.n_expert_used <= c.n_expert,
          "the experts are out of range");
  require(c.expert_gating != EC_GATING_RELU || c.n_expert_used == c.n_expert, "a token may not go through all experts");
  require(c.n_ff_expert >= 0 && c.n_ff_expert <= 1 << 20 && c.n_ff_expert % 32 == 0 &&
              (c.n_expert == 0 || c.n_ff_expert > 0),
          "the width of an expert is out of range, or no multiple of 32");
  require(c.n_expert == 0 || (isfinite(c.expert_scale) && c.expert_scale > 0),
          "the factor of experts is not a positive number");
  require(c.ungated == 0 || c.glu_limit == 0.0f, "gates have a limit, and there are none");
  require(c.glu_limit == 0.0f || (isfinite(c.glu_slope) && c.glu_slope > 0),
          "the slope of gates is not a positive number");
  require(c.attention_gate == 0 || c.wide_norms == 0, "gates of attention stand beside norms over all heads");
  require(!c.wide_norms || !c.norms_after_rope, "norms over all heads stand behind the rotation");
  require(c.norm_period >= 0, "the period of norms is negative");
  require(c.state_rule >= EC_RULE_NONE && c.state_rule <= EC_RULE_SPACE, "no such rule of a recurrence");
  if (c.state_rule != EC_RULE_NONE) {
    for (int32_t n : {c.n_state_head, c.n_state_key_head, c.n_state_key, c.n_state_value})
      require(n > 0 && n <= 1 << 12, "a size of the recurrent states is out of range");
    require(c.n_state_head % c.n_state_key_head == 0, "the heads of states are no multiple of the key heads");
  }
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
      layers((size_t)c.n_layer) {
  if (c.state_rule == EC_RULE_NONE) return;
  recurrent.n_head = c.n_state_head, recurrent.n_key_head = c.n_state_key_head;
  recurrent.n_key = c.n_state_key, recurrent.n_value = c.n_state_value;
  recurrent.n_column = 2 * c.n_state_key_head * c.n_state_key + c.n_state_head * c.n_state_value;
  recurrent.tiled = c.state_tiled != 0, recurrent.corrects = c.state_rule == EC_RULE_DELTA;
}

ec_session::ec_session(ec_model *owner, KVCache &&kv)
    : model(owner), cache(std::move(kv)), notes(0, 0, 0), columns({}, 0), states(RecurrentShape{}) {}

ec_session::ec_session(ec_model *owner, int32_t n_ctx, int32_t kv_type)
    : model(owner),
      cache(owner->kv_shape(kv_type), n_ctx),
      notes(owner->remembers() ? owner->config.n_layer : 0, owner->config.n_vocab, owner->config.n_embd),
      columns(owner->columns(), n_ctx),
      states(owner->n_states() > 0 ? owner->recurrent : RecurrentShape{}) {}

ec_session::ec_session(const ec_session &other, int32_t n_tokens)
    : model(other.model),
      cache(other.cache, n_tokens),
      notes(other.notes, n_tokens),
      columns(other.columns, n_tokens),
      states(other.states, n_tokens),
      adapter_scales(other.adapter_scales) {}

void Rope::fill(float *cos_sin, const int32_t *places) const {
  const size_t half = frequencies.size();
  for (size_t i = 0; i < half; ++i) {
    const int32_t position = axes.empty() ? places[0] : places[axes[i]];
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

void ec_model::set_layers(const ec_layer *shapes) {
  for (size_t i = 0; i < layers.size(); ++i) {
    Layer &layer = layers[i];
    const ec_layer &l = layer.shape = shapes[i];
    require(l.role >= EC_ROLE_ALL && l.role < EC_N_ROLES && (l.role == EC_ROLE_ALL) == (shapes[0].role == EC_ROLE_ALL) &&
                (l.role == EC_ROLE_ALL || l.mixer == EC_MIXER_ATTENTION),
            "no such role of a layer, or not of all layers");
    require(l.mixer >= EC_MIXER_NONE && l.mixer <= EC_MIXER_BOTH, "no such mixer");
    require(!layer.recurs() || config.state_rule != EC_RULE_NONE, "a layer has a state, and the model has no rule");
    require(l.n_ff >= 0 && l.n_ff <= 1 << 20, "the width of a layer is out of range");
    layer.slides = (l.flags & EC_LAYER_SLIDES) != 0, layer.unrotated = (l.flags & EC_LAYER_UNROTATED) != 0;
    require(!layer.slides || config.sliding_window > 0, "a layer slides, and there is no sliding window");
    if (!layer.attends()) {  // these sizes say nothing then, and nothing may be as large as they are
      layer.shape.n_head = layer.shape.n_head_kv = layer.shape.head_dim = 0;
      continue;
    }
    require(l.n_head > 0 && l.n_head <= 1 << 12 && l.n_head_kv > 0 && l.head_dim > 0 && l.head_dim <= 1 << 12,
            "a size of a layer is out of range");
    require(l.n_head % l.n_head_kv == 0, "the heads are no multiple of the key-value heads");
    require(l.head_dim % 16 == 0, "head_dim must be a multiple of 16");
    if (l.kv_from == EC_KV_OF_TARGET) {
      read_target(layer);
      continue;
    }
    require(l.kv_from >= 0 && l.kv_from <= (int32_t)i, "a layer reads the keys and values of a later one");
    const ec_layer &source = layers[(size_t)l.kv_from].shape;
    require(layers[(size_t)l.kv_from].attends() && source.kv_from == l.kv_from && source.n_head_kv == l.n_head_kv &&
                source.head_dim == l.head_dim,
            "a layer reads keys and values of another shape");
    require(source.role == (l.role == EC_ROLE_CROSS ? EC_ROLE_MEMORY : l.role) &&
                (l.role == EC_ROLE_ALL || l.role == EC_ROLE_CROSS || l.kv_from == (int32_t)i),
            "a layer reads the keys and values of another role");
    layer.stores_kv = l.kv_from == (int32_t)i;
  }
}

// Let a layer of a draft head read what the target's last layer of its kind reads.
void ec_model::read_target(Layer &layer) const {
  require(of_head && layer.shape.role == EC_ROLE_CROSS, "only a draft head's layers read those of another model");
  require(!layer.slides || config.sliding_window > 1, "a window leaves nothing to see");
  const std::vector<Layer> &others = ahead_from->layers;
  const auto source = std::find_if(others.rbegin(), others.rend(), [&](const Layer &other) {
    return other.attends() && other.slides == layer.slides;
  });
  require(source != others.rend(), "the target has no layer with a window, or none without");
  require(source->shape.n_head_kv == layer.shape.n_head_kv && source->shape.head_dim == layer.shape.head_dim,
          "a layer reads keys and values of another shape than the target's");
  layer.number = source->number;
}

// Number the layers among those that store the same.
void ec_model::number_layers() {
  int32_t n_stored[EC_N_ROLES] = {}, n_convolutions = 0;
  for (Layer &layer : layers) {
    if (layer.recurs()) {
      layer.state = recurrent.n_layer();
      recurrent.layers.push_back((int32_t)(&layer - layers.data()));
    }
    if (layer.convolves()) layer.number = n_convolutions++;
    if (layer.stores_kv) layer.number = n_stored[layer.shape.role]++;
    if (layer.attends() && layer.shape.kv_from >= 0) layer.number = layers[(size_t)layer.shape.kv_from].number;
  }
}

KVShape ec_model::kv_shape(int32_t kv_type) const {
  std::vector<KVShape::Heads> stored;
  // Keys are stored without their bias where the bias is one vector, which only rotation changes: not with a norm after
  // it.
  bool biased = false, normed = false;
  for (const Layer &layer : layers) {
    if (elsewhere || !layer.stores_kv) continue;
    if (layer.number == (int32_t)stored.size()) stored.push_back({layer.shape.n_head_kv, layer.shape.head_dim});
    const KVShape::Heads &heads = stored[(size_t)layer.number];
    require(heads.n_head_kv == layer.shape.n_head_kv && heads.head_dim == layer.shape.head_dim,
            "layers that store in one place differ in shape");
    require(kv_type == EC_KV_F16 || (layer.shape.head_dim % 32 == 0 && layer.shape.head_dim <= MAX_PACKED_HEAD),
            "keys and values of less than 16 bits need a head_dim that is a multiple of 32 and at most 512");
    biased = biased || !layer.vectors[EC_K_BIAS].empty();
    normed = normed || layer.slides || !layer.vectors[EC_K_NORM].empty();
  }
  const bool apart = kv_type != EC_KV_F16 && biased && !normed;
  return {stored, kv_type, apart ? rope[0].n_rot() : 0};
}

// Check the kernels of a layer's convolution, and lay them out as [length][elements of a column].
void ec_model::finish_convolution(Layer &layer) {
  std::vector<float> &kernels = layer.vectors[EC_CONVOLUTION];
  const size_t n = (size_t)(layer.recurs() ? recurrent.n_column : config.n_embd), length = kernels.size() / n;
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

ColumnShape ec_model::columns() const {
  const int32_t n =
      (int32_t)std::count_if(layers.begin(), layers.end(), [](const Layer &layer) { return layer.convolves(); });
  return {elsewhere ? 0 : n, config.n_embd, convolution_length - 1};
}

// Make the memory of layers with a recurrent state.
void ec_model::finish_recurrence() {
  const RecurrentShape &r = recurrent;
  const size_t rows = (size_t)max_rows;
  recurrent.n_back = convolution_length - 1;
  query_weight.assign((size_t)r.n_key, 1.0f / (float)r.n_key);
  key_weight.assign((size_t)r.n_key, 1.0f / sqrtf((float)r.n_key));
  mix.resize(rows * (size_t)most([](const Layer &layer) { return layer.mix_width; }));
  records.resize(rows * (size_t)r.record_floats());
  queries.resize(rows * (size_t)(r.n_key_head * r.n_key));
  gains.resize(rows * (size_t)r.n_head);
  scanned.resize(rows * (size_t)(r.n_head * r.n_lanes()));
  if (config.state_rule == EC_RULE_SPACE) convolved_rows.resize(rows * (size_t)r.n_column);
}

void ec_model::finish() {
  const ec_config &c = config;
  if (!of_head) require_matrix(token_embd, "token_embd", c.n_vocab, c.n_embd);
  require(streamer.complete(), "matrices have places in a file, but no streaming was set up");
  if (output.n_rows == 0) output = token_embd;
  require_matrix(output, "output", c.n_vocab, c.n_embd);
  require_vector(output_norm, "output_norm", c.n_embd, of_head);
  const auto rotates = [](const Layer &layer) { return layer.attends() && !layer.unrotated; };
  require(!rope[0].frequencies.empty() || std::none_of(layers.begin(), layers.end(), rotates),
          "the frequencies of rotations are missing");
  number_layers();
  check_per_layer();
  // normed, attended, gated, pairs, those that experts read, and their gated, convolved, per_layer.gated, mixed, early
  bool quantized[10] = {}, floats[10] = {};
  const auto note = [&](int which, const Matrix &m) {
    if (m.n_rows == 0) return;
    (is_float_type(m.type) ? floats : quantized)[which] = true;
    floats[which] = floats[which] || adapters.of(&m) != nullptr;
  };
  note(0, output);
  note(0, per_layer.projection);
  for (Layer &layer : layers) {
    const Matrix *m = layer.matrices;
    if (layer.convolves() || layer.recurs()) finish_convolution(layer);
    if (layer.slides) layer.window = c.sliding_window;
    check_mixer(layer);
    check_mlp(layer);
    for (int i : {EC_Q, EC_K, EC_V}) note(paired ? 3 : 0, m[i]);
    for (int i : {EC_MIX, EC_MIX_GATE, EC_MIX_ALPHA, EC_MIX_BETA}) {
      note(0, m[i]);
      layer.mix_width += m[i].n_rows;
    }
    note(8, m[EC_MIX_OUT]);
    for (int i : {EC_GATE, EC_UP, EC_SHARED_ROUTER, EC_GATE_EXPERTS, EC_UP_EXPERTS}) note(0, m[i]);
    note(c.early_router ? 9 : 0, m[EC_ROUTER]);
    for (int i : {EC_GATE_EXPERTS, EC_UP_EXPERTS}) note(4, m[i]);
    note(layer.convolves() ? 6 : 1, m[EC_ATTN_OUT]);
    for (const RowConvolution *convolution : {&layer.around_attention, &layer.around_ffn}) {
      check_row_convolution(*convolution);
      note(0, convolution->kernels);
    }
    note(2, m[EC_DOWN]);
    note(0, m[EC_PER_LAYER_GATE]);
    note(7, m[EC_PER_LAYER_OUT]);
    note(5, m[EC_DOWN_EXPERTS]);
  }
  for (const Layer &layer : layers)  // rows of all layers become blocks of 32 where those of one do
    require((!quantized[1] || layer.n_q() % 32 == 0) && (!quantized[2] || layer.shape.n_ff % 32 == 0),
            "a layer's weights have blocks of 32, and the width of another layer is no multiple of 32");
  const size_t rows = (size_t)max_rows;
  const int64_t most_q = most([](const Layer &layer) { return layer.n_q(); });
  x.resize(rows * (size_t)c.n_embd);
  branch.resize(rows * (size_t)c.n_embd);
  const bool has_norms_beside = std::any_of(layers.begin(), layers.end(), [](const Layer &layer) {
    return !layer.vectors[EC_POST_SHARED_NORM].empty();
  });
  if (has_norms_beside) beside.resize(rows * (size_t)c.n_embd);
  ones.assign((size_t)most([](const Layer &layer) { return layer.shape.head_dim; }), 1.0f);
  if (c.n_per_layer != 0) {
    per_layer.rows.resize(rows * (size_t)(c.n_layer * (int64_t)c.n_per_layer));
    per_layer.inputs.resize(per_layer.rows.size());
    per_layer.gates.resize(rows * (size_t)c.n_per_layer);
    per_layer.gated = ActivationBuffer(max_rows, c.n_per_layer, quantized[7], floats[7]);
  }
  if (row_conv_length != 0) entering.resize(rows * (size_t)c.n_embd);
  kernels_of_rows.resize(rows * (size_t)n_row_kernels());
  qkv.resize(rows * (size_t)most([&](const Layer &layer) { return n_q(layer) + 2 * n_kv(layer); }));
  attention.resize(rows * (size_t)most_q);
  for (int i = 0; i < 2; ++i) cos_sin[i].resize(rows * (size_t)rope[i].n_rot());
  normed = ActivationBuffer(max_rows, c.n_embd, quantized[0], floats[0]);
  for (int i = 0; i < pool.size(); ++i) own_normed.emplace_back(GROUP_ROWS, c.n_embd, quantized[0], floats[0]);
  attended = ActivationBuffer(max_rows, most_q, quantized[1], floats[1]);
  if (columns().n_conv > 0) convolved = ActivationBuffer(max_rows, c.n_embd, quantized[6], floats[6]);
  gated = ActivationBuffer(max_rows, most([](const Layer &layer) { return layer.shape.n_ff; }), quantized[2],
                           floats[2]);
  if (c.early_router) early = ActivationBuffer(max_rows, c.n_embd, quantized[9], floats[9]);
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
  if (recurrent.n_layer() > 0) {
    finish_recurrence();
    mixed = ActivationBuffer(max_rows, recurrent.n_head * (int64_t)recurrent.n_value, quantized[8], floats[8]);
  }
  if (paired) pairs = ActivationBuffer(max_rows, n_input(), quantized[3], floats[3]);
  adapters.finish(max_rows);
  thread_memory.resize((size_t)pool.size());
  speeds.assign((size_t)pool.size(), 1.0);
  finished = true;
}

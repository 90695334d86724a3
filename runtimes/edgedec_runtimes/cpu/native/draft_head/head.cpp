// The weights of a draft head, and what all kinds of heads make of them.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "draft_head/block_state.h"
#include "draft_head/exit_state.h"
#include "draft_head/pair_state.h"
#include "draft_head/products.h"
#include "draft_head/reading_state.h"
#include "draft_head/row_state.h"
#include "weights/tiles.h"

using namespace edgedec;

namespace {

constexpr int32_t MOST_LAYERS = 64;

ec_config net_config(const ec_draft_head_config &h) {
  require(h.block_size >= 0 && h.block_size <= EC_MOST_BLOCK, "the rows of a block are out of range");
  require(h.n_layer >= 1 && h.n_layer <= (h.block_size == 0 ? 1 : MOST_LAYERS), "the head's layers are out of range");
  ec_config c{};
  c.n_vocab = h.n_vocab, c.n_embd = h.n_embd, c.n_layer = h.n_layer;
  c.rms_epsilon = h.rms_epsilon, c.embedding_scale = c.residual_scale = c.logit_scale = 1.0f;
  c.attention_scale = h.head_dim > 0 ? 1.0f / sqrtf((float)h.head_dim) : 1.0f;
  if (h.block_size > 0) c.logit_scale = h.logit_scale, c.logit_softcap = h.logit_softcap;
  return c;
}

}  // namespace

ec_draft_head::ec_draft_head(ec_model &model, const ec_draft_head_config &c, const ec_config *layers,
                             const int32_t *tapped, const int32_t *drafted, const int32_t *windows)
    : target(model),
      config(c),
      joins(layers != nullptr),
      net(joins ? *layers : net_config(c), model.pool.size(), model.max_rows, model.kernels) {
  net.of_head = true;
  net.ahead_from = &model;
  require(!joins || (c.block_size == 0 && net.config.n_embd == c.n_embd && net.config.n_vocab == c.n_vocab &&
                     (c.reads_target != 0 || net.config.n_layer == c.n_layer)),
          "the layers of a head that joins pairs have other sizes than the head");
  net.paired = c.block_size == 0 && !joins && c.exit_layer == 0;
  net.normed_residual = c.norm_before_residual != 0;
  if (c.block_size > 0) net.row_conv_length = c.conv_length, net.row_conv_group = c.conv_group;
  const bool has_rows = c.n_rows_made > 0;
  made.n = c.n_rows_made, made.layer = c.rows_layer;
  require(made.n >= 0 && made.n <= EC_MOST_BLOCK, "the rows of a head are out of range");
  require((c.block_size > 0) + joins + has_rows + (c.exit_layer != 0) <= 1, "the head is of several kinds");
  require(joins || c.reads_target == 0, "only joined pairs read the target's keys and values");
  require(c.n_ff > 0 || joins || has_rows || c.exit_layer > 0, "the head has no feed-forward block");
  std::vector<ec_layer> shapes;
  for (int32_t i = 0; i < c.n_layer; ++i)
    shapes.push_back({0, EC_MIXER_ATTENTION, c.n_head, c.n_head_kv, c.head_dim, c.n_ff, i, EC_ROLE_ALL});
  if (!joins && !has_rows) net.set_layers(shapes.data());
  require(model.finished, "the head's target is not finished");
  require(c.n_taps >= (has_rows ? 0 : 1) && c.n_taps <= 16, "the number of taps is out of range");
  require(c.fc_norm >= EC_FC_NORM_NONE && c.fc_norm <= EC_FC_NORM_EACH, "no such norm before fc");
  for (int32_t i = 0; i < c.n_taps; ++i)
    require(tapped[i] >= 0 && tapped[i] <= model.config.n_layer, "a tap is out of range");
  for (int32_t i = 0; i < c.n_vocab; ++i)
    require(drafted[i] >= 0 && drafted[i] < model.config.n_vocab, "a drafted token is out of range");
  for (int32_t i = 0; windows != nullptr && i < c.n_layer; ++i) {
    require(windows[i] >= 0, "a window is negative");
    net.layers[(size_t)i].window = windows[i];
  }
  taps.assign(tapped, tapped + c.n_taps);
  tokens.assign(drafted, drafted + c.n_vocab);
}

ec_draft_head::~ec_draft_head() = default;

void ec_draft_head::finish() {
  if (made.n > 0) return finish_rows();
  if (config.exit_layer != 0) return finish_exit();
  const bool own = embedding.n_rows != 0;
  check_inputs();
  if (own) require_head_matrix(embedding, "embedding", target.config.n_vocab, config.n_embd);
  require(own || config.reads_target != 0 || config.n_embd == target.config.n_embd,
          "the target's embeddings have another length");
  require(own || !target.elsewhere || target.look_up != nullptr, "the target's embeddings are not there");
  require(config.fc_norm == EC_FC_NORM_NONE ? fc_norm.empty() : (int64_t)fc_norm.size() == n_tapped(),
          "the vector fc_norm is missing or has another length");
  set_rope();
  if (net.output.n_rows == 0) take_output();
  if (!net.finished) net.finish();
  const auto buffer = [&](const Matrix &m) {
    return ActivationBuffer(net.max_rows, m.n_cols, !is_float_type(m.type), is_float_type(m.type));
  };
  joined_ = buffer(fc);
  pairs_ = buffer(joint);
  normed_.resize((size_t)n_tapped());
  if (!own) embedding_scale_ = target.config.embedding_scale;
  if (config.block_size > 0) {
    embedding_scale_ = config.embedding_scale;
    block_ = std::make_unique<BlockHead>(*this);
  }
  finished = true;
}

// Set how queries and keys of the head's own layers are rotated.
void ec_draft_head::set_rope() {
  require(isfinite(config.rope_base) && config.rope_base > 0, "the head's rope_base is not a positive number");
  require(rope_divisors.empty() || (int32_t)rope_divisors.size() == config.head_dim / 2,
          "the divisors of the head's frequencies are of another number");
  for (int32_t i = 0; !joins && i < config.head_dim / 2; ++i) {
    const double divisor = rope_divisors.empty() ? 1.0 : rope_divisors[(size_t)i];
    net.rope[0].frequencies.push_back(pow(config.rope_base, -2.0 * i / config.head_dim) / divisor);
  }
}

// Check that rows of a forward may pass different layers of the target.
void ec_draft_head::check_target() const {
  require(!target.remembers() && target.config.n_per_layer == 0 && !target.elsewhere,
          "rows can't pass a part of this model's layers: they have states, read tokens or are elsewhere");
}

// Finish a head that sees what leaves the target's first layers.
void ec_draft_head::finish_exit() {
  const int32_t n_layer = target.config.n_layer;
  require(config.n_embd == target.config.n_embd && config.exit_layer > 0 && config.exit_layer < n_layer,
          "the head leaves another model early");
  require(taps.size() == 1 && taps[0] == config.exit_layer, "the head reads other states than those of its exit");
  check_target();
  below.assign((size_t)n_layer, 0);
  std::fill_n(below.begin(), config.exit_layer, 1);
  set_rope();
  if (net.output_norm.empty()) net.output_norm = target.output_norm;
  if (net.output.n_rows == 0) take_output();
  net.finish();
  finished = true;
}

// Finish a head whose rows go through the target's layers.
void ec_draft_head::finish_rows() {
  const ec_config &c = target.config;
  const int64_t n = c.n_embd, width = made.n * n;
  require(config.n_embd == n && made.layer >= 0 && made.layer < c.n_layer, "the head's rows are of another model");
  check_target();
  require_head_matrix(made.matrix, "rows", made.matrix.n_rows == 0 ? 0 : width, n);
  for (const std::vector<float> *vector : {&made.kept, &made.base})
    require(vector->empty() || (int64_t)vector->size() == width, "a vector of the head's rows has another length");
  require(!made.base.empty() || made.matrix.n_rows != 0, "the head's rows are made of nothing");
  if (net.output.n_rows == 0) take_output();
  require_head_matrix(net.output, "output", config.n_vocab, n);
  const auto buffer = [&](const Matrix &m) {
    return ActivationBuffer(target.max_rows, n, !is_float_type(m.type), is_float_type(m.type));
  };
  made.sources = buffer(made.matrix), made.to_output = buffer(net.output);
  finished = true;
}

// Check what makes features of taps, and what joins them with embeddings.
void ec_draft_head::check_inputs() const {
  if (config.reads_target != 0) return check_reading();
  if (fc.n_rows != 0 || !joins) require_head_matrix(fc, "fc", config.n_embd, n_tapped());
  require(fc.n_rows != 0 || n_tapped() == config.n_embd, "features that are no product have another length than taps");
  require_head_matrix(joint, "joint", joins ? config.n_embd : 0, joins ? 2 * (int64_t)config.n_embd : 0);
  for (const std::vector<float> *norm : {&embedding_norm, &feature_norm})
    require((int64_t)norm->size() == (joins ? config.n_embd : 0), "a norm of joined pairs is missing or not used");
  const bool norms = (config.block_size == 0 && config.feeds_back_normed) || net.config.norm_period != 0;
  require(!norms || !net.output_norm.empty(), "the head's outputs are fed back normed, and it has no output norm");
}

// Check what joins embeddings and features of the target's, and what makes features of the head's own states.
void ec_draft_head::check_reading() const {
  const int64_t n = config.n_embd, n_target = target.config.n_embd;
  require_head_matrix(joint, "joint", n, 2 * n_target);
  require_head_matrix(fc, "fc", n_target, n);
  require(embedding.n_rows == 0 && taps.size() == 1 && taps[0] == target.config.n_layer,
          "the head reads other states than what leaves the target, or embeddings of its own");
  require(embedding_norm.empty() && feature_norm.empty() && !net.output_norm.empty(),
          "a norm of joined pairs is not used, or the one behind the layers is missing");
  for (const Layer &layer : net.layers)
    require(layer.shape.kv_from == EC_KV_OF_TARGET, "a layer of the head has keys and values of its own");
}

// Take the first rows of the target's output matrix where they are those of the tokens that the head drafts.
void ec_draft_head::take_output() {
  for (size_t i = 0; i < tokens.size(); ++i)
    require(tokens[i] == (int32_t)i, "the head has no output matrix, and its tokens are not the first of the target's");
  require(target.output.tiles != nullptr && target.config.n_embd == config.n_embd,
          "the target's output matrix is not in memory, or has rows of another length");
  net.output = target.output;
  net.output.n_rows = config.n_vocab;
}

std::shared_ptr<DraftHeadState> ec_draft_head::follow(int32_t n_ctx) {
  if (made.n > 0) return std::make_shared<RowState>(*this, n_ctx);
  if (config.exit_layer != 0) return std::make_shared<ExitState>(*this, n_ctx);
  if (config.reads_target != 0) return std::make_shared<ReadingState>(*this, n_ctx);
  if (block_) return std::make_shared<BlockState>(*this, n_ctx);
  return std::make_shared<PairState>(*this, n_ctx);
}

void ec_draft_head::run(const ec_item *items, int32_t n_items, float *out) {
  if (forward(net, items, n_items, out, nullptr, nullptr) != Outcome::done)
    throw NotFinite("the draft head's scores are not finite");
}

void ec_draft_head::embed(const int32_t *tokens, int32_t n, float *out, int64_t stride) {
  const bool own = embedding.n_rows != 0;
  const int32_t n_embd = own ? config.n_embd : target.config.n_embd;
  if (!own && target.elsewhere && target.look_up(tokens, n, out, stride) != EC_OK)
    throw Unreadable("the embeddings that the draft head borrows can't be read");
  for (int32_t i = 0; i < n; ++i, out += stride) {
    if (own) tile_row(embedding.type, n_embd, embedding.tiles, tokens[i], out);
    else if (target.streamer.started()) target.streamer.embed(tokens[i], out);
    else if (target.row_file.is_open()) target.row_file.read(tokens[i], out);
    else if (!target.elsewhere)
      tile_row(target.token_embd.type, n_embd, target.token_embd.tiles, tokens[i], out);
    if (embedding_scale_ != 1.0f)
      for (int32_t j = 0; j < n_embd; ++j) out[j] *= embedding_scale_;
  }
}

void ec_draft_head::fuse(const std::vector<Made> &rows) {
  const Kernels &k = *net.kernels;
  const int64_t n = (int64_t)rows.size(), width = fc.n_rows == 0 ? n_tapped() : fc.n_cols,
                piece = config.fc_norm == EC_FC_NORM_EACH ? target.config.n_embd : width;
  for (int64_t i = 0; i < n; ++i) {
    const float *row = rows[(size_t)i].of;
    if (config.fc_norm != EC_FC_NORM_NONE)
      for (int64_t at = 0; at < width; at += piece)
        k.rms_norm(row + at, fc_norm.data() + at, config.rms_epsilon, piece, normed_.data() + at);
    if (config.fc_norm != EC_FC_NORM_NONE) row = normed_.data();
    if (fc.n_rows == 0) memcpy(rows[(size_t)i].out, row, (size_t)width * sizeof(float));
    else k.quantize(joined_.view(), i, 0, width, row);
  }
  if (fc.n_rows == 0) return;
  multiply(net.pool, k, {&fc}, joined_.view(), n,
           [&](size_t, int64_t row, int64_t column, const float *products, int64_t count) {
             memcpy(rows[(size_t)row].out + column, products, (size_t)count * sizeof(float));
           });
}

void ec_draft_head::join(const std::vector<Made> &pairs) {
  const Kernels &k = *net.kernels;
  const int64_t d = joint.n_cols / 2, n = (int64_t)pairs.size();
  std::vector<float> normed((size_t)(2 * d));
  for (int64_t i = 0; i < n; ++i) {
    if (embedding_norm.empty()) {
      k.quantize(pairs_.view(), i, 0, 2 * d, pairs[(size_t)i].of);
      continue;
    }
    k.rms_norm(pairs[(size_t)i].of, embedding_norm.data(), config.rms_epsilon, d, normed.data());
    k.rms_norm(pairs[(size_t)i].of + d, feature_norm.data(), config.rms_epsilon, d, normed.data() + d);
    k.quantize(pairs_.view(), i, 0, 2 * d, normed.data());
  }
  multiply(net.pool, k, {&joint}, pairs_.view(), n,
           [&](size_t, int64_t row, int64_t column, const float *products, int64_t count) {
             memcpy(pairs[(size_t)row].out + column, products, (size_t)count * sizeof(float));
           });
}

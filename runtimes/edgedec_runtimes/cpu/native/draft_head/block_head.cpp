#include "draft_head/block_head.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>

#include "draft_head/products.h"
#include "kernels/row.h"
#include "weights/tiles.h"

namespace edgedec {
namespace {

constexpr int32_t MOST_RANK = 1 << 14;

void require_length(const std::vector<float> &v, const char *name, int64_t n) {
  require((int64_t)v.size() == n, std::string("the head's vector ") + name + " is missing, has another length or is "
                                  "not used");
}

ActivationBuffer buffer_for(const std::vector<const Matrix *> &matrices, int64_t rows) {
  bool quantized = false, floats = false;
  for (const Matrix *m : matrices)
    if (m->n_rows > 0) (is_float_type(m->type) ? floats : quantized) = true;
  return ActivationBuffer(rows, matrices[0]->n_cols, quantized, floats);
}

float sigmoid(double x) { return (float)(1.0 / (1.0 + exp(-x))); }

double dot(const float *x, const float *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += (double)x[i] * y[i];
  return sum;
}

}  // namespace

BlockHead::BlockHead(ec_draft_head &head) : head_(head), w_(head.of_block), k_(*head.net.kernels) {
  const ec_draft_head_config &c = config();
  const int64_t d = c.n_embd, rank = c.rank, n_target = head.target.config.n_vocab;
  require(c.markov >= EC_MARKOV_NONE && c.markov <= EC_MARKOV_SELECTOR, "no such form of the scores");
  const bool selects = c.markov == EC_MARKOV_SELECTOR, gated = c.markov == EC_MARKOV_GATED,
             rnn = c.markov == EC_MARKOV_RNN, looks_back = c.markov != EC_MARKOV_NONE;
  require(looks_back ? rank >= 1 && rank <= MOST_RANK : rank == 0, "the rank is out of range");
  require(selects ? c.top_k >= 1 : c.top_k == 0, "the tokens to select are out of range");
  require(c.mask_token >= -1 && c.mask_token < n_target, "the mask is no token");
  require(n_drafts() >= 1, "the block drafts nothing");
  require(isfinite(c.embedding_scale) && c.embedding_scale > 0, "the factor of embeddings is not a positive number");
  require(head.net.max_rows >= c.block_size, "a forward takes fewer rows than a block has");
  require_head_matrix(w_.markov_w1, "markov_w1", looks_back ? n_target : 0, rank);
  require_head_matrix(w_.markov_w2, "markov_w2", selects ? n_target : looks_back ? c.n_vocab : 0, rank);
  require_head_matrix(w_.markov_gate, "markov_gate", gated || selects ? rank : 0, gated ? d + rank : d);
  require_head_matrix(w_.markov_joint, "markov_joint", rnn ? 3 * rank : 0, 2 * rank + d);
  require_length(w_.feature_norm, "hidden_norm", d);
  require_length(w_.mask, "mask", c.mask_token < 0 ? d : 0);
  require_length(w_.markov_gate_bias, "markov_gate_bias", gated ? rank : 0);
  require_length(w_.markov_joint_bias, "markov_joint_bias", rnn ? 3 * rank : 0);
  require_length(w_.confidence_bias, "confidence_bias", is_confident() ? 1 : 0);
  require_length(w_.confidence, "confidence", is_confident() ? d + rank : 0);
  for (Layer &layer : head.net.layers)
    for (int which : {EC_K, EC_V}) keys_and_values_.push_back(&layer.matrices[which]);
  context_ = buffer_for(keys_and_values_, head.net.max_rows);
  if (gated || selects || rnn) joined_ = buffer_for({rnn ? &w_.markov_joint : &w_.markov_gate}, head.net.max_rows);
  if (looks_back && !selects) biases_ = buffer_for({&w_.markov_w2}, head.net.max_rows);
}

bool BlockHead::reads_hidden() const {
  return is_confident() || config().markov >= EC_MARKOV_GATED;
}

const float *BlockHead::mask() {
  if (mask_.empty()) {
    std::vector<float> row((size_t)config().n_embd);
    if (config().mask_token >= 0) head_.embed(&config().mask_token, 1, row.data(), config().n_embd);
    else for (size_t i = 0; i < row.size(); ++i) row[i] = w_.mask[i] * config().embedding_scale;
    mask_ = std::move(row);
  }
  return mask_.data();
}

void BlockHead::norm(const float *row, float *out) const {
  const std::vector<float> &weight = head_.net.output_norm;
  if (weight.empty()) memcpy(out, row, (size_t)config().n_embd * sizeof(float));
  else k_.rms_norm(row, weight.data(), config().rms_epsilon, config().n_embd, out);
}

// All layers read the same features, without a norm of their own, so that their matrices are multiplied together.
void BlockHead::read_context(const std::vector<ContextRow> &rows) {
  const int64_t n = (int64_t)rows.size(), d = config().n_embd, hd = config().head_dim,
                n_layer = config().n_layer, width = n_layer * 2 * n_kv_;
  const int32_t n_heads = config().n_head_kv;
  Pool &pool = head_.net.pool;
  features_.resize((size_t)(n * d)), kv_.resize((size_t)(n * width)), cos_sin_.resize((size_t)(n * hd));
  std::vector<ec_draft_head::Made> fused;
  for (int64_t r = 0; r < n; ++r) fused.push_back({rows[(size_t)r].taps, features_.data() + r * d});
  head_.fuse(fused);
  each(pool, (n + GROUP_ROWS - 1) / GROUP_ROWS, [&](int64_t group) {
    std::vector<float> normed((size_t)d);
    for (int64_t r = group * GROUP_ROWS; r < std::min(n, (group + 1) * GROUP_ROWS); ++r) {
      k_.rms_norm(features_.data() + r * d, w_.feature_norm.data(), config().rms_epsilon, d, normed.data());
      k_.quantize(context_.view(), r, 0, d, normed.data());
      head_.net.rope[0].fill(cos_sin_.data() + r * hd, &rows[(size_t)r].slot);
    }
  });
  multiply(pool, k_, keys_and_values_, context_.view(), n,
           [&](size_t m, int64_t row, int64_t column, const float *products, int64_t count) {
             memcpy(kv_.data() + row * width + (int64_t)m * n_kv_ + column, products, (size_t)count * sizeof(float));
           });
  each(pool, (n + KEY_BLOCK - 1) / KEY_BLOCK * n_layer * n_heads, [&](int64_t piece) {
    std::vector<float> memory((size_t)hd);
    const int32_t head = (int32_t)(piece % n_heads), layer = (int32_t)(piece / n_heads % n_layer);
    const int64_t first = piece / n_heads / n_layer * KEY_BLOCK;
    for (int64_t r = first; r < std::min(n, first + KEY_BLOCK); ++r) {
      float *keys = kv_.data() + r * width + layer * 2 * n_kv_ + head * hd;
      write_head(rows[(size_t)r], keys, keys + n_kv_, cos_sin_.data() + r * hd, layer, head, memory.data());
    }
  });
}

// Write the keys and values of one layer and head, as a forward does (Run::write_head).
void BlockHead::write_head(const ContextRow &row, float *keys, const float *values, const float *cos_sin,
                           int32_t layer, int32_t head, float *memory) {
  const std::vector<float> &norm = head_.net.layers[(size_t)layer].vectors[EC_K_NORM];
  const int32_t hd = config().head_dim;
  if (!norm.empty()) {
    k_.rms_norm(keys, norm.data(), config().rms_epsilon, hd, memory);
    memcpy(keys, memory, (size_t)hd * sizeof(float));
  }
  k_.rope(keys, cos_sin, hd, false);
  row.cache->write(k_, layer, head, row.slot, keys, values);
}

void BlockHead::score(const std::vector<Slot> &slots) {
  const int64_t n = (int64_t)slots.size(), rank = config().rank, n_vocab = config().n_vocab;
  embeddings_.resize((size_t)(n * rank));
  for (int64_t i = 0; i < n; ++i) {
    const Slot &slot = slots[(size_t)i];
    float *embedding = embeddings_.data() + i * rank;
    if (rank > 0) tile_row(w_.markov_w1.type, rank, w_.markov_w1.tiles, slot.token, embedding);
    if (is_confident() && slot.sure != nullptr) *slot.sure = chance(slot, embedding);
  }
  if (config().markov == EC_MARKOV_SELECTOR) return select(slots);
  if (config().markov == EC_MARKOV_GATED) gate(slots);
  if (config().markov == EC_MARKOV_RNN) carry_on(slots);
  if (config().markov == EC_MARKOV_NONE) {
    for (const Slot &slot : slots) memcpy(slot.scores, slot.made, (size_t)n_vocab * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; ++i) k_.quantize(biases_.view(), i, 0, rank, embeddings_.data() + i * rank);
  std::atomic<bool> finite{true};
  multiply(head_.net.pool, k_, {&w_.markov_w2}, biases_.view(), n,
           [&](size_t, int64_t row, int64_t column, const float *products, int64_t count) {
             float *scores = slots[(size_t)row].scores + column;
             memcpy(scores, slots[(size_t)row].made + column, (size_t)count * sizeof(float));
             k_.add(scores, products, 1.0f, count);
             if (!all_finite(scores, count)) finite.store(false, std::memory_order_relaxed);
           });
  if (!finite) throw NotFinite("the draft head's scores are not finite");
}

// Return the confidence: the chance that a row's draft is accepted where all before it are.
float BlockHead::chance(const Slot &slot, const float *embedding) const {
  const int64_t d = config().n_embd;
  const float *weights = w_.confidence.data();
  return sigmoid(dot(weights, slot.hidden, d) + dot(weights + d, embedding, config().rank) + w_.confidence_bias[0]);
}

// Multiply what is in joined_ with a matrix, and add its bias, if it has one.
void BlockHead::join(const std::vector<Slot> &slots, const Matrix &matrix, const std::vector<float> &bias) {
  mixed_.resize(slots.size() * (size_t)matrix.n_rows);
  multiply(head_.net.pool, k_, {&matrix}, joined_.view(), (int64_t)slots.size(),
           [&](size_t, int64_t row, int64_t column, const float *products, int64_t count) {
             for (int64_t i = column; i < column + count; ++i)
               mixed_[(size_t)(row * matrix.n_rows + i)] =
                   products[i - column] + (bias.empty() ? 0.0f : bias[(size_t)i]);
           });
}

// Multiply embeddings by the gates of [hidden; embedding].
void BlockHead::gate(const std::vector<Slot> &slots) {
  const size_t d = (size_t)config().n_embd, rank = (size_t)config().rank;
  std::vector<float> row(d + rank);
  for (size_t i = 0; i < slots.size(); ++i) {
    std::copy_n(slots[i].hidden, d, row.begin());
    std::copy_n(embeddings_.begin() + (int64_t)(i * rank), rank, row.begin() + (int64_t)d);
    k_.quantize(joined_.view(), (int64_t)i, 0, (int64_t)row.size(), row.data());
  }
  join(slots, w_.markov_gate, w_.markov_gate_bias);
  for (size_t i = 0; i < embeddings_.size(); ++i) embeddings_[i] *= sigmoid(mixed_[i]);
}

// Score the best tokens of each row: what the output matrix made of them, and how they follow the token before.
void BlockHead::select(const std::vector<Slot> &slots) {
  const int64_t rank = config().rank, n_vocab = config().n_vocab, top_k = std::min<int64_t>(config().top_k, n_vocab);
  for (size_t i = 0; i < slots.size(); ++i)
    k_.quantize(joined_.view(), (int64_t)i, 0, config().n_embd, slots[i].hidden);
  join(slots, w_.markov_gate);
  for (size_t i = 0; i < embeddings_.size(); ++i) embeddings_[i] *= mixed_[i];
  std::atomic<bool> finite{true};
  each(head_.net.pool, (int64_t)slots.size(), [&](int64_t i) {
    const Slot &slot = slots[(size_t)i];
    std::vector<int64_t> best((size_t)top_k);
    std::vector<float> successor((size_t)rank);
    row_top_k(k_, slot.made, n_vocab, top_k, best.data());
    std::fill_n(slot.scores, n_vocab, EC_NOT_SELECTED);
    for (int64_t id : best) {
      tile_row(w_.markov_w2.type, rank, w_.markov_w2.tiles, head_.tokens[(size_t)id], successor.data());
      slot.scores[id] = slot.made[id] + (float)dot(embeddings_.data() + i * rank, successor.data(), rank);
      if (!all_finite(slot.scores + id, 1)) finite.store(false, std::memory_order_relaxed);
    }
  });
  if (!finite) throw NotFinite("the draft head's scores are not finite");
}

// Replace embeddings by what [carried; embedding; hidden] makes of them, and carry on.
void BlockHead::carry_on(const std::vector<Slot> &slots) {
  const size_t d = (size_t)config().n_embd, rank = (size_t)config().rank;
  std::vector<float> row(2 * rank + d);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].before != nullptr) std::copy_n(slots[i].before, rank, row.begin());
    else std::fill_n(row.begin(), rank, 0.0f);
    std::copy_n(embeddings_.begin() + (int64_t)(i * rank), rank, row.begin() + (int64_t)rank);
    std::copy_n(slots[i].hidden, d, row.begin() + (int64_t)(2 * rank));
    k_.quantize(joined_.view(), (int64_t)i, 0, (int64_t)row.size(), row.data());
  }
  join(slots, w_.markov_joint, w_.markov_joint_bias);
  for (size_t i = 0; i < slots.size(); ++i)
    for (size_t j = 0; j < rank; ++j) {
      const float *mixed = mixed_.data() + i * 3 * rank + j;
      const float keep = sigmoid(mixed[0]), before = slots[i].before != nullptr ? slots[i].before[j] : 0.0f;
      slots[i].after[j] = keep * before + (1.0f - keep) * tanhf(mixed[rank]);
      embeddings_[i * rank + j] = tanhf(mixed[2 * rank]);
    }
}

}  // namespace edgedec

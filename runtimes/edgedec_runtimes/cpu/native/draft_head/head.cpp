#include "draft_head/head.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "forward/run.h"
#include "weights/tiles.h"

using namespace edgedec;

namespace {

constexpr int32_t LAZY_ROWS = 32;      // rows without a pair that a state keeps at most before it reads them
constexpr int32_t KEPT_ROWS = 96;      // rows of taps whose memory is kept between forwards
constexpr int32_t DRAFT_SLOTS = 256;   // slots behind the context for drafted tokens

void require(bool holds, const std::string &message) {
  if (!holds) throw Invalid(message);
}

void require_shape(const Matrix &m, const char *name, int64_t rows, int64_t cols) {
  require(m.n_rows == rows && m.n_cols == cols, std::string("the head's matrix ") + name + " is missing or has another shape");
}

ec_config net_config(const ec_head_config &h) {
  ec_config c{};
  c.n_vocab = h.n_vocab, c.n_embd = h.n_embd, c.n_layer = 1, c.n_head = h.n_head, c.n_head_kv = h.n_head_kv;
  c.head_dim = h.head_dim, c.n_ff = h.n_ff, c.n_rot = h.head_dim;
  c.rms_epsilon = h.rms_epsilon, c.embedding_scale = c.residual_scale = c.logit_scale = 1.0f;
  c.attention_scale = h.head_dim > 0 ? 1.0f / sqrtf((float)h.head_dim) : 0.0f;
  return c;
}

}  // namespace

ec_head::ec_head(ec_model &model, const ec_head_config &c, const int32_t *tapped, const int32_t *drafted)
    : target(model), config(c), net(net_config(c), model.pool.size(), model.max_rows, model.kernels) {
  net.paired = true;
  net.normed_residual = c.norm_before_residual != 0;
  require(model.finished, "the head's target is not finished");
  require(c.n_taps >= 1 && c.n_taps <= 16, "the number of taps is out of range");
  require(c.fc_norm >= EC_FC_NORM_NONE && c.fc_norm <= EC_FC_NORM_EACH, "no such norm before fc");
  for (int32_t i = 0; i < c.n_taps; ++i)
    require(tapped[i] >= 0 && tapped[i] <= model.config.n_layer, "a tap is out of range");
  for (int32_t i = 0; i < c.n_vocab; ++i)
    require(drafted[i] >= 0 && drafted[i] < model.config.n_vocab, "a drafted token is out of range");
  taps.assign(tapped, tapped + c.n_taps);
  tokens.assign(drafted, drafted + c.n_vocab);
}

void ec_head::finish() {
  const bool own = embedding.n_rows != 0;
  require_shape(fc, "fc", config.n_embd, n_tapped());
  if (own) require_shape(embedding, "embedding", target.config.n_vocab, config.n_embd);
  require(own || config.n_embd == target.config.n_embd, "the target's embeddings have another length");
  require(own || !target.elsewhere || target.look_up != nullptr, "the target's embeddings are not there");
  require(config.fc_norm == EC_FC_NORM_NONE ? fc_norm.empty() : (int64_t)fc_norm.size() == n_tapped(),
          "the vector fc_norm is missing or has another length");
  require(isfinite(config.rope_base) && config.rope_base > 0, "the head's rope_base is not a positive number");
  require(rope_divisors.empty() || (int32_t)rope_divisors.size() == config.head_dim / 2,
          "the divisors of the head's frequencies are of another number");
  for (int32_t i = 0; i < config.head_dim / 2; ++i) {
    const double divisor = rope_divisors.empty() ? 1.0 : rope_divisors[(size_t)i];
    net.rope[0].frequencies.push_back(pow(config.rope_base, -2.0 * i / config.head_dim) / divisor);
  }
  net.finish();
  joined_ = ActivationBuffer(net.max_rows, n_tapped(), !is_float_type(fc.type), is_float_type(fc.type));
  normed_.resize((size_t)n_tapped());
  products_.resize((size_t)net.pool.size() * BAND * PANEL_ROWS);
  finished = true;
}

void ec_head::embed(const int32_t *tokens, int32_t n, float *out, int64_t stride) {
  const bool own = embedding.n_rows != 0;
  if (!own && target.elsewhere && target.look_up(tokens, n, out, stride) != EC_OK)
    throw Unreadable("the embeddings that the draft head borrows can't be read");
  for (int32_t i = 0; i < n; ++i, out += stride) {
    if (own) tile_row(embedding.type, config.n_embd, embedding.tiles, tokens[i], out);
    else if (target.streamer.started()) target.streamer.embed(tokens[i], out);
    else if (target.row_file.is_open()) target.row_file.read(tokens[i], out);
    else if (!target.elsewhere) tile_row(target.token_embd.type, config.n_embd, target.token_embd.tiles, tokens[i], out);
    if (!own && target.config.embedding_scale != 1.0f)
      for (int32_t j = 0; j < config.n_embd; ++j) out[j] *= target.config.embedding_scale;
  }
}

void ec_head::fuse(const std::vector<Fused> &rows) {
  const Kernels &k = *net.kernels;
  const int64_t n = (int64_t)rows.size(), width = n_tapped(), piece = config.fc_norm == EC_FC_NORM_EACH ? target.config.n_embd : width;
  for (int64_t i = 0; i < n; ++i) {
    const float *row = rows[(size_t)i].taps;
    if (config.fc_norm != EC_FC_NORM_NONE)
      for (int64_t at = 0; at < width; at += piece)
        k.rms_norm(row + at, fc_norm.data() + at, config.rms_epsilon, piece, normed_.data() + at);
    k.quantize(joined_.view(), i, 0, width, config.fc_norm != EC_FC_NORM_NONE ? normed_.data() : row);
  }
  const int64_t n_panels = (fc.n_rows + PANEL_ROWS - 1) / PANEL_ROWS;
  std::atomic<int64_t> next{0};
  net.pool.run([&](int thread) {
    float *products = products_.data() + (int64_t)thread * BAND * PANEL_ROWS;
    for (int64_t panel; (panel = next.fetch_add(1, std::memory_order_relaxed)) < n_panels;) {
      const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (fc.n_rows + TILE_ROWS - 1) / TILE_ROWS);
      const int64_t columns = std::min<int64_t>(PANEL_ROWS, fc.n_rows - panel * PANEL_ROWS);
      for (int64_t begin = 0; begin < n; begin += BAND) {
        const int64_t end = std::min<int64_t>(begin + BAND, n);
        k.matmul(fc, tile, last, joined_.view(), begin, end, products, PANEL_ROWS);
        for (int64_t r = begin; r < end; ++r)
          memcpy(rows[(size_t)r].out + panel * PANEL_ROWS, products + (r - begin) * PANEL_ROWS, (size_t)columns * sizeof(float));
      }
    }
  });
}

namespace edgedec {

HeadState::HeadState(ec_head &head, int32_t n_ctx)
    : head_(head),
      kv_(&head.net, KVCache({1, head.config.n_head_kv, head.config.head_dim, EC_KV_F16, 0}, n_ctx + DRAFT_SLOTS)),
      fused_((size_t)head.config.n_embd),
      outputs_((size_t)head.config.n_embd) {}

HeadState::HeadState(const HeadState &other, int32_t n_tokens)
    : head_(other.head_),
      kv_(&other.head_.net, KVCache(other.kv_.cache, other.n_pairs_)),
      base_(other.base_),
      n_pairs_(other.n_pairs_),
      tokens_(other.tokens_),
      taps_(other.taps_),
      fused_(other.fused_),
      fused_position_(other.fused_position_),
      outputs_((size_t)head_.config.n_embd) {
  go_back(n_tokens);
}

// Keep what is known of the first n_past positions. The last pair stays although its token may change: it is one of many that
// attention reads, and without the taps of its position it can't be made again.
void HeadState::go_back(int32_t n_past) {
  n_drafted_ = -1;
  if (n_past < base_ || n_past > end()) base_ = n_past, n_pairs_ = 0, tokens_.clear();
  else if (n_past < base_ + n_pairs_) n_pairs_ = n_past - base_, tokens_.clear();
  else tokens_.resize((size_t)(n_past - base_ - n_pairs_));
  if (fused_position_ >= n_past) fused_position_ = -1;
}

// Make room for the taps of n_rows rows behind the first n_past tokens, and return where the first one's go.
float *HeadState::room_for(int32_t n_past, int32_t n_rows) {
  go_back(n_past);
  if (n_pending() > LAZY_ROWS) absorb(n_pending() - 1, tokens_.back());
  const int64_t width = head_.n_tapped();
  taps_.resize((size_t)((n_pending() + std::max(n_rows, KEPT_ROWS - n_pending())) * width));
  return taps_.data() + n_pending() * width;
}

void HeadState::before(const ec_item &item, Plan &plan, int32_t first_row) {
  if (item.tokens == nullptr) return go_back(item.n_past);
  float *out = room_for(item.n_past, item.n_rows);
  for (size_t t = 0; t < head_.taps.size(); ++t)
    plan.taps.push_back(
        {head_.taps[t] - 1, first_row, item.n_rows, out + (int64_t)t * head_.target.config.n_embd, head_.n_tapped()});
}

void HeadState::take(const ec_item &item) {
  float *out = room_for(item.n_past, item.n_rows);
  const int64_t n_embd = head_.target.config.n_embd;
  for (int32_t r = 0; r < item.n_rows; ++r)
    for (int32_t t = 0; t < item.n_taps; ++t, out += n_embd)
      memcpy(out, item.tapped + ((int64_t)t * item.n_rows + r) * n_embd, (size_t)n_embd * sizeof(float));
  after(item);
}

void HeadState::after(const ec_item &item) {
  if (item.tokens == nullptr) return;
  tokens_.insert(tokens_.end(), item.tokens, item.tokens + item.n_rows);
  // The rows of a draft all want logits; a chain that wants at most its last row's is a part of the text.
  if (item.parents == nullptr && item.n_wanted <= 1 && n_pending() > LAZY_ROWS) absorb(n_pending() - 1, tokens_.back());
  if ((int64_t)taps_.size() > KEPT_ROWS * head_.n_tapped() && n_pending() <= KEPT_ROWS) {
    taps_.resize((size_t)(KEPT_ROWS * head_.n_tapped()));
    taps_.shrink_to_fit();
  }
}

void HeadState::move(const int32_t *source, int32_t n, int32_t start) {
  const int32_t first = base_ + n_pairs_;
  const size_t width = (size_t)head_.n_tapped();
  if (start < first || start + n > end() || (n > 0 && source[n - 1] >= end())) return go_back(std::min(start, end()));
  for (int32_t i = 0; i < n; ++i) {
    tokens_[(size_t)(start + i - first)] = tokens_[(size_t)(source[i] - first)];
    memmove(taps_.data() + (size_t)(start + i - first) * width, taps_.data() + (size_t)(source[i] - first) * width,
            width * sizeof(float));
  }
  go_back(start + n);
}

// Make pairs of the first n rows; the last of them is followed by last_token.
void HeadState::absorb(int32_t n, int32_t last_token) {
  const auto started = std::chrono::steady_clock::now();
  for (int32_t left = n; left > 0;) {
    const int32_t count = std::min(left, head_.net.max_rows);
    lay_out_rows(count, count < left ? tokens_[(size_t)count] : last_token);
    read({this}, false);
    left -= count;
  }
  if (inputs_.size() > (size_t)(2 * head_.config.n_embd * KEPT_ROWS)) std::vector<float>().swap(inputs_);
  read_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}
namespace {

struct SavedHead {
  int32_t base, n_pairs, n_pending, has_feature;
};

}  // namespace

uint64_t HeadState::saved_bytes(int32_t n_tokens) const {
  if (n_tokens < 0) return 0;
  const uint64_t floats = (uint64_t)(head_.n_tapped() + head_.config.n_embd) * sizeof(float);
  return sizeof(SavedHead) + (uint64_t)kv_.cache.token_bytes() * (uint64_t)n_tokens + floats;
}

uint64_t HeadState::state_bytes() const {
  const int64_t n_pages = (n_pairs_ + PAGE_TOKENS - 1) / PAGE_TOKENS;
  return (uint64_t)(n_pages * kv_.cache.shape().page_bytes()) +
         sizeof(float) * (taps_.capacity() + fused_.size() + inputs_.capacity() + outputs_.size() +
                          branch_inputs_.capacity() + branch_outputs_.capacity());
}

void HeadState::save(int32_t n_tokens, uint8_t *target) {
  memset(target, 0, (size_t)saved_bytes(n_tokens));
  go_back(n_tokens);
  if (n_pending() > 1) absorb(n_pending() - 1, tokens_.back());
  const SavedHead saved = {base_, n_pairs_, n_pending(), fused_position_ == base_ + n_pairs_ - 1};
  memcpy(target, &saved, sizeof saved);
  kv_.cache.save(n_pairs_, target + sizeof saved);
  float *row = (float *)(target + saved_bytes(n_tokens)) - head_.n_tapped() - head_.config.n_embd;
  if (n_pending() == 1) memcpy(row, taps_.data(), (size_t)head_.n_tapped() * sizeof(float));
  memcpy(row + head_.n_tapped(), fused_.data(), fused_.size() * sizeof(float));
}

void HeadState::load(int32_t n_tokens, const uint8_t *source) {
  SavedHead saved;
  memcpy(&saved, source, sizeof saved);
  require(saved.base >= 0 && saved.n_pairs >= 0 && (saved.n_pending == 0 || saved.n_pending == 1) &&
              (int64_t)saved.base + saved.n_pairs + saved.n_pending == n_tokens && saved.n_pairs <= kv_.cache.n_ctx(),
          "the saved state of the draft head is damaged");
  kv_.cache.load(saved.n_pairs, source + sizeof saved);
  base_ = saved.base, n_pairs_ = saved.n_pairs, n_drafted_ = -1;
  const uint8_t *row = source + saved_bytes(n_tokens) - (size_t)(head_.n_tapped() + head_.config.n_embd) * sizeof(float);
  // the token of the last row is read when the next row tells it
  tokens_.assign((size_t)saved.n_pending, 0);
  taps_.resize((size_t)(KEPT_ROWS * head_.n_tapped()));
  memcpy(taps_.data(), row, (size_t)head_.n_tapped() * sizeof(float));
  memcpy(fused_.data(), row + head_.n_tapped() * (int64_t)sizeof(float), fused_.size() * sizeof(float));
  fused_position_ = saved.has_feature && saved.n_pairs > 0 ? base_ + n_pairs_ - 1 : -1;
}

}  // namespace edgedec

#include "draft_head/pair_state.h"

#include <string.h>

#include <algorithm>
#include <numeric>

namespace edgedec {

PairState::PairState(ec_draft_head &head, int32_t n_ctx)
    : DraftHeadState(head, n_ctx), fused_((size_t)head.config.n_embd), outputs_((size_t)head.config.n_embd) {}

PairState::PairState(const PairState &other)
    : DraftHeadState(other),
      fused_(other.fused_),
      fused_position_(other.fused_position_),
      outputs_((size_t)head_.config.n_embd) {}

std::shared_ptr<DraftHeadState> PairState::fork(int32_t n_tokens) const {
  const auto twin = std::make_shared<PairState>(*this);
  twin->go_back(n_tokens);
  return twin;
}

// The last pair stays although its token may change: it is one of many that attention reads, and without the taps of
// its position it can't be made again.
void PairState::forget(int32_t n_past) {
  n_drafted_ = -1;
  if (fused_position_ >= n_past) fused_position_ = -1;
}

// Lay out pairs of the first n rows that have none; the last of them is followed by last_token.
void PairState::lay_out_rows(int32_t n, int32_t last_token) {
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d * n));
  std::vector<int32_t> next(tokens_.begin() + 1, tokens_.begin() + n);
  next.push_back(last_token);
  head_.embed(next.data(), n, inputs_.data(), 2 * d);
  slot_ = n_read_, n_laid_ = n_new_ = n;
}

bool PairState::lay_out(int32_t n_past, int32_t token, int32_t) {
  require(n_past >= 0 && token >= 0 && token < head_.target.config.n_vocab, "a token or n_past is out of range");
  n_drafted_ = -1;
  branch_outputs_.clear();
  if (n_past > end() || n_past <= base_) return false;
  go_back(n_past);
  if (n_pending() > head_.net.max_rows) absorb();
  if (n_pending() > 0) {
    lay_out_rows(n_pending(), token);
    return true;
  }
  if (fused_position_ != n_past - 1) return false;
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d));
  head_.embed(&token, 1, inputs_.data(), d);
  memcpy(inputs_.data() + d, fused_.data(), (size_t)d * sizeof(float));
  slot_ = n_read_ - 1, n_laid_ = 1, n_new_ = 0;
  return true;
}

bool PairState::lay_out_next(int32_t token) {
  require(n_drafted_ >= 0 && token >= 0 && token < head_.target.config.n_vocab, "no draft was begun, or no such token");
  if (n_read_ + n_drafted_ >= kv_.cache.n_ctx()) return false;
  const int64_t d = head_.config.n_embd;
  inputs_.resize((size_t)(2 * d));
  head_.embed(&token, 1, inputs_.data(), d);
  memcpy(inputs_.data() + d, outputs_.data(), (size_t)d * sizeof(float));
  slot_ = n_read_ + n_drafted_, n_laid_ = 1, n_new_ = 0;
  return true;
}

// Make pairs of all rows but the last one, whose next token is not known.
void PairState::absorb_rows() {
  while (n_pending() > 1) {
    const int32_t n = std::min(n_pending() - 1, head_.net.max_rows);
    lay_out_rows(n, tokens_[(size_t)n]);
    read_pairs({this}, nullptr);
  }
  if (inputs_.size() > (size_t)(2 * head_.config.n_embd * KEPT_ROWS)) std::vector<float>().swap(inputs_);
}

void PairState::read_group(DraftHeadState *const *states, size_t n, float *scores) {
  std::vector<PairState *> pairs;
  for (size_t i = 0; i < n; ++i) pairs.push_back(static_cast<PairState *>(states[i]));
  read_pairs(pairs, scores);
}

void PairState::read_pairs(const std::vector<PairState *> &states, float *scores) {
  ec_draft_head &head = states[0]->head_;
  const int64_t d = head.config.n_embd, width = head.n_tapped();
  const int32_t layer = head.config.n_layer - 1;
  const size_t n = states.size();
  const bool wanted = scores != nullptr;
  std::vector<ec_draft_head::Made> rows, pairs;
  std::vector<int32_t> last(n);
  std::vector<ec_item> items(n);
  std::vector<ec_group> groups(n);
  int64_t n_rows = 0;
  for (const PairState *state : states) n_rows += state->n_laid_;
  std::vector<float> outputs((size_t)(wanted ? n_rows * d : 0)), joined((size_t)(head.joins ? n_rows * d : 0));
  float *output = outputs.data(), *input = joined.data();
  for (size_t i = 0; i < n; ++i) {
    PairState &s = *states[i];
    for (int32_t r = 0; r < s.n_new_; ++r)
      rows.push_back({s.taps_.data() + r * width, s.inputs_.data() + (2 * r + 1) * d});
    ec_item &item = items[i];
    last[i] = s.n_laid_ - 1;
    groups[i].n_rows = s.n_laid_, groups[i].vectors = head.joins ? input : s.inputs_.data();
    item.session = &s.kv_, item.n_past = s.slot_, item.n_rows = s.n_laid_, item.groups = &groups[i], item.n_groups = 1;
    for (int32_t r = 0; head.joins && r < s.n_laid_; ++r, input += d)
      pairs.push_back({s.inputs_.data() + 2 * r * d, input});
    if (!wanted) continue;
    item.n_wanted = 1, item.wanted = &last[i], item.n_taps = 1, item.taps = &layer, item.tapped = output;
    output += s.n_laid_ * d;
  }
  if (!rows.empty()) head.fuse(rows);
  if (head.joins) head.join(pairs);
  head.run(items.data(), (int32_t)n, scores);
  for (size_t i = 0; i < n; ++i)
    states[i]->settle(items[i].tapped == nullptr ? nullptr : items[i].tapped + last[i] * d, wanted);
}

// Take what a forward made of the pairs that were laid out; `last` is the layer's output for the last of them.
void PairState::settle(const float *last, bool wanted) {
  const size_t d = (size_t)head_.config.n_embd;
  if (n_new_ > 0) {
    memcpy(fused_.data(), inputs_.data() + inputs_.size() - d, d * sizeof(float));
    n_read_ += n_new_;
    fused_position_ = base_ + n_read_ - 1;
    drop_read(n_new_);
  }
  n_drafted_ = wanted ? slot_ + n_laid_ - n_read_ : -1;
  n_new_ = 0;
  if (!wanted) return;
  feed_back(last, outputs_.data());
}

// Write what the next pair gets of a row that leaves the layers.
void PairState::feed_back(const float *row, float *out) const {
  const int64_t d = head_.config.n_embd;
  if (!head_.config.feeds_back_normed) memcpy(out, row, (size_t)d * sizeof(float));
  else head_.net.kernels->rms_norm(row, head_.net.output_norm.data(), head_.config.rms_epsilon, d, out);
}

bool PairState::read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) {
  const size_t d = (size_t)head_.config.n_embd;
  const int32_t n_known = n - n_new;
  require(n_drafted_ == 0, "no draft was begun");
  require(branch_outputs_.size() >= (size_t)n_known * d, "the nodes before were not read");
  if (n > head_.net.max_rows || n_read_ + n > kv_.cache.n_ctx()) return false;
  branch_inputs_.resize((size_t)n * 2 * d);
  head_.embed(tokens + n_known, n_new, branch_inputs_.data() + (size_t)n_known * 2 * d, (int64_t)(2 * d));
  for (int32_t i = n_known; i < n; ++i) {
    const float *above = parents[i] < 0 ? outputs_.data() : branch_outputs_.data() + (size_t)parents[i] * d;
    memcpy(branch_inputs_.data() + ((size_t)i * 2 + 1) * d, above, d * sizeof(float));
  }
  const int32_t layer = head_.config.n_layer - 1;
  std::vector<float> made((size_t)n * d), joined(head_.joins ? (size_t)n * d : 0);
  std::vector<ec_draft_head::Made> pairs;
  for (size_t i = 0; head_.joins && i < (size_t)n; ++i)
    pairs.push_back({branch_inputs_.data() + 2 * i * d, joined.data() + i * d});
  if (head_.joins) head_.join(pairs);
  std::vector<int32_t> wanted((size_t)n_new);
  std::iota(wanted.begin(), wanted.end(), n_known);
  ec_item item{};
  ec_group group{};
  group.n_rows = n, group.vectors = head_.joins ? joined.data() : branch_inputs_.data();
  item.session = &kv_, item.n_past = n_read_, item.n_rows = n, item.parents = parents;
  item.groups = &group, item.n_groups = 1;
  item.n_wanted = n_new, item.wanted = wanted.data(), item.n_taps = 1, item.taps = &layer, item.tapped = made.data();
  head_.run(&item, 1, scores);
  branch_outputs_.resize((size_t)n * d);
  for (int32_t i = n_known; i < n; ++i)
    feed_back(made.data() + (size_t)i * d, branch_outputs_.data() + (size_t)i * d);
  return true;
}

uint64_t PairState::state_bytes() const {
  return DraftHeadState::state_bytes() + sizeof(float) * (fused_.size() + inputs_.capacity() + outputs_.size() +
                                                          branch_inputs_.capacity() + branch_outputs_.capacity());
}

// Beside keys and values: whether the feature of the last pair is known, the taps of the unread row, and the feature.
uint64_t PairState::extra_bytes() const {
  return sizeof(int32_t) + (uint64_t)(head_.n_tapped() + head_.config.n_embd) * sizeof(float);
}

void PairState::save_extra(uint8_t *target) const {
  const int32_t is_known = fused_position_ == base_ + n_read_ - 1;
  const size_t n_bytes = (size_t)head_.n_tapped() * sizeof(float);
  memcpy(target, &is_known, sizeof is_known);
  if (n_pending() == 1) memcpy(target + sizeof is_known, taps_.data(), n_bytes);
  memcpy(target + sizeof is_known + n_bytes, fused_.data(), fused_.size() * sizeof(float));
}

void PairState::load_extra(const uint8_t *source) {
  int32_t is_known;
  const size_t n_bytes = (size_t)head_.n_tapped() * sizeof(float);
  memcpy(&is_known, source, sizeof is_known);
  memcpy(taps_.data(), source + sizeof is_known, n_bytes);
  memcpy(fused_.data(), source + sizeof is_known + n_bytes, fused_.size() * sizeof(float));
  fused_position_ = is_known != 0 && n_read_ > 0 ? base_ + n_read_ - 1 : -1;
}

}  // namespace edgedec

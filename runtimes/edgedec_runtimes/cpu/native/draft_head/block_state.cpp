#include "draft_head/block_state.h"

#include <string.h>

#include <algorithm>
#include <numeric>

namespace edgedec {

BlockState::BlockState(ec_draft_head &head, int32_t n_ctx) : DraftHeadState(head, n_ctx) {}

BlockState::BlockState(const BlockState &other) : DraftHeadState(other) {}

std::shared_ptr<DraftHeadState> BlockState::fork(int32_t n_tokens) const {
  const auto twin = std::make_shared<BlockState>(*this);
  twin->go_back(n_tokens);
  return twin;
}

bool BlockState::lay_out(int32_t n_past, int32_t token, int32_t n_most) {
  require(n_past >= 0 && token >= 0 && token < head_.target.config.n_vocab, "a token or n_past is out of range");
  n_scored_ = -1;
  if (n_past > end() || n_past < base_ || (n_past == base_ && n_past > 0)) return false;
  go_back(n_past);
  if (n_pending() > head_.net.max_rows) absorb();
  const BlockHead &block = head_.block();
  n_kept_ = std::min(std::max(n_most, 1), block.n_drafts());
  n_rows_ = head_.config.block_causal ? n_kept_ + block.n_unused() : head_.config.block_size;
  token_ = token, is_new_ = true, n_scored_ = 0;
  branch_carried_.clear();
  return true;
}

bool BlockState::lay_out_next(int32_t token) {
  require(n_scored_ >= 1 && token >= 0 && token < head_.target.config.n_vocab, "no draft was begun, or no such token");
  token_ = token;
  return n_scored_ < n_kept_;
}

int32_t BlockState::n_laid() const { return is_new_ ? std::max(n_pending(), n_rows_) : 1; }

void BlockState::absorb_rows() {
  while (n_pending() > 0) read_context({{this, std::min(n_pending(), head_.net.max_rows)}});
}

void BlockState::read_context(const std::vector<std::pair<BlockState *, int32_t>> &texts) {
  std::vector<BlockHead::ContextRow> rows;
  for (const auto &[state, n] : texts) {
    KVCache &cache = state->kv_.cache;
    cache.prepare(state->n_read_, state->n_read_ + n);
    for (int32_t r = 0; r < n; ++r)
      rows.push_back({state->taps_.data() + r * state->head_.n_tapped(), &cache, state->n_read_ + r});
  }
  if (rows.empty()) return;
  texts[0].first->head_.block().read_context(rows);
  for (const auto &[state, n] : texts) {
    state->n_read_ += n;
    state->drop_read(n);
  }
}

void BlockState::read_group(DraftHeadState *const *group, size_t n, float *scores) {
  std::vector<std::pair<BlockState *, int32_t>> texts;
  std::vector<BlockState *> begun, all;
  for (size_t i = 0; i < n; ++i) {
    all.push_back(static_cast<BlockState *>(group[i]));
    if (!all.back()->is_new_) continue;
    begun.push_back(all.back());
    texts.push_back({all.back(), all.back()->n_pending()});
  }
  read_context(texts);
  if (!begun.empty()) read_blocks(begun);
  std::vector<BlockHead::Slot> slots;
  for (BlockState *state : all) {
    slots.push_back(state->slot(state->n_scored_, state->token_, scores));
    if (state->n_scored_ > 0) slots.back().before = state->carried_.data();
    slots.back().after = state->carried_.data();
    slots.back().sure = &state->sure_;
    scores += head_.config.n_vocab;
  }
  head_.block().score(slots);
  for (BlockState *state : all) ++state->n_scored_;
}

// Run the rows of the blocks of some texts through the layers, in one forward.
void BlockState::read_blocks(const std::vector<BlockState *> &states) {
  ec_draft_head &head = states[0]->head_;
  BlockHead &block = head.block();
  const size_t d = (size_t)head.config.n_embd, n_vocab = (size_t)head.config.n_vocab;
  const int32_t last_layer = head.config.n_layer - 1, first = block.n_unused();
  size_t n_rows = 0, n_kept = 0;
  for (const BlockState *s : states) n_rows += (size_t)s->n_rows_, n_kept += (size_t)s->n_kept_;
  std::vector<float> inputs(n_rows * d), hidden(block.reads_hidden() ? n_rows * d : 0), shared;
  std::vector<int32_t> wanted((size_t)head.config.block_size);
  std::iota(wanted.begin(), wanted.end(), first);
  std::vector<ec_item> items;
  std::vector<ec_group> groups(states.size());
  size_t row = 0;
  for (BlockState *s : states) {
    float *input = inputs.data() + row * d;
    head.embed(&s->token_, 1, input, (int64_t)d);
    for (int32_t r = 1; r < s->n_rows_; ++r) memcpy(input + (size_t)r * d, block.mask(), d * sizeof(float));
    ec_item item{};
    ec_group &group = groups[items.size()];
    group.n_rows = s->n_rows_, group.vectors = input;
    item.session = &s->kv_, item.n_past = s->n_read_, item.n_rows = s->n_rows_, item.groups = &group, item.n_groups = 1;
    item.block = head.config.block_causal ? EC_BLOCK_CAUSAL : EC_BLOCK_WHOLE;
    item.n_wanted = s->n_kept_, item.wanted = wanted.data();
    if (block.reads_hidden()) item.n_taps = 1, item.taps = &last_layer, item.tapped = hidden.data() + row * d;
    items.push_back(item);
    row += (size_t)s->n_rows_;
    s->made_.resize((size_t)s->n_kept_ * n_vocab);
  }
  if (states.size() > 1) shared.resize(n_kept * n_vocab);
  float *made = states.size() > 1 ? shared.data() : states[0]->made_.data();
  head.run(items.data(), (int32_t)items.size(), made);
  for (size_t i = 0; i < states.size(); ++i) {
    BlockState &s = *states[i];
    s.is_new_ = false;
    s.carried_.resize(block.n_carried());
    if (states.size() > 1) memcpy(s.made_.data(), made, s.made_.size() * sizeof(float));
    made += s.made_.size();
    if (!block.reads_hidden()) continue;
    s.hidden_.resize((size_t)s.n_kept_ * d);
    for (int32_t r = 0; r < s.n_kept_; ++r)
      block.norm(items[i].tapped + (size_t)(first + r) * d, s.hidden_.data() + (size_t)r * d);
  }
}

// Describe a row of the block that scores what follows a token.
BlockHead::Slot BlockState::slot(int32_t number, int32_t token, float *scores) {
  BlockHead::Slot slot{};
  slot.made = made_.data() + (size_t)number * (size_t)head_.config.n_vocab;
  if (!hidden_.empty()) slot.hidden = hidden_.data() + (size_t)number * (size_t)head_.config.n_embd;
  slot.token = token, slot.scores = scores;
  return slot;
}

bool BlockState::read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) {
  const size_t width = head_.block().n_carried();
  require(n_scored_ == 1, "no draft was begun");
  require(branch_carried_.size() >= (size_t)(n - n_new) * width, "the nodes before were not read");
  std::vector<int32_t> depth((size_t)n);
  for (int32_t i = 0; i < n; ++i) depth[(size_t)i] = parents[i] < 0 ? 1 : depth[(size_t)parents[i]] + 1;
  const bool deep = std::any_of(depth.begin() + (n - n_new), depth.end(), [&](int32_t d) { return d >= n_kept_; });
  if (deep || n > head_.net.max_rows) return false;
  branch_carried_.resize((size_t)n * width);
  std::vector<BlockHead::Slot> slots;
  for (int32_t i = n - n_new; i < n; ++i, scores += head_.config.n_vocab) {
    slots.push_back(slot(depth[(size_t)i], tokens[i], scores));
    slots.back().before = parents[i] < 0 ? carried_.data() : branch_carried_.data() + (size_t)parents[i] * width;
    slots.back().after = branch_carried_.data() + (size_t)i * width;
  }
  head_.block().score(slots);
  return true;
}

uint64_t BlockState::state_bytes() const {
  return DraftHeadState::state_bytes() +
         sizeof(float) * (made_.capacity() + hidden_.capacity() + carried_.capacity() + branch_carried_.capacity());
}

}  // namespace edgedec

#include "draft_head/exit_state.h"

#include <algorithm>
#include <numeric>

namespace edgedec {

std::shared_ptr<DraftHeadState> ExitState::fork(int32_t n_tokens) const {
  const auto twin = std::make_shared<ExitState>(*this);
  twin->go_back(n_tokens);
  return twin;
}

const ec_item &ExitState::widened(const ec_item &item, int32_t) {
  const ec_group &group = item.groups[0];
  const bool is_plain = item.places == nullptr && item.block == EC_BLOCK_NONE && item.n_mass == 0 &&
                        item.n_taps == 0 && item.n_groups == 1 && group.tokens != nullptr && group.attn == nullptr &&
                        group.mlp == nullptr;
  if (is_drafting_ || !is_plain || item.n_past != begun_) return item;
  int32_t n = 0;
  while (n < std::min(item.n_rows, (int32_t)drafted_.size()) && group.tokens[n] == drafted_[(size_t)n] &&
         (item.parents == nullptr || item.parents[n] == n - 1))
    ++n;
  if (n == 0) return item;
  wide_ = item;
  wide_groups_[0] = {}, wide_groups_[1] = group;
  wide_groups_[0].n_rows = n, wide_groups_[0].vectors = states_.data();
  wide_groups_[0].first_layer = head_.config.exit_layer;
  wide_groups_[1].n_rows -= n, wide_groups_[1].tokens += n;
  wide_.groups = wide_groups_, wide_.n_groups = wide_groups_[1].n_rows > 0 ? 2 : 1;
  return wide_;
}

void ExitState::before(const ec_item &item, Plan &plan, int32_t first_row) {
  if (is_drafting_) return;
  has_places_ = item.places != nullptr;
  DraftHeadState::before(item, plan, first_row);
}

void ExitState::after(const ec_item &item) {
  if (!is_drafting_) DraftHeadState::after(item);
}

// Have the head's layers see what left the layers below of rows that stand.
void ExitState::absorb_rows() {
  while (n_pending() > 0) {
    ec_item item{};
    ec_group group{};
    item.session = &kv_, item.n_past = n_read_, item.groups = &group, item.n_groups = 1;
    item.n_rows = group.n_rows = std::min(n_pending(), head_.net.max_rows), group.vectors = taps_.data();
    head_.run(&item, 1, nullptr);
    n_read_ += item.n_rows;
    drop_read(item.n_rows);
  }
}

bool ExitState::lay_out(int32_t n_past, int32_t token, int32_t) {
  require(n_past >= 0 && token >= 0 && token < head_.target.config.n_vocab, "a token or n_past is out of range");
  drafted_.clear();
  if (n_past > end() || n_past <= base_ || has_places_ || n_past >= session_->cache.n_ctx()) return false;
  go_back(n_past);
  absorb();
  begun_ = n_past, token_ = token;
  states_.clear();
  return true;
}

bool ExitState::lay_out_next(int32_t token) {
  require(!drafted_.empty() && token >= 0 && token < head_.target.config.n_vocab, "no draft was begun");
  const int32_t n = (int32_t)drafted_.size();
  if (n_read_ + n >= kv_.cache.n_ctx() || begun_ + n >= session_->cache.n_ctx()) return false;
  token_ = token;
  return true;
}

// Evaluate items of the target's sessions in the layers below.
void ExitState::pass_below(const std::vector<ExitState *> &states, ec_item *items) {
  struct Drafting {
    explicit Drafting(const std::vector<ExitState *> &all) : states(all) { set(true); }
    ~Drafting() { set(false); }
    void set(bool is) const {
      for (ExitState *state : states) state->is_drafting_ = is;
    }
    const std::vector<ExitState *> &states;
  } const drafting(states);
  if (forward(states[0]->head_.target, items, (int32_t)states.size(), nullptr, nullptr, nullptr) != Outcome::done)
    throw Unreadable("the layers that a draft leaves early were not evaluated");
}

void ExitState::read_group(DraftHeadState *const *states, size_t n, float *scores) {
  const int64_t d = head_.config.n_embd;
  const int32_t layer = head_.config.exit_layer - 1, first = 0;
  std::vector<ExitState *> exits;
  std::vector<ec_item> items(n);
  std::vector<ec_group> groups(n);
  for (size_t i = 0; i < n; ++i) {
    ExitState &s = *static_cast<ExitState *>(states[i]);
    exits.push_back(&s);
    s.states_.resize((s.drafted_.size() + 1) * (size_t)d);
    groups[i].n_rows = 1, groups[i].tokens = &s.token_;
    groups[i].attn = groups[i].mlp = head_.below.data();
    items[i].session = s.session_, items[i].n_past = s.begun_ + (int32_t)s.drafted_.size(), items[i].n_rows = 1;
    items[i].groups = &groups[i], items[i].n_groups = 1;
    items[i].n_taps = 1, items[i].taps = &layer, items[i].tapped = s.states_.data() + (int64_t)s.drafted_.size() * d;
  }
  pass_below(exits, items.data());
  for (size_t i = 0; i < n; ++i) {
    ExitState &s = *exits[i];
    groups[i] = {};
    groups[i].n_rows = 1, groups[i].vectors = items[i].tapped;
    items[i].session = &s.kv_, items[i].n_past = s.n_read_ + (int32_t)s.drafted_.size();
    items[i].n_taps = 0, items[i].n_wanted = 1, items[i].wanted = &first;
    s.drafted_.push_back(s.token_);
  }
  head_.run(items.data(), (int32_t)n, scores);
}

bool ExitState::read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) {
  require(drafted_.size() == 1, "no draft was begun");
  const int32_t layer = head_.config.exit_layer - 1;
  if (n > head_.net.max_rows || n_read_ + 1 + n > kv_.cache.n_ctx() || begun_ + 1 + n > session_->cache.n_ctx())
    return false;
  branches_.resize((size_t)n * (size_t)head_.config.n_embd);
  std::vector<int32_t> wanted((size_t)n_new);
  std::iota(wanted.begin(), wanted.end(), n - n_new);
  ec_item item{};
  ec_group group{};
  group.n_rows = n, group.tokens = tokens, group.attn = group.mlp = head_.below.data();
  item.session = session_, item.n_past = begun_ + 1, item.n_rows = n, item.parents = parents;
  item.groups = &group, item.n_groups = 1, item.n_taps = 1, item.taps = &layer, item.tapped = branches_.data();
  pass_below({this}, &item);
  group = {};
  group.n_rows = n, group.vectors = branches_.data();
  item.session = &kv_, item.n_past = n_read_ + 1;
  item.n_taps = 0, item.n_wanted = n_new, item.wanted = wanted.data();
  head_.run(&item, 1, scores);
  return true;
}

uint64_t ExitState::state_bytes() const {
  return DraftHeadState::state_bytes() + sizeof(float) * (states_.capacity() + branches_.capacity());
}

}  // namespace edgedec

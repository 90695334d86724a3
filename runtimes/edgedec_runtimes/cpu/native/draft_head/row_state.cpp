#include "draft_head/row_state.h"

#include <algorithm>
#include <numeric>

#include "draft_head/products.h"
#include "kernels/row.h"

namespace edgedec {

std::shared_ptr<DraftHeadState> RowState::fork(int32_t n_tokens) const {
  const auto twin = std::make_shared<RowState>(*this);
  if (n_tokens != begun_ + (int32_t)at_.size()) twin->known_ = false;
  return twin;
}

void RowState::place(const int32_t *n_behind, int32_t n, double seconds) {
  for (int32_t i = 0; i < n; ++i)
    require(n_behind[i] >= 0 && n_behind[i] <= head_.made.n, "a head can't place so many rows behind one");
  placed_.assign(n_behind, n_behind + n);
  seconds_ = seconds;
}

// Of an item the rows that are a path of likely tokens: the first one whose logits are wanted, and what follows it.
const ec_item &RowState::widened(const ec_item &item, int32_t n_most) {
  n_added_ = 0;
  groups_.clear();
  const bool is_plain = item.places == nullptr && item.block == EC_BLOCK_NONE && item.n_mass == 0 && item.n_taps == 0;
  if (!is_plain || item.n_wanted == 0 || item.n_rows > WIDENED_ROWS || !has_tokens(item)) return item;
  n_most = std::min(n_most, item.session->cache.n_ctx() - item.n_past - item.n_rows);
  int32_t row = item.wanted[0];
  for (size_t depth = 0; depth < placed_.size() && row < item.n_rows; ++depth) {
    const int32_t n = std::min(placed_[depth], n_most - n_added_);
    if (n > 0) groups_.push_back({row, n_added_, n}), n_added_ += n;
    int32_t next = row + 1;
    while (item.parents != nullptr && next < item.n_rows && item.parents[next] != row) ++next;
    row = next;
  }
  if (groups_.empty()) return item;
  parents_.resize((size_t)item.n_rows);
  if (item.parents != nullptr) std::copy_n(item.parents, item.n_rows, parents_.begin());
  else std::iota(parents_.begin(), parents_.end(), -1);
  for (const Group &group : groups_)
    for (int32_t k = 0; k < group.n; ++k)
      parents_.push_back(k == 0 ? group.row : item.n_rows + group.first + k - 1);
  entering_.resize((size_t)n_added_ * (size_t)head_.target.config.n_embd);
  wide_groups_.assign(item.groups, item.groups + item.n_groups);
  ec_group added{};
  added.n_rows = n_added_, added.vectors = entering_.data(), added.first_layer = head_.made.layer;
  wide_groups_.push_back(added);
  wide_ = item;
  wide_.n_rows += n_added_, wide_.parents = parents_.data();
  wide_.groups = wide_groups_.data(), wide_.n_groups += 1;
  return wide_;
}

void RowState::before(const ec_item &item, Plan &plan, int32_t first_row) {
  known_ = false;
  begun_ = item.n_past;
  const int32_t n_own = item.n_rows, n_embd = head_.target.config.n_embd;
  at_.resize((size_t)n_own);
  std::iota(at_.begin(), at_.end(), 0);
  if (n_added_ == 0) return;
  states_.resize((size_t)n_added_ * (size_t)n_embd);
  plan.made = &head_.made;
  for (const Group &group : groups_) {
    for (int32_t k = 0; k < group.n; ++k)
      plan.made_rows.push_back({first_row + n_own + group.first + k, (int32_t)plan.made_of.size(), k});
    plan.made_of.push_back(first_row + group.row);
  }
  head_.made.reserve(plan.made_of.size());
  plan.taps.push_back({head_.target.config.n_layer - 1, first_row + n_own, n_added_, states_.data(), n_embd});
}

void RowState::after(const ec_item &) {
  known_ = n_added_ > 0;
  if (known_) read_seconds += seconds_;
}

void RowState::move(const int32_t *source, int32_t n, int32_t start) {
  const int32_t n_before = start - begun_, n_own = (int32_t)at_.size();
  if (n_before < 0 || n_before > n_own || (n > 0 && source[n - 1] - begun_ >= n_own)) {
    known_ = false;
    return;
  }
  for (int32_t i = 0; i < n; ++i) at_[(size_t)(n_before + i)] = source[i] - begun_;
  at_.resize((size_t)(n_before + n));
}

bool RowState::lay_out(int32_t n_past, int32_t, int32_t) {
  const int32_t place = n_past - 1 - begun_;
  drafting_ = {}, depth_ = 0;
  scores_.clear();
  if (!known_ || place < 0 || place >= (int32_t)at_.size()) return false;
  for (const Group &group : groups_)
    if (group.row == at_[(size_t)place]) drafting_ = group;
  return drafting_.n > 0;
}

bool RowState::lay_out_next(int32_t) { return ++depth_ < drafting_.n; }

// Score what the rows of some groups draft.
void RowState::score(const std::vector<RowState *> &states) {
  if (states.empty()) return;
  ec_draft_head &head = states[0]->head_;
  const ec_config &c = head.target.config;
  const Kernels &k = *head.net.kernels;
  const size_t n_vocab = (size_t)head.config.n_vocab;
  std::vector<float *> outs;
  std::vector<float> normed((size_t)c.n_embd);
  for (RowState *state : states) {
    state->scores_.resize((size_t)state->drafting_.n * n_vocab);
    for (int32_t i = 0; i < state->drafting_.n; ++i) {
      const float *row = state->states_.data() + (int64_t)(state->drafting_.first + i) * c.n_embd;
      k.rms_norm(row, head.target.output_norm.data(), c.rms_epsilon, c.n_embd, normed.data());
      k.quantize(head.made.to_output.view(), (int64_t)outs.size(), 0, c.n_embd, normed.data());
      outs.push_back(state->scores_.data() + (size_t)i * n_vocab);
    }
  }
  multiply(head.net.pool, k, {&head.net.output}, head.made.to_output.view(), (int64_t)outs.size(),
           [&](size_t, int64_t row, int64_t column, const float *products, int64_t count) {
             float *to = outs[(size_t)row] + column;
             for (int64_t i = 0; i < count; ++i) to[i] = c.logit_scale * products[i];
             if (c.logit_softcap != 0.0f) k.softcap(to, c.logit_softcap, count);
           });
}

void RowState::read_group(DraftHeadState *const *states, size_t n, float *scores) {
  std::vector<RowState *> unscored;
  for (size_t i = 0; i < n; ++i) {
    RowState *state = static_cast<RowState *>(states[i]);
    if (state->scores_.empty()) unscored.push_back(state);
  }
  score(unscored);
  const size_t n_vocab = (size_t)head_.config.n_vocab;
  for (size_t i = 0; i < n; ++i) {
    const RowState *state = static_cast<const RowState *>(states[i]);
    const float *from = state->scores_.data() + (size_t)state->depth_ * n_vocab;
    if (!all_finite(from, (int64_t)n_vocab)) throw NotFinite("the draft head's scores are not finite");
    std::copy_n(from, n_vocab, scores + i * n_vocab);
  }
}

// What a row drafts depends on how far it stands behind the text, and not on the tokens between.
bool RowState::read_branches(const int32_t *, const int32_t *parents, int32_t n, int32_t n_new, float *scores) {
  const size_t n_vocab = (size_t)head_.config.n_vocab;
  std::vector<int32_t> depths;
  for (int32_t i = 0; i < n; ++i) {
    depths.push_back(parents[i] < 0 ? 1 : depths[(size_t)parents[i]] + 1);
    if (i >= n - n_new && depths.back() >= drafting_.n) return false;
  }
  for (int32_t i = n - n_new; i < n; ++i, scores += n_vocab)
    std::copy_n(scores_.data() + (size_t)depths[(size_t)i] * n_vocab, n_vocab, scores);
  return !scores_.empty();
}

uint64_t RowState::state_bytes() const {
  return sizeof(float) * (states_.capacity() + entering_.capacity() + scores_.capacity());
}

}  // namespace edgedec

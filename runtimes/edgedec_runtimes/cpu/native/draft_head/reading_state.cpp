#include "draft_head/reading_state.h"

#include <string.h>

#include <algorithm>
#include <list>

#include "forward/run.h"

namespace edgedec {

ReadingState::ReadingState(ec_draft_head &head, int32_t n_ctx) : DraftHeadState(head, n_ctx), feature_(width()) {}

std::shared_ptr<DraftHeadState> ReadingState::fork(int32_t n_tokens) const {
  const auto twin = std::make_shared<ReadingState>(*this);
  twin->go_back(n_tokens);
  return twin;
}

void ReadingState::attach(ec_session &session) {
  require(session.cache.shape().n_rot == 0, "the target's keys are completed when they are read");
  session_ = &session;
}

void ReadingState::forget(int32_t n_past) {
  n_ = std::clamp(n_past - first_, 0, n_);
  n_drafted_ = -1, n_begun_ = 0;
}

void ReadingState::before(const ec_item &item, Plan &plan, int32_t first_row) {
  go_back(item.n_past);
  const size_t d = width();
  if (n_ > 1) memmove(states_.data(), states_.data() + (size_t)(n_ - 1) * d, d * sizeof(float));
  if (n_ > 1) first_ += n_ - 1, n_ = 1;
  if (item.n_wanted == 0) return;
  const int32_t end = item.wanted[item.n_wanted - 1] + 1, begin = std::max(item.wanted[0], end - KEPT_ROWS + 1);
  if (first_ + n_ != item.n_past + begin) first_ = item.n_past + begin, n_ = 0;
  n_begun_ = end - begin;
  states_.resize((size_t)KEPT_ROWS * d);
  const int64_t stride = (int64_t)d;
  plan.taps.push_back({head_.taps[0] - 1, first_row + begin, n_begun_, states_.data() + n_ * stride, stride});
}

void ReadingState::move(const int32_t *source, int32_t n, int32_t start) {
  const size_t d = width();
  if (n > 0 && (start < first_ || !knows(source[n - 1]))) n_ = 0;
  for (int32_t i = 0; n_ > 0 && i < n; ++i)
    memmove(states_.data() + (size_t)(start + i - first_) * d, states_.data() + (size_t)(source[i] - first_) * d,
            d * sizeof(float));
  go_back(start + n);
}

bool ReadingState::lay_out(int32_t n_past, int32_t token, int32_t) {
  require(n_past >= 0 && token >= 0 && token < head_.target.config.n_vocab, "a token or n_past is out of range");
  n_drafted_ = -1;
  branch_features_.clear();
  if (!knows(n_past - 1) || n_past >= session_->cache.n_ctx()) return false;
  for (int32_t page = 0; page <= (n_past - 1) / PAGE_TOKENS; ++page)
    if (session_->cache.pages()[page] == nullptr) return false;
  const float *state = states_.data() + (size_t)(n_past - 1 - first_) * width();
  head_.net.kernels->rms_norm(state, head_.target.output_norm.data(), head_.target.config.rms_epsilon, (int64_t)width(),
                              feature_.data());
  begun_ = n_past, token_ = token, n_drafted_ = 0;
  return true;
}

bool ReadingState::lay_out_next(int32_t token) {
  require(n_drafted_ >= 0 && token >= 0 && token < head_.target.config.n_vocab, "no draft was begun, or no such token");
  token_ = token, ++n_drafted_;
  return true;
}

void ReadingState::read_group(DraftHeadState *const *states, size_t n, float *scores) {
  std::vector<Row> rows;
  for (size_t i = 0; i < n; ++i) {
    ReadingState &s = *static_cast<ReadingState *>(states[i]);
    rows.push_back({&s, s.token_, s.feature_.data(), s.feature_.data()});
  }
  read_rows(head_, rows, scores);
}

bool ReadingState::read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new,
                                 float *scores) {
  const size_t d = width(), n_known = (size_t)(n - n_new);
  require(n_drafted_ == 0, "no draft was begun");
  require(branch_features_.size() >= n_known * d, "the nodes before were not read");
  if (n_new > head_.net.max_rows) return false;
  branch_features_.resize((size_t)n * d);
  std::vector<Row> rows;
  for (size_t i = n_known; i < (size_t)n; ++i) {
    const float *above = parents[i] < 0 ? feature_.data() : branch_features_.data() + (size_t)parents[i] * d;
    rows.push_back({this, tokens[i], above, branch_features_.data() + i * d});
  }
  read_rows(head_, rows, scores);
  return true;
}

void ReadingState::read_rows(ec_draft_head &head, const std::vector<Row> &rows, float *scores) {
  const size_t n = rows.size(), d = (size_t)head.target.config.n_embd, own = (size_t)head.config.n_embd;
  const int32_t first = 0, layer = head.net.config.n_layer - 1;
  std::vector<float> pairs(n * 2 * d), joined(n * own), left(n * own);
  std::vector<int32_t> tokens;
  for (const Row &row : rows) tokens.push_back(row.token);
  head.embed(tokens.data(), (int32_t)n, pairs.data(), (int64_t)(2 * d));
  std::vector<ec_draft_head::Made> to_layers, to_features;
  std::vector<ec_item> items(n);
  std::vector<ec_group> groups(n);
  std::list<ec_session> seats;  // each shares the pages of a text, in which its row has no place
  for (size_t i = 0; i < n; ++i) {
    memcpy(pairs.data() + (2 * i + 1) * d, rows[i].feature, d * sizeof(float));
    to_layers.push_back({pairs.data() + 2 * i * d, joined.data() + i * own});
    to_features.push_back({joined.data() + i * own, rows[i].next});
    const int32_t n_past = rows[i].of->begun_;
    ec_session &seat = seats.emplace_back(&head.net, KVCache(rows[i].of->session_->cache, n_past));
    if (n_past % PAGE_TOKENS == 0) seat.cache.prepare(n_past, n_past + 1);  // the row's page, of which nothing is read
    groups[i].n_rows = 1, groups[i].vectors = to_layers.back().out;
    items[i].session = &seat, items[i].n_past = items[i].n_source = n_past, items[i].n_rows = 1;
    items[i].groups = &groups[i], items[i].n_groups = 1, items[i].n_wanted = 1, items[i].wanted = &first;
    items[i].n_taps = 1, items[i].taps = &layer, items[i].tapped = left.data() + i * own;
  }
  head.join(to_layers);
  Plan plan = make_plan(head.net, items.data(), (int32_t)n);
  if (evaluate(head.net, plan, scores, nullptr, nullptr) != Outcome::done)
    throw NotFinite("the draft head's scores are not finite");
  for (size_t i = 0; i < n; ++i)
    head.net.kernels->rms_norm(left.data() + i * own, head.net.output_norm.data(), head.config.rms_epsilon,
                               (int64_t)own, joined.data() + i * own);
  head.fuse(to_features);
}

uint64_t ReadingState::state_bytes() const {
  const size_t n_floats = states_.capacity() + feature_.capacity() + branch_features_.capacity();
  return DraftHeadState::state_bytes() + sizeof(float) * n_floats;
}

// Whether the state of the last position is known, and that state.
void ReadingState::save_extra(uint8_t *target) const {
  const int32_t is_known = knows(base_ - 1);
  memcpy(target, &is_known, sizeof is_known);
  if (is_known != 0)
    memcpy(target + sizeof is_known, states_.data() + (size_t)(base_ - 1 - first_) * width(), width() * sizeof(float));
}

void ReadingState::load_extra(const uint8_t *source) {
  int32_t is_known;
  memcpy(&is_known, source, sizeof is_known);
  states_.resize((size_t)KEPT_ROWS * width());
  memcpy(states_.data(), source + sizeof is_known, width() * sizeof(float));
  first_ = base_ - 1, n_ = is_known != 0 && base_ > 0 ? 1 : 0;
}

}  // namespace edgedec

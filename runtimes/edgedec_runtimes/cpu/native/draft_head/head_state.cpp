// What all kinds of draft heads keep of a text: rows that are not read yet, keys and values, and both as bytes.
#include <string.h>

#include <algorithm>
#include <chrono>

#include "draft_head/draft_head.h"

namespace edgedec {
namespace {

struct Saved {
  int32_t base, n_read, n_pending;
};

}  // namespace

DraftHeadState::DraftHeadState(ec_draft_head &head, int32_t n_ctx)
    : head_(head),
      kv_(&head.net, KVCache(head.net.kv_shape(EC_KV_F16), n_ctx + DRAFT_SLOTS)) {}

DraftHeadState::DraftHeadState(const DraftHeadState &other)
    : head_(other.head_),
      kv_(&other.head_.net, KVCache(other.kv_.cache, other.n_read_)),
      base_(other.base_),
      n_read_(other.n_read_),
      tokens_(other.tokens_),
      taps_(other.taps_) {}

void DraftHeadState::go_back(int32_t n_past) {
  if (n_past < base_ || n_past > end()) base_ = n_past, n_read_ = 0, tokens_.clear();
  else if (n_past < base_ + n_read_) n_read_ = n_past - base_, tokens_.clear();
  else tokens_.resize((size_t)(n_past - base_ - n_read_));
  forget(n_past);
}

bool has_tokens(const ec_item &item) {
  return std::all_of(item.groups, item.groups + item.n_groups,
                     [](const ec_group &group) { return group.tokens != nullptr; });
}

// Make room for the taps of n_rows rows behind the first n_past tokens, and return where the first one's go.
float *DraftHeadState::room_for(int32_t n_past, int32_t n_rows) {
  go_back(n_past);
  if (n_pending() > LAZY_ROWS) absorb();
  const int64_t width = head_.n_tapped();
  taps_.resize((size_t)((n_pending() + std::max(n_rows, KEPT_ROWS - n_pending())) * width));
  return taps_.data() + n_pending() * width;
}

void DraftHeadState::before(const ec_item &item, Plan &plan, int32_t first_row) {
  if (!has_tokens(item)) return go_back(item.n_past);
  float *out = room_for(item.n_past, item.n_rows);
  for (size_t t = 0; t < head_.taps.size(); ++t)
    plan.taps.push_back(
        {head_.taps[t] - 1, first_row, item.n_rows, out + (int64_t)t * head_.target.config.n_embd, head_.n_tapped()});
}

void DraftHeadState::take(const ec_item &item) {
  float *out = room_for(item.n_past, item.n_rows);
  const int64_t n_embd = head_.target.config.n_embd;
  for (int32_t r = 0; r < item.n_rows; ++r)
    for (int32_t t = 0; t < item.n_taps; ++t, out += n_embd)
      memcpy(out, item.tapped + ((int64_t)t * item.n_rows + r) * n_embd, (size_t)n_embd * sizeof(float));
  after(item);
}

void DraftHeadState::after(const ec_item &item) {
  if (!has_tokens(item)) return;
  for (int32_t g = 0; g < item.n_groups; ++g)
    tokens_.insert(tokens_.end(), item.groups[g].tokens, item.groups[g].tokens + item.groups[g].n_rows);
  // The rows of a draft all want logits; a chain that wants at most its last row's is a part of the text.
  if (item.parents == nullptr && item.n_wanted <= 1 && n_pending() > LAZY_ROWS) absorb();
  if ((int64_t)taps_.size() > KEPT_ROWS * head_.n_tapped() && n_pending() <= KEPT_ROWS) {
    taps_.resize((size_t)(KEPT_ROWS * head_.n_tapped()));
    taps_.shrink_to_fit();
  }
}

void DraftHeadState::move(const int32_t *source, int32_t n, int32_t start) {
  const int32_t first = base_ + n_read_;
  const size_t width = (size_t)head_.n_tapped();
  if (start < first || start + n > end() || (n > 0 && source[n - 1] >= end())) return go_back(std::min(start, end()));
  for (int32_t i = 0; i < n; ++i) {
    tokens_[(size_t)(start + i - first)] = tokens_[(size_t)(source[i] - first)];
    memmove(taps_.data() + (size_t)(start + i - first) * width, taps_.data() + (size_t)(source[i] - first) * width,
            width * sizeof(float));
  }
  go_back(start + n);
}

void DraftHeadState::absorb() {
  const auto started = std::chrono::steady_clock::now();
  absorb_rows();
  read_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

void DraftHeadState::drop_read(int32_t n) {
  const size_t width = (size_t)head_.n_tapped();
  tokens_.erase(tokens_.begin(), tokens_.begin() + n);
  memmove(taps_.data(), taps_.data() + (size_t)n * width, tokens_.size() * width * sizeof(float));
}

const float *DraftHeadState::read(const std::vector<DraftHeadState *> &states) {
  if (states.empty()) return nullptr;
  ec_draft_head &head = states[0]->head_;
  const size_t n_vocab = (size_t)head.config.n_vocab;
  head.scores.resize(std::max(head.scores.size(), states.size() * n_vocab));
  for (size_t begin = 0, end; begin < states.size(); begin = end) {
    int32_t n_rows = 0;
    for (end = begin; end < states.size(); ++end) {
      require(&states[end]->head_ == &head, "the texts of a draft are of several heads");
      if (end > begin && states[end]->n_laid() > head.net.max_rows - n_rows) break;
      n_rows += states[end]->n_laid();
    }
    states[begin]->read_group(states.data() + begin, end - begin, head.scores.data() + begin * n_vocab);
  }
  return head.scores.data();
}

uint64_t DraftHeadState::saved_bytes(int32_t n_tokens) const {
  if (n_tokens < 0) return 0;
  return sizeof(Saved) + (uint64_t)kv_.cache.token_bytes() * (uint64_t)n_tokens + extra_bytes();
}

uint64_t DraftHeadState::state_bytes() const {
  const int64_t n_pages = (n_read_ + PAGE_TOKENS - 1) / PAGE_TOKENS;
  return (uint64_t)(n_pages * kv_.cache.shape().page_bytes()) + sizeof(float) * taps_.capacity();
}

void DraftHeadState::save(int32_t n_tokens, uint8_t *target) {
  memset(target, 0, (size_t)saved_bytes(n_tokens));
  go_back(n_tokens);
  absorb();
  const Saved saved = {base_, n_read_, n_pending()};
  memcpy(target, &saved, sizeof saved);
  kv_.cache.save(n_read_, target + sizeof saved);
  save_extra(target + saved_bytes(n_tokens) - extra_bytes());
}

void DraftHeadState::load(int32_t n_tokens, const uint8_t *source) {
  Saved saved;
  memcpy(&saved, source, sizeof saved);
  require(saved.base >= 0 && saved.n_read >= 0 && saved.n_pending >= 0 && saved.n_pending <= most_unread() &&
              (int64_t)saved.base + saved.n_read + saved.n_pending == n_tokens && saved.n_read <= kv_.cache.n_ctx(),
          "the saved state of the draft head is damaged");
  kv_.cache.load(saved.n_read, source + sizeof saved);
  base_ = saved.base, n_read_ = saved.n_read;
  // the token of an unread row is read when the next row tells it
  tokens_.assign((size_t)saved.n_pending, 0);
  taps_.resize((size_t)(KEPT_ROWS * head_.n_tapped()));
  forget(n_tokens);
  load_extra(source + saved_bytes(n_tokens) - extra_bytes());
}

bool DraftHeadState::save_pages(int32_t begin, int32_t end, uint8_t *target, uint64_t n_bytes) {
  kv_.cache.check_pages(begin, end, n_bytes);
  if (base_ != 0 || this->end() <= end) return false;
  absorb();
  kv_.cache.save_pages(begin, end, target);
  return true;
}

// The feature of the last position is not known then; that of the next row will be.
void DraftHeadState::load_pages(int32_t begin, int32_t end, const uint8_t *source, uint64_t n_bytes) {
  kv_.cache.check_pages(begin, end, n_bytes);
  require(begin == 0 || (base_ == 0 && n_read_ == begin && n_pending() == 0), "the head does not know what is before");
  kv_.cache.load_pages(begin, end, source);
  base_ = 0, n_read_ = end;
  tokens_.clear();
  forget(0);
}

}  // namespace edgedec

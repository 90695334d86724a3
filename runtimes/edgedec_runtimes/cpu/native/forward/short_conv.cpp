#include "forward/short_conv.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "forward/model.h"

namespace edgedec {

ColumnCache::ColumnCache(const ColumnShape &shape, int32_t n_ctx) : shape_(shape) {
  if (is_used()) pages_.resize((size_t)(n_ctx + PAGE_TOKENS - 1) / PAGE_TOKENS);
}

ColumnCache::ColumnCache(const ColumnCache &other, int32_t n_tokens)
    : shape_(other.shape_), pages_(other.pages_.size()) {
  if (!is_used()) return;
  std::copy_n(other.pages_.begin(), (n_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS, pages_.begin());
}

int32_t ColumnCache::held_before(int32_t n_past) const {
  for (int32_t slot = std::max(0, n_past - shape_.n_back); is_used() && slot < n_past; ++slot)
    if (!holds(slot)) return held_before(slot / PAGE_TOKENS * PAGE_TOKENS);
  return n_past;
}

void ColumnCache::begin(const ec_item &item) {
  if (!is_used()) return;
  const int32_t end = item.n_past + item.n_rows;
  for (size_t i = (size_t)((end - 1) / PAGE_TOKENS + 1); i < pages_.size() && pages_[i].columns; ++i) pages_[i] = {};
  for (int32_t i = item.n_past / PAGE_TOKENS - 2; i >= 0 && pages_[(size_t)i].first < PAGE_TOKENS - shape_.n_back; --i)
    pages_[(size_t)i] = copy_of(pages_[(size_t)i], PAGE_TOKENS - shape_.n_back);
  prepare(item.n_past, end);
}

void ColumnCache::prepare(int32_t begin, int32_t end) {
  for (int32_t i = begin / PAGE_TOKENS; is_used() && i <= (end - 1) / PAGE_TOKENS; ++i) {
    Page &page = pages_[(size_t)i];
    const int32_t first = i * PAGE_TOKENS < begin ? page.first : 0;
    if (first > std::max(begin - i * PAGE_TOKENS, 0))
      throw Invalid("the session does not hold the columns of so many tokens");
    if (page.first != first || page.columns.use_count() > 1) page = copy_of(page, first);
  }
}

void ColumnCache::forget(int32_t slot) {
  for (size_t i = (size_t)(slot / PAGE_TOKENS); i < pages_.size(); ++i) pages_[i] = {};
}

ColumnCache::Page ColumnCache::new_page(int32_t first) const {
  Page page;
  page.first = first;
  // calloc returns zero pages of the system, which take memory only where they are written
  page.columns.reset(
      (float *)calloc((size_t)shape_.n_conv * (size_t)(PAGE_TOKENS - first) * (size_t)shape_.n_embd, sizeof(float)),
      free);
  if (page.columns == nullptr) throw std::bad_alloc();
  return page;
}

// Return a page of the slots from number `first` on, with those columns that `page` holds of them.
ColumnCache::Page ColumnCache::copy_of(const Page &page, int32_t first) const {
  Page copy = new_page(first);
  const int32_t begin = std::max(first, page.first);
  for (int32_t l = 0; l < shape_.n_conv && begin < PAGE_TOKENS; ++l)
    memcpy(copy.columns.get() + copy.place(begin, l) * shape_.n_embd,
           page.columns.get() + page.place(begin, l) * shape_.n_embd,
           (size_t)(PAGE_TOKENS - begin) * (size_t)shape_.n_embd * sizeof(float));
  return copy;
}

void ColumnCache::move(const int32_t *source, int32_t n, int32_t start) {
  if (!is_used() || n == 0) return;
  prepare(start, start + n);
  for (int32_t i = 0; i < n; ++i) {
    const int32_t from = source[i], to = start + i;
    if (!holds(from) || !holds(to)) throw Invalid("the slots to move are not of the latest forward");
    for (int32_t l = 0; l < shape_.n_conv; ++l) memmove(at(to, l), at(from, l), (size_t)shape_.n_embd * sizeof(float));
  }
}

// Call visitor(page, first, n_slots) for pages of the first n_tokens: the slots of them that are saved.
template <class Visit>
void ColumnCache::visit_saved(int32_t n_tokens, bool before, Visit visitor) const {
  const int32_t first_page = before ? 0 : (n_tokens - 1) / PAGE_TOKENS;
  for (int32_t begin = first_page * PAGE_TOKENS; begin < n_tokens; begin += PAGE_TOKENS) {
    const int32_t n_held = std::min(n_tokens - begin, PAGE_TOKENS), n = std::min(n_held, shape_.n_back);
    visitor(begin / PAGE_TOKENS, n_held - n, n);
  }
}

uint64_t ColumnCache::saved_bytes(int32_t n_tokens, bool before) const {
  if (!is_used() || n_tokens < 0) return 0;
  uint64_t n_columns = 0;
  visit_saved(n_tokens, before,
              [&](int32_t, int32_t, int32_t n) { n_columns += (uint64_t)n * (uint64_t)shape_.n_conv; });
  return n_columns * (uint64_t)shape_.n_embd * sizeof(float);
}

void ColumnCache::save(int32_t n_tokens, uint8_t *target, bool before) const {
  if (!is_used()) return;
  visit_saved(n_tokens, before, [&](int32_t page, int32_t first, int32_t n) {
    const size_t n_bytes = (size_t)n * (size_t)shape_.n_embd * sizeof(float);
    for (int32_t l = 0; l < shape_.n_conv; ++l, target += n_bytes)
      memcpy(target, at(page * PAGE_TOKENS + first, l), n_bytes);
  });
}

void ColumnCache::load(int32_t n_tokens, const uint8_t *source, bool before) {
  if (!is_used()) return;
  forget(0);
  visit_saved(n_tokens, before, [&](int32_t number, int32_t first, int32_t n) {
    pages_[(size_t)number] = new_page(first);
    const size_t n_bytes = (size_t)n * (size_t)shape_.n_embd * sizeof(float);
    for (int32_t l = 0; l < shape_.n_conv; ++l, source += n_bytes)
      memcpy(at(number * PAGE_TOKENS + first, l), source, n_bytes);
  });
}

}  // namespace edgedec

#include "forward/row_notes.h"

#include <string.h>

#include <algorithm>

#include "forward/model.h"

namespace edgedec {

RowNotes::RowNotes(const RowNotes &other, int32_t n_tokens) : RowNotes(other.n_layer_, other.n_vocab_, other.n_embd_) {
  const int32_t n = std::min(n_tokens, other.n_slots());
  tokens_.assign(other.tokens_.begin(), other.tokens_.begin() + n);
  ran_.assign(other.ran_.begin(), other.ran_.begin() + (std::ptrdiff_t)((size_t)n * width()));
  const size_t n_vectors = std::min((size_t)n, other.vectors_.size());
  vectors_.assign(other.vectors_.begin(), other.vectors_.begin() + (std::ptrdiff_t)n_vectors);
}

void RowNotes::describe(int32_t begin, int32_t end, ec_item *item, ec_group *group, std::vector<float> *vectors) const {
  if (end > n_slots()) throw Invalid("the session does not hold so many tokens");
  const Vector *first = vector_of(begin);
  const size_t n_numbers = first != nullptr ? (*first)->size() : 0;
  int32_t n = 0;
  for (; begin + n < end && memcmp(at(begin), at(begin + n), width()) == 0; ++n) {
    const Vector *vector = vector_of(begin + n);
    if ((vector != nullptr ? (*vector)->size() : 0) != n_numbers) break;
    if (vector != nullptr) vectors->insert(vectors->end(), (*vector)->begin(), (*vector)->end());
    else if (tokens_[(size_t)(begin + n)] < 0)
      throw Invalid("the session can't go back to this position: it began with hidden states");
  }
  item->n_past = begin, item->n_rows = n, item->groups = group, item->n_groups = 1;
  if (first != nullptr) group->vectors = vectors->data(), group->n_added = (int32_t)n_numbers / n_embd_ - 1;
  else group->tokens = tokens_.data() + begin;
  group->n_rows = n, group->attn = at(begin), group->mlp = at(begin) + n_layer_;
}

void RowNotes::begin(const ec_item &item) {
  if (n_layer_ != 0 && item.groups[0].first_layer == 0) resize(std::min(n_slots(), item.n_past));
}

void RowNotes::note(const ec_item &item) {
  if (n_layer_ == 0) return;
  const ec_group &group = item.groups[0];
  resize(std::max(n_slots(), item.n_past + item.n_rows));
  const bool are_vectors = group.vectors != nullptr && group.first_layer == 0;
  const size_t end = (size_t)(item.n_past + item.n_rows), n_numbers = (size_t)(1 + group.n_added) * (size_t)n_embd_;
  if (are_vectors) vectors_.resize(std::max(vectors_.size(), end));
  for (int32_t r = 0; r < item.n_rows; ++r) {
    const size_t slot = (size_t)(item.n_past + r);
    uint8_t *ran = ran_.data() + slot * width();
    if (group.tokens != nullptr) tokens_[slot] = group.tokens[r];
    if (group.tokens != nullptr && slot < vectors_.size()) vectors_[slot] = nullptr;
    if (are_vectors) {
      const float *from = group.vectors + (size_t)r * n_numbers;
      vectors_[slot] = std::make_shared<const std::vector<float>>(from, from + n_numbers);
    }
    for (int32_t l = group.first_layer; l < n_layer_; ++l) {
      ran[l] = group.attn == nullptr || group.attn[l];
      ran[n_layer_ + l] = group.mlp == nullptr || group.mlp[l];
    }
  }
}

void RowNotes::resize(int32_t n_slots) {
  tokens_.resize((size_t)n_slots, -1);
  ran_.resize((size_t)n_slots * width(), 0);
  if (vectors_.size() > (size_t)n_slots) vectors_.resize((size_t)n_slots);
}

void RowNotes::move(const int32_t *source, int32_t n, int32_t start) {
  if (n_layer_ == 0 || n == 0) return;
  if (source[n - 1] >= n_slots()) throw Invalid("the slots are out of range");
  for (int32_t i = 0; i < n; ++i) {
    tokens_[(size_t)(start + i)] = tokens_[(size_t)source[i]];
    if (const Vector *vector = vector_of(source[i]); (size_t)(start + i) < vectors_.size())
      vectors_[(size_t)(start + i)] = vector != nullptr ? *vector : nullptr;
    memmove(ran_.data() + (size_t)(start + i) * width(), at(source[i]), width());
  }
}

bool RowNotes::ran_as_first(int32_t slot) const {
  return slot < n_slots() && memcmp(at(0), at(slot), width()) == 0;
}

uint64_t RowNotes::saved_bytes(int32_t n_tokens) const {
  return n_layer_ == 0 ? 0 : (uint64_t)n_tokens * (sizeof(int32_t) + width());
}

void RowNotes::save(int32_t n_tokens, uint8_t *target) const {
  if (n_tokens > n_slots() && n_layer_ != 0) throw Invalid("the session does not hold so many tokens");
  if (n_layer_ == 0 || n_tokens == 0) return;
  const size_t n = (size_t)n_tokens;
  memcpy(target, tokens_.data(), n * sizeof(int32_t));
  memcpy(target + n * sizeof(int32_t), ran_.data(), n * width());
}

void RowNotes::load(int32_t n_tokens, const uint8_t *source) {
  if (n_layer_ == 0) return;
  const size_t n = (size_t)n_tokens;
  std::vector<int32_t> tokens(n);
  if (n != 0) memcpy(tokens.data(), source, n * sizeof(int32_t));
  for (int32_t token : tokens)
    if (token < -1 || token >= n_vocab_)
      throw Invalid("the saved state is damaged: it has a token that there is not");
  tokens_ = std::move(tokens);
  vectors_.clear();
  ran_.assign(source + n * sizeof(int32_t), source + n * (sizeof(int32_t) + width()));
}

uint64_t RowNotes::vector_bytes(int32_t n_tokens) const {
  uint64_t n_bytes = 0;
  for (int32_t slot = 0; slot < n_tokens; ++slot)
    if (const Vector *vector = vector_of(slot)) n_bytes += 2 * sizeof(int32_t) + (*vector)->size() * sizeof(float);
  return n_bytes;
}

void RowNotes::save_vectors(int32_t n_tokens, uint8_t *target) const {
  for (int32_t slot = 0; slot < n_tokens; ++slot) {
    const Vector *vector = vector_of(slot);
    if (vector == nullptr) continue;
    const int32_t head[2] = {slot, (int32_t)(*vector)->size()};
    memcpy(target, head, sizeof head);
    memcpy(target + sizeof head, (*vector)->data(), (*vector)->size() * sizeof(float));
    target += sizeof head + (*vector)->size() * sizeof(float);
  }
}

void RowNotes::load_vectors(int32_t n_tokens, const uint8_t *source, uint64_t n_bytes) {
  std::vector<Vector> vectors;
  const auto require = [](bool holds) {
    if (!holds) throw Invalid("the saved state is damaged: it has a vector that does not fit");
  };
  require(n_bytes == 0 || (n_tokens >= 0 && n_tokens <= n_slots()));
  while (n_bytes > 0) {
    int32_t head[2];
    require(n_bytes >= sizeof head);
    memcpy(head, source, sizeof head);
    source += sizeof head, n_bytes -= sizeof head;
    require(head[0] >= (int32_t)vectors.size() && head[0] < n_tokens && head[1] > 0);
    require(head[1] % n_embd_ == 0 && head[1] / n_embd_ <= 1 + n_layer_);
    const size_t n = (size_t)head[1];
    require(n_bytes >= n * sizeof(float));
    std::vector<float> numbers(n);
    memcpy(numbers.data(), source, n * sizeof(float));
    source += n * sizeof(float), n_bytes -= n * sizeof(float);
    vectors.resize((size_t)head[0] + 1);
    vectors.back() = std::make_shared<const std::vector<float>>(std::move(numbers));
  }
  vectors_ = std::move(vectors);
}

}  // namespace edgedec

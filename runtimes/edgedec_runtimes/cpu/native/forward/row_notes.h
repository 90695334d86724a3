// What the rows of a session were: their tokens or vectors, and the half-layers that each ran through. With that they
// can be evaluated again, with the same bits, where something of them is not held any more.
#pragma once
#include <memory>
#include <vector>

#include "edgedec_cpu.h"

namespace edgedec {

class RowNotes {
 public:
  // A model without `n_layer` notes nothing.
  RowNotes(int32_t n_layer, int32_t n_vocab, int32_t n_embd) : n_layer_(n_layer), n_vocab_(n_vocab), n_embd_(n_embd) {}
  // Know the first n_tokens of `other`.
  RowNotes(const RowNotes &other, int32_t n_tokens);

  // Describe the rows from `begin` on that ran through the same half-layers, at most up to `end`, to evaluate them
  // again: set n_past, n_rows, tokens (or hidden and n_added, whose numbers lie in `vectors`), attn and mlp. Throws
  // Invalid where neither the token nor the vector of a row is known.
  void describe(int32_t begin, int32_t end, ec_item *item, ec_group *group, std::vector<float> *vectors) const;
  // Forget what lies behind the rows of a forward that begins. Behind rows that begin with a later layer, all is still
  // what it was in the layers below.
  void begin(const ec_item &item);
  // Note the rows of a forward that was done.
  void note(const ec_item &item);
  void move(const int32_t *source, int32_t n, int32_t start);
  // Whether the row in a slot ran through the attention (or what stands in its place) of a layer.
  bool ran(int32_t slot, int32_t layer) const { return slot < n_slots() && at(slot)[layer] != 0; }
  // Whether the row in a slot ran through the same half-layers as the first row of the text.
  bool ran_as_first(int32_t slot) const;

  uint64_t saved_bytes(int32_t n_tokens) const;
  void save(int32_t n_tokens, uint8_t *target) const;
  void load(int32_t n_tokens, const uint8_t *source);  // throws Invalid for tokens that there are not
  // The vectors among the first n_tokens rows: of each its slot, its count of numbers, and these.
  uint64_t vector_bytes(int32_t n_tokens) const;
  void save_vectors(int32_t n_tokens, uint8_t *target) const;
  void load_vectors(int32_t n_tokens, const uint8_t *source, uint64_t n_bytes);  // throws Invalid

 private:
  int32_t n_slots() const { return (int32_t)tokens_.size(); }
  size_t width() const { return 2 * (size_t)n_layer_; }
  const uint8_t *at(int32_t slot) const { return ran_.data() + (size_t)slot * width(); }
  void resize(int32_t n_slots);
  using Vector = std::shared_ptr<const std::vector<float>>;  // forks share it
  const Vector *vector_of(int32_t slot) const {
    return (size_t)slot < vectors_.size() && vectors_[(size_t)slot] ? &vectors_[(size_t)slot] : nullptr;
  }

  int32_t n_layer_, n_vocab_, n_embd_;
  // Of the slots that were written: the token, -1 where it is not known; and for each layer whether its attention (or
  // what stands in its place) ran, then for each layer whether its feed-forward block did.
  std::vector<int32_t> tokens_;
  std::vector<uint8_t> ran_;  // [slots][2 * n_layer]
  // Of the slots up to the last one that began with a vector: that vector, or none.
  std::vector<Vector> vectors_;
};

}  // namespace edgedec

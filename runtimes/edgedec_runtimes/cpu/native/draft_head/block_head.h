// What a head that drafts blocks computes outside of its layers: the keys and values of a text's features, and the
// scores of a row after the token before it.
#pragma once
#include "draft_head/draft_head.h"

namespace edgedec {

class BlockHead {
 public:
  // Throws Invalid where weights are missing, or of another shape.
  explicit BlockHead(ec_draft_head &head);

  const ec_draft_head_config &config() const { return head_.config; }
  // Row 0 of a block whose rows are not shifted scores nothing.
  int32_t n_unused() const { return config().block_shifted ? 0 : 1; }
  int32_t n_drafts() const { return config().block_size - n_unused(); }
  // Whether scores or a chance depend on what the layers make of a row.
  bool reads_hidden() const;
  bool is_confident() const { return !w_.confidence.empty(); }
  // The numbers that a row hands on to the next one.
  size_t n_carried() const { return config().markov == EC_MARKOV_RNN ? (size_t)config().rank : 0; }

  // Return the embedding of masked rows. Throws Unreadable.
  const float *mask();
  // Write what the output matrix reads of a row that leaves the layers.
  void norm(const float *row, float *out) const;

  // A row of a text: its taps, and where its keys and values go. The slot is its position as well.
  struct ContextRow {
    const float *taps;
    KVCache *cache;
    int32_t slot;
  };
  // Write the keys and values of at most max_rows rows, whose slots are writable.
  void read_context(const std::vector<ContextRow> &rows);

  // A row of a block, and the token before it.
  struct Slot {
    const float *made;    // [n_vocab], what the output matrix made of it
    const float *hidden;  // [n_embd], what it made that of; nullptr where !reads_hidden()
    int32_t token;
    const float *before;  // [n_carried()], from the row before; nullptr for the first one
    float *after;         // [n_carried()]
    float *scores;        // [n_vocab]
    float *sure;          // the chance that what it drafts is accepted, where is_confident(); nullptr: not wanted
  };
  // Write the scores of at most max_rows rows. Throws NotFinite.
  void score(const std::vector<Slot> &slots);

 private:
  void write_head(const ContextRow &row, float *keys, const float *values, const float *cos_sin, int32_t layer,
                  int32_t head, float *memory);
  float chance(const Slot &slot, const float *embedding) const;
  void gate(const std::vector<Slot> &slots);
  void carry_on(const std::vector<Slot> &slots);
  void join(const std::vector<Slot> &slots, const Matrix &matrix, const std::vector<float> &bias);

  ec_draft_head &head_;
  const BlockWeights &w_;
  const Kernels &k_;
  const int64_t n_kv_ = (int64_t)config().n_head_kv * config().head_dim;
  std::vector<float> mask_;
  // --- of rows of a text ---
  ActivationBuffer context_;
  std::vector<const Matrix *> keys_and_values_;  // of each layer in turn
  std::vector<float> features_, kv_, cos_sin_;   // [n][n_embd], [n][n_layer][2 * n_kv], [n][head_dim]
  // --- of rows of a block ---
  ActivationBuffer joined_, biases_;       // what the gate or the joint matrix reads, and what W2 reads
  std::vector<float> embeddings_, mixed_;  // [n][rank], and what that matrix makes
};

}  // namespace edgedec

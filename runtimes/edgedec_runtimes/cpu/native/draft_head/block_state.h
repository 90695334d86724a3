// What a head that drafts blocks keeps of a text: keys and values of its features. A draft is one forward over the rows
// of a block, the newest token and masks, and then one row of scores after another.
#pragma once
#include "draft_head/block_head.h"

namespace edgedec {

class BlockState final : public DraftHeadState {
 public:
  BlockState(ec_draft_head &head, int32_t n_ctx);
  BlockState(const BlockState &other);
  std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const override;

  bool lay_out(int32_t n_past, int32_t token, int32_t n_most) override;
  bool lay_out_next(int32_t token) override;
  float sure(float p) const override { return head_.block().is_confident() ? sure_ : p; }
  // A node's row is that of its depth, after its own token; no layer runs again.
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) override;
  uint64_t state_bytes() const override;

 private:
  void forget(int32_t) override { n_scored_ = -1; }
  void absorb_rows() override;
  int32_t n_laid() const override;
  void read_group(DraftHeadState *const *states, size_t n, float *scores) override;
  int32_t most_unread() const override { return 0; }
  uint64_t extra_bytes() const override { return 0; }
  void save_extra(uint8_t *) const override {}
  void load_extra(const uint8_t *) override {}

  // Read the first n rows that are not read, for each (state, n).
  static void read_context(const std::vector<std::pair<BlockState *, int32_t>> &texts);
  static void read_blocks(const std::vector<BlockState *> &states);
  BlockHead::Slot slot(int32_t number, int32_t token, float *scores);

  int32_t token_ = 0;               // what the next row of scores follows
  bool is_new_ = false;             // the block is still to be read
  int32_t n_rows_ = 0, n_kept_ = 0; // rows of the block, and how many of them score drafts
  int32_t n_scored_ = -1;           // how many of these were scored; -1 where no draft was begun
  float sure_ = 0;
  std::vector<float> made_, hidden_;  // [n_kept][n_vocab], and [n_kept][n_embd] where the head reads it
  std::vector<float> carried_;        // [n_carried], from the row that was scored last
  std::vector<float> branch_carried_; // the same by node of a tree
};

}  // namespace edgedec

// What a head that reads pairs keeps of a text: pairs of the feature of a position and the embedding of the token that
// follows. Its output for a pair scores the token after that one.
#pragma once
#include "draft_head/draft_head.h"

namespace edgedec {

class PairState final : public DraftHeadState {
 public:
  PairState(ec_draft_head &head, int32_t n_ctx);
  PairState(const PairState &other);
  std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const override;

  bool lay_out(int32_t n_past, int32_t token, int32_t n_most) override;
  bool lay_out_next(int32_t token) override;
  float sure(float p) const override { return p; }
  // All nodes go through the layer again, as rows of one forward.
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) override;
  uint64_t state_bytes() const override;

 private:
  void forget(int32_t n_past) override;
  void absorb_rows() override;
  int32_t n_laid() const override { return n_laid_; }
  void read_group(DraftHeadState *const *states, size_t n, float *scores) override;
  int32_t most_unread() const override { return 1; }
  uint64_t extra_bytes() const override;
  void save_extra(uint8_t *target) const override;
  void load_extra(const uint8_t *source) override;

  void lay_out_rows(int32_t n, int32_t last_token);
  // Read what some states have laid out in one forward; with `scores`, write those of each text's last pair there.
  static void read_pairs(const std::vector<PairState *> &states, float *scores);
  void settle(const float *last, bool wanted);
  void feed_back(const float *row, float *out) const;

  std::vector<float> fused_;     // the feature of the last pair that was made of taps, [n_embd]
  int32_t fused_position_ = -1;  // its position, -1 for none
  std::vector<float> inputs_, outputs_;  // the pairs that are laid out, and what the layer made of the last one
  int32_t slot_ = 0, n_laid_ = 0;        // the first one's slot, and how many there are
  int32_t n_new_ = 0;                    // how many of them are pairs of the text whose features are still to be made
  std::vector<float> branch_inputs_, branch_outputs_;  // by node of a tree: what the layer reads and makes
  int32_t n_drafted_ = -1;  // drafted tokens that were read since lay_out(); -1 where there is nothing to go on from
};

}  // namespace edgedec

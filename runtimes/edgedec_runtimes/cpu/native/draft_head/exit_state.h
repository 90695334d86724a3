// What a head keeps of a text whose drafts leave the target early (Kangaroo, arXiv:2404.18911; LayerSkip,
// arXiv:2404.16710): the target's first layers, and behind them layers of the head's own, which see what left the former.
//
// The states of drafted tokens are those of their verification. So the rows of a draft enter the verification behind the
// layers that they have passed, as far as the item has the same tokens in the same slots.
#pragma once
#include "draft_head/draft_head.h"

namespace edgedec {

class ExitState final : public DraftHeadState {
 public:
  ExitState(ec_draft_head &head, int32_t n_ctx) : DraftHeadState(head, n_ctx) {}
  std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const override;
  void attach(ec_session &session) override { session_ = &session; }

  const ec_item &widened(const ec_item &item, int32_t n_most) override;
  void before(const ec_item &item, Plan &plan, int32_t first_row) override;
  void after(const ec_item &item) override;

  bool lay_out(int32_t n_past, int32_t token, int32_t n_most) override;
  bool lay_out_next(int32_t token) override;
  float sure(float p) const override { return p; }
  // All nodes go through the layers again, as rows of one forward.
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) override;
  uint64_t state_bytes() const override;

 private:
  void forget(int32_t) override { drafted_.clear(); }
  void absorb_rows() override;
  int32_t n_laid() const override { return 1; }
  void read_group(DraftHeadState *const *states, size_t n, float *scores) override;
  int32_t most_unread() const override { return 0; }
  uint64_t extra_bytes() const override { return 0; }
  void save_extra(uint8_t *) const override {}
  void load_extra(const uint8_t *) override {}

  static void pass_below(const std::vector<ExitState *> &states, ec_item *items);

  ec_session *session_ = nullptr;  // of the text
  bool has_places_ = false;        // rows of the text turn to places that only items have
  bool is_drafting_ = false;       // a forward of the target is this head's own
  int32_t begun_ = 0, token_ = 0;  // n_past of the draft, and the token that is laid out
  std::vector<int32_t> drafted_;   // the tokens from begun_ on whose rows have passed the layers below
  std::vector<float> states_;      // [tokens][n_embd], what left these layers
  std::vector<float> branches_;    // the same of the nodes of a tree
  ec_item wide_{};                 // the latest item, whose rows enter behind the layers that they have passed
  ec_group wide_groups_[2] = {};
};

}  // namespace edgedec

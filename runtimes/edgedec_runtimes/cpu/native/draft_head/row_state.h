// What a head keeps of a text that drafts with rows in the target's own layers: hidden transfer (arXiv:2404.12022) and
// parallel prompt decoding (arXiv:2405.18628).
//
// Behind rows of a forward stand further rows, which are no tokens. The first one behind a row drafts the token after
// the one that the row's logits choose, the next one the token after that, and so on. They enter a layer with what the
// head makes of the state with which the row itself enters it, see the text up to that row and the ones before them, and
// leave no slot in the cache: the next forward begins before them.
#pragma once
#include "draft_head/draft_head.h"

namespace edgedec {

constexpr int32_t WIDENED_ROWS = 64;  // a forward with more rows of a text gets no rows of the head

class RowState final : public DraftHeadState {
 public:
  RowState(ec_draft_head &head, int32_t n_ctx) : DraftHeadState(head, n_ctx) {}
  std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const override;

  const ec_item &widened(const ec_item &item, int32_t n_most) override;
  void before(const ec_item &item, Plan &plan, int32_t first_row) override;
  void after(const ec_item &item) override;
  void move(const int32_t *source, int32_t n, int32_t start) override;
  void place(const int32_t *n_behind, int32_t n, double seconds) override;
  int32_t n_added() const override { return n_added_; }

  bool lay_out(int32_t n_past, int32_t token, int32_t n_most) override;
  bool lay_out_next(int32_t token) override;
  float sure(float p) const override { return p; }
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) override;
  uint64_t state_bytes() const override;

 private:
  void forget(int32_t) override { known_ = false; }
  void absorb_rows() override {}
  int32_t n_laid() const override { return scores_.empty() ? drafting_.n : 0; }
  void read_group(DraftHeadState *const *states, size_t n, float *scores) override;
  int32_t most_unread() const override { return 0; }
  uint64_t extra_bytes() const override { return 0; }
  void save_extra(uint8_t *) const override {}
  void load_extra(const uint8_t *) override {}

  static void score(const std::vector<RowState *> &states);

  struct Group {
    int32_t row, first, n;  // the row of the item that they stand behind, the first one's place in states_, their number
  };
  std::vector<int32_t> placed_;  // how many rows stand behind the newest token, behind the draft's first one, ...
  double seconds_ = 0;           // that the rows of a forward are expected to take
  // Of the latest forward: the groups, what left the last layer [rows][n_embd], and by position from begun_ on the row.
  std::vector<Group> groups_;
  std::vector<float> states_;
  int32_t begun_ = 0, n_added_ = 0;
  std::vector<int32_t> at_;
  bool known_ = false;  // whether that forward was done, and its text still stands
  Group drafting_{};    // whose rows draft now
  int32_t depth_ = 0;   // which of them
  std::vector<float> scores_;  // [n][n_vocab], of the group that drafts; empty before they are made
  // The latest item with the rows of the head behind its own.
  ec_item wide_{};
  std::vector<ec_group> wide_groups_;
  std::vector<int32_t> parents_;
  std::vector<float> entering_;
};

}  // namespace edgedec

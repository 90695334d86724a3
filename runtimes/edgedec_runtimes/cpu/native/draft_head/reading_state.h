// What a head keeps of a text whose layers have no keys and values, and see those of the target (Gemma 4's assistants).
//
// A row joins the embedding of a token and a feature: what left the target's last norm one position before, and of
// drafted tokens what the head has made of its own state. All rows of a draft stand at the position of its first token,
// and see the tokens before it. So they don't see one another, and take no place in a cache.
#pragma once
#include "draft_head/draft_head.h"

namespace edgedec {

class ReadingState final : public DraftHeadState {
 public:
  ReadingState(ec_draft_head &head, int32_t n_ctx);
  std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const override;
  void attach(ec_session &session) override;

  // Take the states of rows whose logits are wanted, which alone can be the last ones before a draft.
  void before(const ec_item &item, Plan &plan, int32_t first_row) override;
  void after(const ec_item &) override { n_ += n_begun_; }
  void move(const int32_t *source, int32_t n, int32_t start) override;

  bool lay_out(int32_t n_past, int32_t token, int32_t n_most) override;
  bool lay_out_next(int32_t token) override;
  float sure(float p) const override { return p; }
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores) override;
  uint64_t state_bytes() const override;

 private:
  void forget(int32_t n_past) override;
  void absorb_rows() override {}
  int32_t n_laid() const override { return 1; }
  void read_group(DraftHeadState *const *states, size_t n, float *scores) override;
  int32_t most_unread() const override { return 0; }
  uint64_t extra_bytes() const override { return sizeof(int32_t) + width() * sizeof(float); }
  void save_extra(uint8_t *target) const override;
  void load_extra(const uint8_t *source) override;

  // A token behind a draft of this state, the feature that it is joined with, and where the next one's goes.
  struct Row {
    const ReadingState *of;
    int32_t token;
    const float *feature;
    float *next;
  };
  // Read rows, at most net.max_rows, in one forward, and write the scores of what follows each.
  static void read_rows(ec_draft_head &head, const std::vector<Row> &rows, float *scores);
  size_t width() const { return (size_t)head_.target.config.n_embd; }
  bool knows(int32_t position) const { return position >= first_ && position < first_ + n_; }

  const ec_session *session_ = nullptr;  // of the text
  int32_t first_ = 0, n_ = 0;            // the positions whose states are known
  int32_t n_begun_ = 0;                  // those that the forward under way adds
  std::vector<float> states_;            // [n_][width()], what left the target's last layer
  int32_t begun_ = 0, token_ = 0;        // the position of the draft, and the token that is laid out
  int32_t n_drafted_ = -1;               // tokens that were drafted before it; -1 where no draft was begun
  std::vector<float> feature_;           // what it is joined with, and then what the next one is
  std::vector<float> branch_features_;   // by node of a tree: what its children are joined with
};

}  // namespace edgedec

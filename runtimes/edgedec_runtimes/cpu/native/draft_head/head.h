// A trained draft head of the EAGLE-3 kind (arXiv:2503.01840): its weights, and what it keeps of one session's text.
//
// The head is one decoder layer. It reads pairs: the feature of a position, which `fc` makes of hidden states of the target
// (the taps), and the embedding of the token that follows. Its output for a pair scores the token after that one.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "forward/model.h"
#include "forward/plan.h"

struct ec_head {
  ec_head(ec_model &target, const ec_head_config &config, const int32_t *taps, const int32_t *tokens);

  ec_model &target;
  ec_head_config config;
  std::vector<int32_t> taps;    // layers of the target, whose input is tapped
  std::vector<int32_t> tokens;  // the target's id of each token that the head can draft
  ec_model net;                 // the layer and the output matrix
  edgedec::Matrix fc{}, embedding{};
  std::vector<float> fc_norm, rope_divisors;
  bool finished = false;

  int64_t n_tapped() const { return (int64_t)config.n_taps * target.config.n_embd; }
  void finish();
  // Where a row of taps lies, [n_tapped], and where its feature goes, [n_embd].
  struct Fused {
    const float *taps;
    float *out;
  };
  // Make the features of at most net.max_rows rows of taps.
  void fuse(const std::vector<Fused> &rows);
  // Write the embedding of token i to out + i * stride, [n_embd]. Throws Unreadable.
  void embed(const int32_t *tokens, int32_t n, float *out, int64_t stride);

  std::vector<float> scores;  // of the texts that were read together last, [n][n_vocab]

 private:
  edgedec::ActivationBuffer joined_;
  std::vector<float> normed_, products_;
};

namespace edgedec {

// What a head keeps of one session's text: the keys and values of its pairs, and the taps of rows that have no pair yet. The
// rows of a forward become pairs when a later call says with its n_past that they are kept, so a rejected draft costs nothing.
// Where the taps of a position are missing (the text was restored without them), the state begins anew behind it.
class HeadState {
 public:
  HeadState(ec_head &head, int32_t n_ctx);
  // Share the keys and values that belong to the first n_tokens of another state's text.
  HeadState(const HeadState &other, int32_t n_tokens);

  ec_head &head() const { return head_; }

  // --- around a forward of the target ---

  // Drop what lies beyond the item's n_past, and have the forward copy the taps of its rows.
  void before(const ec_item &item, Plan &plan, int32_t first_row);
  // Take the rows of a forward that was done.
  void after(const ec_item &item);
  // Take rows that another library has evaluated, whose taps the item holds.
  void take(const ec_item &item);
  // Move rows of the latest forward, as ec_session_move moves their slots.
  void move(const int32_t *source, int32_t n, int32_t start);

  // --- drafting: one state lays out pairs, then all of them are read together ---

  // Lay out what must be read to score what follows `token`, which stands at position n_past. Return false where the text
  // before it is not known. Throws Invalid, std::bad_alloc, Unreadable.
  bool lay_out(int32_t n_past, int32_t token);
  // Lay out one more drafted token behind what was read last; return false where there is no room.
  bool lay_out_next(int32_t token);
  // Read what each state has laid out, all states of one head, in as few forwards as their rows allow. Where `wanted`, return
  // the scores of what follows each text, [n][n_vocab]; they stay until the next call. A row's result depends on its own
  // text only, so that texts are drafted together to the same bits as alone.
  static const float *read(const std::vector<HeadState *> &states, bool wanted = true);
  // Write the scores of what follows each of the last n_new of n nodes to `scores`, [n_new][n_vocab]: a tree of drafted tokens
  // behind what lay_out() laid out and read() read. The nodes before them are those of the last call, in their order. All nodes
  // go through the layer again, as rows of one forward. Return false where there is no room. Throws as lay_out does, NotFinite.
  bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new, float *scores);

  // --- the text's state as bytes ---

  uint64_t saved_bytes(int32_t n_tokens) const;
  void save(int32_t n_tokens, uint8_t *target);
  void load(int32_t n_tokens, const uint8_t *source);

  uint64_t state_bytes() const;  // of all that is held of the text

  double read_seconds = 0;  // spent on pairs of the text, drafts not included

 private:
  float *room_for(int32_t n_past, int32_t n_rows);
  void go_back(int32_t n_past);
  void absorb(int32_t n, int32_t last_token);
  void lay_out_rows(int32_t n, int32_t last_token);
  void settle(const float *last, bool wanted);
  static void read_group(HeadState *const *states, size_t n, float *scores);
  int32_t n_pending() const { return (int32_t)tokens_.size(); }
  int32_t end() const { return base_ + n_pairs_ + n_pending(); }  // the first position of which nothing is known

  ec_head &head_;
  ec_session kv_;
  int32_t base_ = 0, n_pairs_ = 0;  // the pair of position base_ + i is in slot i
  std::vector<int32_t> tokens_;     // of the rows behind the pairs
  std::vector<float> taps_;         // of these rows, [n][n_tapped], and room for those of a forward
  std::vector<float> fused_;        // the feature of the last pair that was made of taps, [n_embd]
  int32_t fused_position_ = -1;     // its position, -1 for none
  std::vector<float> inputs_, outputs_;  // the pairs that are laid out, and what the layer made of the last one
  int32_t slot_ = 0, n_laid_ = 0;        // the first one's slot, and how many there are
  int32_t n_new_ = 0;                    // how many of them are pairs of the text whose features are still to be made
  std::vector<float> branch_inputs_, branch_outputs_;  // by node of a tree, what the layer reads and what it made of that
  int32_t n_drafted_ = -1;  // drafted tokens that were read since begin(); -1 where there is nothing to go on from
};

// Draft a chain behind each text, all of them together: items of sessions that one head follows. Throws as lay_out does.
void draft_chains(ec_draft_item *items, int32_t n);

}  // namespace edgedec

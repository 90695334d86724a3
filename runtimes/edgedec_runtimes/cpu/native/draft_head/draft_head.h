// A trained draft head: its weights, and what it keeps of one session's text.
//
// All heads read features, which `fc` makes of hidden states of the target (the taps). A head of the EAGLE-3 kind
// (arXiv:2503.01840) is one decoder layer that reads pairs of a feature and the embedding of the token that follows
// (pair_state.h). In other heads that read pairs, a matrix joins each pair, and what it makes goes through ordinary
// layers (EAGLE; nextn, or multi-token prediction), which may see the target's keys and values (reading_state.h).
// A head that drafts blocks (DFlash, arXiv:2602.06036; DSpark) has some decoder layers, whose rows are
// the newest token and masks, and which see the features as keys and values (block_state.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "forward/model.h"
#include "forward/plan.h"

namespace edgedec {

class BlockHead;
class DraftHeadState;

// What only a head that drafts blocks has beside its layers; see EC_DRAFT_HEAD_... of the same names.
struct BlockWeights {
  std::vector<float> feature_norm, mask;
  Matrix markov_w1{}, markov_w2{}, markov_gate{}, markov_joint{};
  std::vector<float> markov_gate_bias, markov_joint_bias, confidence, confidence_bias;
};

}  // namespace edgedec

struct ec_draft_head {
  // `layers` is nullptr but for heads that join pairs; `windows` is [n_layer], or nullptr.
  ec_draft_head(ec_model &target, const ec_draft_head_config &config, const ec_config *layers, const int32_t *taps,
                const int32_t *tokens, const int32_t *windows);
  ~ec_draft_head();

  ec_model &target;
  ec_draft_head_config config;
  std::vector<int32_t> taps;    // layers of the target, whose input is tapped
  std::vector<int32_t> tokens;  // the target's id of each token that the head can draft
  const bool joins;             // a matrix joins pairs
  ec_model net;                 // the layers and the output matrix
  edgedec::Matrix fc{}, embedding{}, joint{};
  std::vector<float> fc_norm, rope_divisors, embedding_norm, feature_norm;  // the last two of pairs that are joined
  edgedec::BlockWeights of_block;
  std::vector<uint8_t> below;  // [n_layer of the target], 1 for the layers below the exit of a head that leaves early
  edgedec::MadeRows made;  // of a head that drafts with rows in the target's layers; such a head has no layers of its own
  bool finished = false;

  int64_t n_tapped() const { return (int64_t)config.n_taps * target.config.n_embd; }
  void finish();
  // Return what the head knows of a session's empty text.
  std::shared_ptr<edgedec::DraftHeadState> follow(int32_t n_ctx);
  edgedec::BlockHead &block() { return *block_; }
  // Put items through the layers; scores go to `out`, [n_wanted][n_vocab]. Throws NotFinite.
  void run(const ec_item *items, int32_t n_items, float *out);
  // Where a row lies, and where goes what is made of it.
  struct Made {
    const float *of;
    float *out;
  };
  // Make the features of at most net.max_rows rows of what fc reads: the taps, [n_tapped].
  void fuse(const std::vector<Made> &rows);
  // Make what enters the layers, [n_embd], of at most net.max_rows pairs of an embedding and a feature.
  void join(const std::vector<Made> &pairs);
  // Write the embedding of token i to out + i * stride, [n_embd]. Throws Unreadable.
  void embed(const int32_t *tokens, int32_t n, float *out, int64_t stride);

  std::vector<float> scores;  // of the texts that were read together last, [n][n_vocab]

 private:
  void check_inputs() const;
  void check_reading() const;
  void check_target() const;
  void set_rope();
  void finish_rows();
  void finish_exit();
  void take_output();

  edgedec::ActivationBuffer joined_, pairs_;  // what fc reads, and the joint matrix
  std::vector<float> normed_;
  float embedding_scale_ = 1.0f;
  std::unique_ptr<edgedec::BlockHead> block_;  // nullptr of a head that reads pairs
};

namespace edgedec {

constexpr int32_t LAZY_ROWS = 32;     // rows that a state keeps unread at most
constexpr int32_t KEPT_ROWS = 96;     // rows of taps whose memory is kept between forwards
constexpr int32_t DRAFT_SLOTS = 256;  // slots behind the context for drafted tokens

// What a head keeps of one session's text: the keys and values of the rows that it has read, and the taps of rows that
// it has not. The rows of a forward are read when a later call says with its n_past that they are kept, so a rejected
// draft costs nothing. Where the taps of a position are missing (the text was restored without them), the state begins
// anew behind it.
class DraftHeadState {
 public:
  virtual ~DraftHeadState() = default;
  DraftHeadState &operator=(const DraftHeadState &) = delete;
  // Return a state that shares the keys and values of the first n_tokens of this one's text.
  virtual std::shared_ptr<DraftHeadState> fork(int32_t n_tokens) const = 0;

  ec_draft_head &head() const { return head_; }
  // Note whose text it is.
  virtual void attach(ec_session &) {}

  // --- around a forward of the target ---

  // Return the item as the head has it evaluated: with at most n_most rows of the head behind its own, or with rows that
  // enter behind layers that they have passed; the item itself where there is nothing of that.
  virtual const ec_item &widened(const ec_item &item, int32_t) { return item; }
  // Drop what lies beyond the item's n_past, and have the forward copy the taps of its rows. The plan is of what
  // widened() returned.
  virtual void before(const ec_item &item, Plan &plan, int32_t first_row);
  // Take the rows of a forward that was done.
  virtual void after(const ec_item &item);
  // Take rows that another library has evaluated, whose taps the item holds.
  void take(const ec_item &item);
  // Move rows of the latest forward, as ec_session_move moves their slots.
  virtual void move(const int32_t *source, int32_t n, int32_t start);
  // Have so many rows of the head stand behind the newest token of a forward, behind its draft's first token, ...; in
  // each forward they are expected to take `seconds`. Heads without rows take no notice.
  virtual void place(const int32_t *, int32_t, double) {}
  // Return how many rows of the head the latest forward had.
  virtual int32_t n_added() const { return 0; }

  // --- drafting: each state lays out what is to be read, then all of them are read together ---

  // Lay out what must be read to score what follows `token`, which stands at position n_past; at most n_most tokens are
  // drafted then. Return false where the text before it is not known. Throws Invalid, std::bad_alloc, Unreadable.
  virtual bool lay_out(int32_t n_past, int32_t token, int32_t n_most) = 0;
  // Lay out one more drafted token behind what was read last; return false where there is no room.
  virtual bool lay_out_next(int32_t token) = 0;
  // Read what each state has laid out, all states of one head, in as few forwards as their rows allow. Return the
  // scores of what follows each text, [n][n_vocab]; they stay until the next call. A row's result depends on its own
  // text only, so that texts are drafted together to the same bits as alone.
  static const float *read(const std::vector<DraftHeadState *> &states);
  // Return the chance that the best token of the latest scores, of probability p, is accepted.
  virtual float sure(float p) const = 0;
  // Write the scores of what follows each of the last n_new of n nodes to `scores`, [n_new][n_vocab]: a tree of drafted
  // tokens behind what lay_out() laid out and read() read. The nodes before them are those of the last call, in their
  // order. Return false where there is no room. Throws as lay_out does, NotFinite.
  virtual bool read_branches(const int32_t *tokens, const int32_t *parents, int32_t n, int32_t n_new,
                             float *scores) = 0;

  // --- the text's state as bytes ---

  uint64_t saved_bytes(int32_t n_tokens) const;
  void save(int32_t n_tokens, uint8_t *target);
  void load(int32_t n_tokens, const uint8_t *source);
  // The keys and values of the slots [begin, end) of a text, in whole pages. save_pages() returns whether all of them,
  // and a row behind them, are known; load_pages() knows the first `end` positions then. Both throw Invalid.
  uint64_t page_bytes() const { return (uint64_t)kv_.cache.shape().page_bytes(); }
  bool save_pages(int32_t begin, int32_t end, uint8_t *target, uint64_t n_bytes);
  void load_pages(int32_t begin, int32_t end, const uint8_t *source, uint64_t n_bytes);

  virtual uint64_t state_bytes() const;  // of all that is held of the text

  double read_seconds = 0;  // spent on rows of the text, drafts not included

 protected:
  DraftHeadState(ec_draft_head &head, int32_t n_ctx);
  DraftHeadState(const DraftHeadState &other);

  // Keep what is known of the first n_past positions.
  void go_back(int32_t n_past);
  // Read all unread rows that can be read.
  void absorb();
  // Drop n rows of taps and their tokens, which were read.
  void drop_read(int32_t n);
  int32_t n_pending() const { return (int32_t)tokens_.size(); }
  int32_t end() const { return base_ + n_read_ + n_pending(); }  // the first position of which nothing is known

  ec_draft_head &head_;
  ec_session kv_;
  int32_t base_ = 0, n_read_ = 0;  // the keys and values of position base_ + i are in slot i
  std::vector<int32_t> tokens_;    // of the rows that are not read
  std::vector<float> taps_;        // of these rows, [n][n_tapped], and room for those of a forward

 private:
  float *room_for(int32_t n_past, int32_t n_rows);
  // --- what kinds of heads differ in ---
  // Forget what depends on positions from n_past on, and the draft that was begun.
  virtual void forget(int32_t n_past) = 0;
  virtual void absorb_rows() = 0;
  // Return how many rows of a forward the state has laid out.
  virtual int32_t n_laid() const = 0;
  // Read what n states have laid out together, and write the scores of what follows each text.
  virtual void read_group(DraftHeadState *const *states, size_t n, float *scores) = 0;
  // How many rows absorb() may leave unread, and what is saved beside keys and values.
  virtual int32_t most_unread() const = 0;
  virtual uint64_t extra_bytes() const = 0;
  virtual void save_extra(uint8_t *target) const = 0;
  virtual void load_extra(const uint8_t *source) = 0;
};

// Whether a forward's taps are those of tokens, and of no rows that enter behind the layers that the head reads.
bool has_tokens(const ec_item &item);

// Draft a chain behind each text, all of them together: items of sessions that one head follows. Throws as lay_out
// does.
void draft_chains(ec_draft_item *items, int32_t n);

}  // namespace edgedec

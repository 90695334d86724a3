// What layers with a recurrent state (the gated delta rule, Mamba-2) remember of a session's text.
//
// A state S can't be cut back. So a session keeps, of each layer, S behind the first base() rows of the text, and a log
// of the rows after them. Every forward folds the rows that were accepted since into S, as its n_past and its rows say,
// and applies its own rows to a copy of S: a row that is rejected is dropped from the log, and nothing else happens. A
// long chain, as of a prompt, folds its own rows too, but for the last ones.
//
// Going back further than base() needs a checkpoint, which is an S of before, or the empty state: the rows from there
// on are evaluated again (call.cpp), with the same bits.
//
// The layers of a row in the log are records: what a convolution reads of the row, and what the row does to S, which is
// S = decay * S + key update^T for each head.
//
//   column   [n_column]               what the convolution goes over
//   keys     [n_key_head][n_key]
//   decays   [n_head]
//   updates  [n_head][n_lanes()]      lanes behind n_value are 0
//
// The rows of the log, like the states, are shared by forks and checkpoints, and never change once a forward is over.
#pragma once
#include <memory>
#include <vector>

#include "edgedec_cpu.h"
#include "forward/row_notes.h"
#include "kernels/kernels.h"

namespace edgedec {

struct RecurrentShape {
  std::vector<int32_t> layers;  // the numbers of those that have a state
  int32_t n_head = 0, n_key_head = 0;
  int32_t n_key = 0, n_value = 0;  // a head's state is [n_key][n_value]
  int32_t n_column = 0;
  int32_t n_back = 0;     // columns that a row reads beside its own
  bool tiled = false;     // heads 0, 1, ... have the keys 0, 1, ... in turn; else the first heads all have key 0
  bool corrects = false;  // updates depend on the state (the delta rule)

  int32_t n_layer() const { return (int32_t)layers.size(); }
  int64_t n_tiles() const { return (n_value + STATE_LANES - 1) / STATE_LANES; }
  int64_t n_lanes() const { return n_tiles() * STATE_LANES; }
  int64_t tile_floats() const { return (int64_t)n_key * STATE_LANES; }
  // A layer's state is [n_head][n_tiles()][n_key][STATE_LANES].
  int64_t state_floats() const { return n_head * n_tiles() * tile_floats(); }
  // Where a record has its parts, and its size.
  int64_t keys() const { return n_column; }
  int64_t decays() const { return keys() + (int64_t)n_key_head * n_key; }
  int64_t updates() const { return decays() + n_head; }
  int64_t record_floats() const { return updates() + n_head * n_lanes(); }
  int32_t key_of(int32_t head) const { return tiled ? head % n_key_head : head / (n_head / n_key_head); }
};

constexpr int32_t LOGGED_ROWS = 32;          // rows that a long chain leaves in the log
constexpr int32_t SPARE_ROWS = 8;          // whose memory is kept when they are dropped
constexpr int32_t MOST_CHECKPOINTS = 4;    // of a session
constexpr int32_t CHECKPOINT_ROWS = 2048;  // between two of them while a long text is read

class RecurrentState {
 public:
  // What a forward does to a layer's S: the rows [begin, end) of the log are folded, those of [end, n_past) are only
  // applied to the copy. Then the first n_own rows of the forward are folded, and the others applied to the copy.
  struct Fold {
    int32_t begin, end, n_past, n_own;
    const float *source;  // S before; nullptr: the empty state, which is all zero
    float *target;        // where S is stored, which may be `source`; nullptr where nothing is folded
  };

  explicit RecurrentState(const RecurrentShape &shape);
  // Share what is known of the first n_tokens.
  RecurrentState(const RecurrentState &other, int32_t n_tokens);

  const RecurrentShape &shape() const { return shape_; }
  bool is_used() const { return !shape_.layers.empty(); }

  // Return n_past where the rows before it are held; else the position from which rows are to be evaluated again.
  int32_t held_before(int32_t n_past) const;
  // Whether some layer has folded more than the first n_past rows.
  bool is_behind(int32_t n_past) const;
  // Go back to a position that held_before() has returned in place of another.
  void go_back(int32_t position);
  // Begin a forward: drop the rows behind n_past, plan the folds, and make memory for states and records
  // (std::bad_alloc). `notes` says what the rows before were. Without `whole`, rows of the forward are not folded.
  void begin(const ec_item &item, const RowNotes &notes, bool whole = true);
  // End a forward. Those of the first n_layers layers that have a state went through their folds; `done`: all of the
  // forward was evaluated.
  void end(int32_t n_layers, bool done);
  void move(const int32_t *source, int32_t n, int32_t start);

  // The number of a layer is here that among the layers with a state.
  const Fold &fold(int32_t layer) const { return folds_[(size_t)layer]; }
  // Return the record of the row in a slot; nullptr where the log does not have it.
  float *record(int32_t slot, int32_t layer) const {
    const int64_t i = (int64_t)slot - first_;
    if (i < 0 || i >= (int64_t)log_.size() || !log_[(size_t)i]) return nullptr;
    return log_[(size_t)i].get() + layer * shape_.record_floats();
  }

  // What is saved is S behind n_tokens rows, with `before` also the last checkpoint before, and the columns before each;
  // the rows before n_tokens must be held.
  uint64_t saved_bytes(bool before) const;
  void save(const Kernels &kernels, const RowNotes &notes, int32_t n_tokens, uint8_t *target, bool before) const;
  // Throws Invalid for a checkpoint that is not in the text. Without one, what is loaded is a checkpoint.
  void load(int32_t n_tokens, const uint8_t *source, bool before);

 private:
  using Floats = std::shared_ptr<float>;
  enum class Reading { none, text, end };  // whether a forward reads a part of a text, or the end of one
  struct Checkpoint {
    int32_t n_tokens;
    std::vector<Floats> states;  // by layer
    std::vector<Floats> rows;    // the last rows before n_tokens, for their columns
  };

  int32_t least_base() const;
  int32_t verified(const ec_item &item, const RowNotes &notes) const;
  void make_records(int32_t begin, int32_t end);
  void cut(int32_t n_tokens);
  void forget_before(int32_t slot);
  void keep_checkpoint();
  std::vector<Floats> rows_before(int32_t slot) const;
  uint8_t *put(int32_t layer, const float *state, const std::vector<Floats> &rows, uint8_t *target) const;
  const uint8_t *take(int32_t layer, const uint8_t *source, Floats &state, std::vector<Floats> &rows);

  RecurrentShape shape_;
  std::vector<int32_t> bases_;  // by layer: rows that S has; they differ only where a forward was cancelled
  std::vector<Floats> states_;  // by layer; nullptr: the empty state
  int32_t first_ = 0;           // the slot of the log's first row
  std::vector<Floats> log_;     // rows, [layers][record_floats()] each
  std::vector<Floats> spare_;   // memory of rows that were dropped
  std::vector<Checkpoint> checkpoints_;
  std::vector<Fold> folds_;     // of the forward that runs, as those below
  std::vector<Floats> next_;
  Reading reading_ = Reading::none;
  bool resumes_ = false;        // the lower layers of its rows were evaluated by an earlier forward
};

// Fold the row of a record into a tile of a layer's state: number `piece` of [n_head][n_tiles()].
void fold_record(const Kernels &kernels, const RecurrentShape &shape, const float *record, int64_t piece,
                 float *state);

}  // namespace edgedec

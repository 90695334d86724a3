#include "forward/recurrent_state.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "forward/model.h"

namespace edgedec {
namespace {

std::shared_ptr<float> new_floats(int64_t n) {
  float *floats = (float *)malloc((size_t)n * sizeof(float));
  if (floats == nullptr) throw std::bad_alloc();
  return std::shared_ptr<float>(floats, free);
}

}  // namespace

RecurrentState::RecurrentState(const RecurrentShape &shape)
    : shape_(shape),
      bases_(shape.layers.size(), 0),
      states_(shape.layers.size()),
      folds_(shape.layers.size()),
      next_(shape.layers.size()) {}

RecurrentState::RecurrentState(const RecurrentState &other, int32_t n_tokens) : RecurrentState(other.shape_) {
  bases_ = other.bases_;
  states_ = other.states_;
  first_ = other.first_;
  log_ = other.log_;
  checkpoints_ = other.checkpoints_;
  cut(n_tokens);
}

int32_t RecurrentState::least_base() const { return *std::min_element(bases_.begin(), bases_.end()); }

bool RecurrentState::is_behind(int32_t n_past) const {
  return is_used() && n_past < *std::max_element(bases_.begin(), bases_.end());
}

int32_t RecurrentState::held_before(int32_t n_past) const {
  if (!is_used() || (!is_behind(n_past) && n_past - first_ <= (int64_t)log_.size())) return n_past;
  int32_t position = 0;
  for (const Checkpoint &checkpoint : checkpoints_)
    if (checkpoint.n_tokens <= n_past) position = checkpoint.n_tokens;
  return position;
}

void RecurrentState::go_back(int32_t position) {
  while (!checkpoints_.empty() && checkpoints_.back().n_tokens > position) checkpoints_.pop_back();
  const bool is_kept = !checkpoints_.empty() && checkpoints_.back().n_tokens == position;
  if (position != 0 && !is_kept) throw Invalid("the session has no checkpoint at this position");
  states_ = is_kept ? checkpoints_.back().states : std::vector<Floats>(states_.size());
  log_ = is_kept ? checkpoints_.back().rows : std::vector<Floats>();
  first_ = position - (int32_t)log_.size();
  bases_.assign(bases_.size(), position);
}

// Return how many rows of the text may be folded: those before the first one that ran through other half-layers than
// the text, which is a draft and will be evaluated once more; and all that are old.
int32_t RecurrentState::verified(const ec_item &item, const RowNotes &notes) const {
  int32_t n = least_base();
  while (n < item.n_past && (notes.ran_as_first(n) || item.n_past - n > LOGGED_ROWS)) ++n;
  return n;
}

void RecurrentState::begin(const ec_item &item, const RowNotes &notes, bool whole) {
  if (!is_used()) return;
  resumes_ = item.groups[0].first_layer > 0;
  if (!resumes_) cut(item.n_past);
  const int32_t n_verified = verified(item, notes), first_wanted = item.n_wanted > 0 ? item.wanted[0] : item.n_rows;
  const bool is_chain = whole && item.parents == nullptr && item.block == EC_BLOCK_NONE && !resumes_;
  const int32_t n_long = is_chain && n_verified == item.n_past ? std::min(item.n_rows - LOGGED_ROWS, first_wanted) : 0;
  const int32_t n_own = std::max(n_long, 0);
  const bool reads = is_chain && item.n_rows > 1 && first_wanted >= item.n_rows - 1;
  reading_ = !reads ? Reading::none : item.n_wanted == 0 ? Reading::text : Reading::end;
  for (size_t l = 0; l < folds_.size(); ++l) {
    next_[l].reset();
    const int32_t begin = bases_[l], end = std::max(begin, n_verified);
    float *target = nullptr;
    if (begin < end || n_own > 0) {
      if (states_[l].use_count() != 1) next_[l] = new_floats(shape_.state_floats());
      target = next_[l] ? next_[l].get() : states_[l].get();
    }
    folds_[l] = {begin, end, item.n_past, n_own, states_[l].get(), target};
  }
  make_records(std::max(item.n_past, n_own > 0 ? item.n_past + n_own - shape_.n_back : 0), item.n_past + item.n_rows);
}

// Make the records of the slots [begin, end) writable; what they hold stays. Where rows are folded at once, the log has
// a gap before them.
void RecurrentState::make_records(int32_t begin, int32_t end) {
  log_.resize(std::max(log_.size(), (size_t)(end - first_)));
  for (int32_t slot = begin; slot < end; ++slot) {
    Floats &row = log_[(size_t)(slot - first_)];
    if (row && row.use_count() == 1) continue;
    const int64_t n = shape_.n_layer() * shape_.record_floats();
    const Floats before = row;
    if (spare_.empty()) spare_.push_back(new_floats(n));
    row = spare_.back();
    spare_.pop_back();
    if (before) memcpy(row.get(), before.get(), (size_t)n * sizeof(float));
  }
}

// Hold nothing behind the first n_tokens rows.
void RecurrentState::cut(int32_t n_tokens) {
  while (first_ + (int64_t)log_.size() > n_tokens && !log_.empty()) {
    if (log_.back().use_count() == 1 && spare_.size() < SPARE_ROWS) spare_.push_back(log_.back());
    log_.pop_back();
  }
  while (!checkpoints_.empty() && checkpoints_.back().n_tokens > n_tokens) checkpoints_.pop_back();
}

void RecurrentState::forget_before(int32_t slot) {
  const int32_t n = std::min(std::max(slot - first_, 0), (int32_t)log_.size());
  for (int32_t i = 0; i < n; ++i)
    if (log_[(size_t)i].use_count() == 1 && spare_.size() < SPARE_ROWS) spare_.push_back(log_[(size_t)i]);
  log_.erase(log_.begin(), log_.begin() + n);
  first_ += n;
}

void RecurrentState::end(int32_t n_layers, bool done) {
  for (size_t l = 0; l < folds_.size(); ++l) {
    const Fold &fold = folds_[l];
    if (shape_.layers[l] < n_layers && fold.target != nullptr) {
      bases_[l] = fold.n_own > 0 ? fold.n_past + fold.n_own : fold.end;
      if (next_[l]) states_[l] = next_[l];
    }
    next_[l].reset();
  }
  if (!is_used()) return;
  if (!done && !resumes_) cut(folds_[0].n_past);
  forget_before(least_base() - shape_.n_back);
  if (done && reading_ != Reading::none) keep_checkpoint();
}

// Return the last n_back rows before a slot.
std::vector<RecurrentState::Floats> RecurrentState::rows_before(int32_t slot) const {
  const auto begin = log_.begin() + (std::max(slot - shape_.n_back, 0) - first_), end = log_.begin() + (slot - first_);
  return {begin, end};
}

// Keep S as a checkpoint, where a text ends or enough rows follow the last one. Of too many, the one goes whose
// neighbours are nearest to each other, by their distance to the end.
void RecurrentState::keep_checkpoint() {
  const int32_t base = least_base(), last = checkpoints_.empty() ? 0 : checkpoints_.back().n_tokens;
  if (base != *std::max_element(bases_.begin(), bases_.end())) return;
  if (base <= last || (reading_ == Reading::text && base - last < CHECKPOINT_ROWS)) return;
  checkpoints_.push_back({base, states_, rows_before(base)});
  if (checkpoints_.size() <= (size_t)MOST_CHECKPOINTS) return;
  size_t worst = 0;
  double least = 2;
  for (size_t i = 0; i + 1 < checkpoints_.size(); ++i) {
    const double before = i == 0 ? 0 : checkpoints_[i - 1].n_tokens, after = checkpoints_[i + 1].n_tokens;
    const double share = (after - before) / (base - before);
    if (share < least) worst = i, least = share;
  }
  checkpoints_.erase(checkpoints_.begin() + (std::ptrdiff_t)worst);
}

void RecurrentState::move(const int32_t *source, int32_t n, int32_t start) {
  if (!is_used()) return;
  for (int32_t i = 0; i < n; ++i) {
    const int64_t from = (int64_t)source[i] - first_, to = (int64_t)start + i - first_;
    if (to < 0 || from >= (int64_t)log_.size() || !log_[(size_t)from])
      throw Invalid("the slots to move are not of the latest forward");
    log_[(size_t)to] = log_[(size_t)from];
  }
}

uint64_t RecurrentState::saved_bytes(bool before) const {
  if (!is_used()) return 0;
  const uint64_t columns = (uint64_t)shape_.n_back * (uint64_t)shape_.n_column;
  const uint64_t of_layer = ((uint64_t)shape_.state_floats() + columns) * sizeof(float);
  const uint64_t of_all = (uint64_t)shape_.n_layer() * of_layer;
  return before ? sizeof(int32_t) + 2 * of_all : of_all;
}

// Write a layer's state, and the columns of the last rows before it, to `target`; the columns of fewer rows than n_back
// come last. Return the end of what was written.
uint8_t *RecurrentState::put(int32_t layer, const float *state, const std::vector<Floats> &rows,
                             uint8_t *target) const {
  const size_t n_state = (size_t)shape_.state_floats() * sizeof(float);
  const size_t n_column = (size_t)shape_.n_column * sizeof(float);
  if (state != nullptr) memcpy(target, state, n_state);
  else memset(target, 0, n_state);
  target += n_state;
  const size_t n_absent = (size_t)shape_.n_back - rows.size();
  memset(target, 0, n_absent * n_column);
  target += n_absent * n_column;
  for (const Floats &row : rows) {
    memcpy(target, row.get() + layer * shape_.record_floats(), n_column);
    target += n_column;
  }
  return target;
}

// Read what put() wrote, to rows that are there.
const uint8_t *RecurrentState::take(int32_t layer, const uint8_t *source, Floats &state, std::vector<Floats> &rows) {
  const size_t n_state = (size_t)shape_.state_floats() * sizeof(float);
  const size_t n_column = (size_t)shape_.n_column * sizeof(float);
  state = new_floats(shape_.state_floats());
  memcpy(state.get(), source, n_state);
  source += n_state + ((size_t)shape_.n_back - rows.size()) * n_column;
  for (Floats &row : rows) {
    memcpy(row.get() + layer * shape_.record_floats(), source, n_column);
    source += n_column;
  }
  return source;
}

void RecurrentState::save(const Kernels &kernels, const RowNotes &notes, int32_t n_tokens, uint8_t *target,
                          bool before) const {
  if (!is_used()) return;
  Checkpoint last{0, std::vector<Floats>(states_.size()), {}};
  for (const Checkpoint &checkpoint : checkpoints_)
    if (checkpoint.n_tokens < n_tokens) last = checkpoint;
  const std::vector<Floats> rows = rows_before(n_tokens);
  std::vector<float> state((size_t)shape_.state_floats());
  for (int32_t l = 0; l < shape_.n_layer(); ++l) {
    const float *base = states_[(size_t)l].get();
    if (base != nullptr) std::copy_n(base, state.size(), state.begin());
    else std::fill(state.begin(), state.end(), 0.0f);
    for (int32_t slot = bases_[(size_t)l]; slot < n_tokens; ++slot)
      if (notes.ran(slot, shape_.layers[(size_t)l]))
        for (int64_t i = 0; i < shape_.n_head * shape_.n_tiles(); ++i)
          fold_record(kernels, shape_, record(slot, l), i, state.data() + i * shape_.tile_floats());
    target = put(l, state.data(), rows, target);
  }
  if (!before) return;
  memcpy(target, &last.n_tokens, sizeof(int32_t));
  target += sizeof(int32_t);
  for (int32_t l = 0; l < shape_.n_layer(); ++l) target = put(l, last.states[(size_t)l].get(), last.rows, target);
}

void RecurrentState::load(int32_t n_tokens, const uint8_t *source, bool before) {
  if (!is_used()) return;
  RecurrentState loaded(shape_);
  loaded.first_ = std::max(0, n_tokens - shape_.n_back);
  loaded.make_records(loaded.first_, n_tokens);
  for (int32_t l = 0; l < shape_.n_layer(); ++l)
    source = loaded.take(l, source, loaded.states_[(size_t)l], loaded.log_);
  loaded.bases_.assign(bases_.size(), n_tokens);
  if (!before) {
    if (n_tokens > 0) loaded.checkpoints_.push_back({n_tokens, loaded.states_, loaded.rows_before(n_tokens)});
    *this = std::move(loaded);
    return;
  }
  Checkpoint last{0, std::vector<Floats>(states_.size()), {}};
  memcpy(&last.n_tokens, source, sizeof(int32_t));
  source += sizeof(int32_t);
  if (last.n_tokens < 0 || (last.n_tokens > 0 && last.n_tokens >= n_tokens))
    throw Invalid("the saved state is damaged: its checkpoint is not in the text");
  for (int32_t i = 0; i < std::min(last.n_tokens, shape_.n_back); ++i)
    last.rows.push_back(new_floats(shape_.n_layer() * shape_.record_floats()));
  for (int32_t l = 0; last.n_tokens > 0 && l < shape_.n_layer(); ++l)
    source = take(l, source, last.states[(size_t)l], last.rows);
  if (last.n_tokens > 0) loaded.checkpoints_.push_back(last);
  *this = std::move(loaded);
}

void fold_record(const Kernels &kernels, const RecurrentShape &shape, const float *record, int64_t piece,
                 float *state) {
  const int64_t head = piece / shape.n_tiles(), tile = piece % shape.n_tiles();
  kernels.fold_state(state, shape.n_key, record + shape.keys() + shape.key_of((int32_t)head) * (int64_t)shape.n_key,
                     record + shape.updates() + head * shape.n_lanes() + tile * STATE_LANES,
                     record[shape.decays() + head]);
}

}  // namespace edgedec

// The recurrence of a layer with a state: what it does between the stage that makes the records of its rows
// (delta_stages.cpp) and the one that reads its results.
#include <string.h>

#include <algorithm>

#include "forward/run.h"

namespace edgedec {

size_t state_scratch(const ec_model &model, const Plan &plan) {
  const RecurrentShape &r = model.recurrent;
  return (size_t)std::max((1 + plan.n_kept_states) * r.tile_floats(), 2 * (int64_t)r.n_head * r.n_value);
}

// Return the record of row i of those that run this layer: in the log, or in memory of the forward for those that are
// folded at once.
float *Run::record_of(const Layer &layer, const RowInfo &row, int64_t i) const {
  float *record = plan_.items[row.item].session->states.record(row.slot, layer.state);
  return record != nullptr ? record : m_.records.data() + i * m_.recurrent.record_floats();
}

// Return the column that row i goes over at a position: of a row of the forward, which is in m_.mix, or of one before
// it; nullptr where there is none.
const float *Run::column_of(const Layer &layer, const RowInfo &row, int64_t i, int32_t position) const {
  if (position < 0) return nullptr;
  const ec_item &item = plan_.items[row.item];
  const int32_t slot = slot_of(row, position);
  if (slot >= item.n_past) return m_.mix.data() + (i - row.index + slot - item.n_past) * layer.mix_width;
  return item.session->states.record(slot, layer.state);
}

// Convolve the elements [begin, begin + n) of the columns of row i and of the tokens before it. Each element is summed
// up in the order of positions, without any fusing, so that it has the same bits on all processors.
void Run::convolve_columns(const Layer &layer, const RowInfo &row, int64_t i, int64_t begin, int64_t n,
                           float *out) const {
  const int32_t n_back = m_.recurrent.n_back;
  std::fill_n(out, n, 0.0f);
  for (int32_t k = 0; k <= n_back; ++k) {
    const float *column = column_of(layer, row, i, row.position - (n_back - k));
    const float *kernel = layer.vectors[EC_CONVOLUTION].data() + (int64_t)k * m_.recurrent.n_column + begin;
    for (int64_t j = 0; column != nullptr && j < n; ++j) out[j] += kernel[j] * column[begin + j];
  }
}

// Let the rows of a layer, and those that were accepted since, go through its states. A piece is a tile of the state of
// one head and one session: it is read once, folded, stored, and goes on through the rows of the forward as a copy.
void Run::scan(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t n_pieces = m_.recurrent.n_head * m_.recurrent.n_tiles();
  const auto folds = [&](int32_t i) { return plan_.items[i].session->states.fold(layer.state).target != nullptr; };
  bool is_needed = !rows.empty();
  for (int32_t i = 0; i < plan_.n_items && !is_needed; ++i) is_needed = folds(i);
  if (is_needed) {
    stages_.each(thread, plan_.n_items * n_pieces, [&](int64_t piece) {
      scan_piece(l, rows, (int32_t)(piece / n_pieces), piece % n_pieces, memory);
    });
  }
  // A thread that is late comes here after others are at later layers.
  for (int32_t n = n_folded.load(std::memory_order_relaxed);
       n <= l && !n_folded.compare_exchange_weak(n, l + 1, std::memory_order_relaxed);) {
  }
}

void Run::scan_piece(int32_t l, const std::vector<int32_t> &rows, int32_t item, int64_t piece, float *memory) const {
  const Layer &layer = m_.layers[(size_t)l];
  const RecurrentShape &shape = m_.recurrent;
  const ec_session &session = *plan_.items[item].session;
  const RecurrentState::Fold &fold = session.states.fold(layer.state);
  const RowRange range = plan_.range_of(l, item);
  if (range.begin == range.end && fold.target == nullptr) return;
  const size_t n = (size_t)shape.tile_floats();
  float *state = memory;
  if (fold.source != nullptr) memcpy(state, fold.source + (size_t)piece * n, n * sizeof(float));
  else std::fill_n(state, n, 0.0f);
  const auto store = [&] {
    if (fold.target != nullptr) memcpy(fold.target + (size_t)piece * n, state, n * sizeof(float));
  };
  const auto apply = [&](int32_t begin, int32_t end) {
    for (int32_t slot = begin; slot < end; ++slot) {
      const float *record = session.states.record(slot, layer.state);
      if (record != nullptr && session.notes.ran(slot, l)) fold_record(k_, shape, record, piece, state);
    }
  };
  apply(fold.begin, fold.end);
  if (fold.n_own == 0) store();
  if (range.begin == range.end && fold.n_own == 0) return;
  apply(fold.end, fold.n_past);
  if (plan_.items[item].parents == nullptr) {
    for (size_t i = range.begin; i < range.end; ++i) {
      scan_row(layer, rows, i, piece, state);
      if ((int64_t)(i - range.begin) + 1 == fold.n_own) store();
    }
    if (range.begin == range.end) store();
    return;
  }
  for (const TreeStep &step : plan_.tree_steps[(size_t)item]) {
    if (step.load >= 0) memcpy(state, memory + (size_t)(1 + step.load) * n, n * sizeof(float));
    if (step.row >= 0) scan_row(layer, rows, range.begin + (size_t)step.row, piece, state);
    if (step.keep >= 0) memcpy(memory + (size_t)(1 + step.keep) * n, state, n * sizeof(float));
  }
}

// Let row i of those that run a layer go through a tile of its states.
void Run::scan_row(const Layer &layer, const std::vector<int32_t> &rows, size_t i, int64_t piece, float *state) const {
  const RecurrentShape &shape = m_.recurrent;
  const int32_t head = (int32_t)(piece / shape.n_tiles());
  const int64_t lanes = piece * STATE_LANES, key = shape.key_of(head) * (int64_t)shape.n_key;
  float *record = record_of(layer, plan_.rows[(size_t)rows[i]], (int64_t)i);
  const float gain = shape.corrects ? m_.gains[i * (size_t)shape.n_head + (size_t)head] : 1.0f;
  k_.step_state(state, shape.n_key, record + shape.keys() + key,
                m_.queries.data() + (int64_t)i * shape.n_key_head * shape.n_key + key, record + shape.updates() + lanes,
                record[shape.decays() + head], gain, shape.corrects,
                m_.scanned.data() + (int64_t)i * shape.n_head * shape.n_lanes() + lanes);
}

}  // namespace edgedec

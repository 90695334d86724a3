// How much attention rows give to each slot, added up in the order of the rows: so a sum does not depend on how the
// rows are cut into forwards, or on the number of threads.
#include <algorithm>

#include "forward/run.h"

namespace edgedec {

// Add up the attention of a layer for the items that want it; a piece is one key-value head of an item.
void Run::add_mass(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  for (const RowRange &range : plan_.ranges(l)) {
    const ec_item &item = plan_.items[plan_.rows[(size_t)rows[range.begin]].item];
    for (int32_t i = 0; i < item.n_mass; ++i) {
      if (item.mass_layers[i] != l) continue;
      float *to = item.mass + (int64_t)i * item.n_mass_heads * item.n_mass_slots;
      const float *row_weights = item.mass_weights + (int64_t)i * item.n_rows;
      stages_.each(thread, m_.layers[(size_t)l].shape.n_head_kv,
                   [&](int64_t head) { add_mass_of_head(l, rows, range, head, row_weights, to, memory); });
    }
  }
}

// Do so for the queries of one key-value head; `to` is of all heads, [n_mass_heads][n_mass_slots].
void Run::add_mass_of_head(int32_t l, const std::vector<int32_t> &rows, const RowRange &range, int64_t head,
                           const float *row_weights, float *to, float *memory) const {
  const Layer &layer = m_.layers[(size_t)l];
  const ec_item &item = plan_.items[plan_.rows[(size_t)rows[range.begin]].item];
  const std::vector<float> &sinks = layer.vectors[EC_SINKS];
  const int64_t per_row = layer.shape.n_head / layer.shape.n_head_kv, stride = plan_.n_spans() * SPAN_TOKENS;
  AttentionWork w = work_of(l, head, item, memory);
  float *weights = w.unpacked + (SPAN_TOKENS + PAGE_TOKENS) * w.head_dim;
  float factors[QUERY_GROUP], *sums[QUERY_GROUP];
  const auto add_weights = [&] {
    w.span_begin = *std::min_element(w.start, w.start + w.n_queries) / SPAN_TOKENS;
    w.span_end = (*std::max_element(w.visible, w.visible + w.n_queries) - 1) / SPAN_TOKENS + 1;
    k_.weigh(w, weights, stride);
    for (int32_t q = 0; q < w.n_queries; ++q)
      for (int64_t slot = w.start[q]; slot < w.visible[q]; ++slot)
        sums[q][slot] += factors[q] * weights[q * stride + slot];
    w.n_queries = 0;
  };
  for (size_t i = range.begin; i < range.end; ++i) {
    const RowInfo &row = plan_.rows[(size_t)rows[i]];
    if (row_weights[row.index] == 0.0f) continue;
    for (int64_t h = head * per_row; h < (head + 1) * per_row; ++h) {
      const int32_t q = w.n_queries++;
      w.query[q] = m_.qkv.data() + (int64_t)i * width_of(layer) + h * query_stride(layer);
      w.visible[q] = row.visible;
      w.start[q] = layer.window > 0 ? std::max(0, row.window_end - layer.window) : 0;
      w.sink[q] = sinks.empty() ? nullptr : sinks.data() + h;
      factors[q] = row_weights[row.index];
      sums[q] = to + h * item.n_mass_slots;
      if (w.n_queries == QUERY_GROUP) add_weights();
    }
  }
  if (w.n_queries > 0) add_weights();
}

}  // namespace edgedec

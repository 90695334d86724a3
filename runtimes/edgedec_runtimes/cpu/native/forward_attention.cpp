// The attention block of a layer.
#include <string.h>

#include <algorithm>

#include "forward_run.h"

namespace edgedec {
namespace {

constexpr int QUERY_GROUP = 8;         // queries that share what a kernel loads
constexpr int CHUNKS_PER_THREAD = 3;   // with fewer chunks of queries, spans are cut as well
constexpr int PIECES_PER_THREAD = 6;   // there are then

}  // namespace

bool Run::attention_block(int thread, int32_t l, float *memory) {
  const std::vector<int32_t> &rows = plan_.attn(l);
  if (rows.empty()) return true;
  if (!fetch(thread, EC_PART_QKV, l)) return false;
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t width = m_.n_q() + 2 * m_.n_kv();
  float *qkv = m_.qkv.data();
  const Target targets[3] = {{&layer.matrices[EC_Q], qkv, width},
                             {&layer.matrices[EC_K], qkv + m_.n_q(), width},
                             {&layer.matrices[EC_V], qkv + m_.n_q() + m_.n_kv(), width}};
  look_for_cancel(thread);
  const Activations &normed = norm(thread, rows, layer.vectors[EC_ATTN_NORM], memory);
  products(thread, EC_OP_QKV, normed, (int64_t)rows.size(), targets, 3, memory);
  if (stopped) return false;
  release(thread, EC_PART_QKV, l);
  write_keys_and_values(thread, l, layer, rows, memory);
  attend(thread, l, layer, rows, memory);
  if (!fetch(thread, EC_PART_ATTN_OUT, l)) return false;
  add_product(thread, EC_OP_ATTN_OUT, m_.attended.view(), rows, layer.matrices[EC_ATTN_OUT],
              layer.vectors[EC_POST_ATTN_NORM], memory);
  release(thread, EC_PART_ATTN_OUT, l);
  return true;
}

// Add biases, apply the norms of heads, rotate, and write the keys and values to the cache.
void Run::write_keys_and_values(int thread, int32_t l, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const int32_t per_row = c_.n_head_kv, group = c_.n_head / c_.n_head_kv, d = c_.head_dim;
  for (int piece; (piece = take(thread)) < (int)rows.size() * per_row;) {
    const int i = piece / per_row, head = piece % per_row;
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    const float *cos_sin = m_.cos_sin[layer.sliding].data() + (int64_t)rows[(size_t)i] * c_.n_rot;
    float *base = m_.qkv.data() + i * (m_.n_q() + 2 * m_.n_kv());
    for (int32_t h = head * group; h < (head + 1) * group; ++h)
      prepare_head(base + h * d, layer.vectors[EC_Q_BIAS], h, layer.vectors[EC_Q_NORM], cos_sin, memory);
    float *keys = base + m_.n_q() + head * d, *values = keys + m_.n_kv();
    KVCache &cache = plan_.items[row.item].session->cache;
    prepare_head(keys, cache.shape().n_rot > 0 ? none_ : layer.vectors[EC_K_BIAS], head, layer.vectors[EC_K_NORM], cos_sin, memory);
    const std::vector<float> &bias = layer.vectors[EC_V_BIAS];
    if (!bias.empty()) k_.add(values, bias.data() + head * d, d);
    cache.write(k_, l, head, row.slot, keys, values);
  }
  next_stage(thread, EC_OP_ROPE);
}

void Run::prepare_head(float *x, const std::vector<float> &bias, int32_t head, const std::vector<float> &weight,
                  const float *cos_sin, float *memory) {
  const int32_t d = c_.head_dim;
  if (!bias.empty()) k_.add(x, bias.data() + head * d, d);
  if (!weight.empty()) {
    k_.rms_norm(x, weight.data(), c_.rms_epsilon, d, memory);
    memcpy(x, memory, (size_t)d * sizeof(float));
  }
  k_.rope(x, cos_sin, c_.n_rot, c_.rope_interleaved != 0);
}

// How the attention of the rows of one item is cut: chunks of queries, and the spans that they see into parts where there
// are few chunks. A piece is one part of one chunk of one key-value head.
struct Run::AttentionCut {
  int64_t chunk, n_chunks, n_parts;
};

Run::AttentionCut Run::cut(const RowRange &range, size_t n_ranges) const {
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t n_queries = (int64_t)(range.end - range.begin) * (c_.n_head / c_.n_head_kv), n_threads = m_.pool.size();
  const int64_t n_heads = (int64_t)n_ranges * c_.n_head_kv, n_spans = plan_.n_spans(), wanted = CHUNKS_PER_THREAD * n_threads;
  const bool may_cut_spans = n_threads > 1 && !m_.kept.empty() && plan_.n_rows <= CUT_ROWS;
  const int64_t least = divided(n_queries, divided(wanted, n_heads));
  const int64_t chunk = std::min<int64_t>(divided(least, QUERY_GROUP) * QUERY_GROUP, MAX_QUERIES);
  const int64_t n_chunks = divided(n_queries, chunk), n_pieces = n_heads * n_chunks;
  if (!may_cut_spans || n_pieces >= wanted) return {chunk, n_chunks, 1};
  return {chunk, n_chunks, std::min(n_spans, divided(PIECES_PER_THREAD * n_threads, n_pieces))};
}

void Run::attend(int thread, int32_t l, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const std::vector<RowRange> &ranges = plan_.ranges(l);
  for (int taken; (taken = take(thread)) >= 0;) {
    int64_t piece = taken, n_before = 0;
    size_t i = 0;
    for (; i < ranges.size(); ++i) {
      const AttentionCut of = cut(ranges[i], ranges.size());
      const int64_t n_chunks = of.n_chunks * c_.n_head_kv;
      if (piece < n_chunks * of.n_parts) {  // the last chunk, which sees most, comes first
        const int64_t which = n_chunks - 1 - piece / of.n_parts;
        attend_chunk(l, layer, rows, ranges[i], of, which, n_before + which, piece % of.n_parts, memory);
        break;
      }
      piece -= n_chunks * of.n_parts;
      n_before += n_chunks;
    }
    if (i == ranges.size()) break;
  }
  next_stage(thread, EC_OP_ATTENTION);
  if (c_.head_dim % 32 == 0 || m_.attended.view().blocks == nullptr) return;
  for (int i; (i = take(thread)) < (int)rows.size();)
    k_.quantize(m_.attended.view(), i, 0, m_.n_q(), m_.attention.data() + i * m_.n_q());
  next_stage(thread, EC_OP_ATTENTION);
}

// The floats of scratch memory that attention needs.
size_t attention_scratch(const ec_model &model, const Plan &plan) {
  const size_t d = (size_t)model.config.head_dim, tree = (size_t)(plan.n_rows / PAGE_TOKENS + 2) * PAGE_TOKENS;
  return MAX_QUERIES * (d + SPAN_TOKENS) + QUERY_GROUP * (d + tree) + (SPAN_TOKENS + PAGE_TOKENS) * d;
}

void Run::attend_chunk(int32_t l, const Layer &layer, const std::vector<int32_t> &rows, const RowRange &range,
                       const AttentionCut &of, int64_t which, int64_t number, int64_t part, float *memory) {
  const int64_t group = c_.n_head / c_.n_head_kv, d = c_.head_dim, head = which % c_.n_head_kv;
  const int64_t first = which / c_.n_head_kv * of.chunk;
  const int64_t n = std::min<int64_t>(of.chunk, (int64_t)(range.end - range.begin) * group - first);
  const ec_item &item = plan_.items[plan_.rows[(size_t)rows[range.begin]].item];
  const KVCache &cache = item.session->cache;
  AttentionWork w{};
  w.head_dim = c_.head_dim;
  w.n_queries = (int32_t)n;
  w.layout = cache.shape().layout;
  w.rotations = cache.shape().rotations();
  w.n_rot = cache.shape().n_rot;
  w.rope_interleaved = c_.rope_interleaved != 0;
  if (w.n_rot > 0 && !layer.vectors[EC_K_BIAS].empty()) w.key_bias = layer.vectors[EC_K_BIAS].data() + head * d;
  w.pages = cache.pages();
  w.offset = cache.shape().offset(l, (int32_t)head);
  w.n_prefix = item.n_past;
  w.n_slots = item.n_past + item.n_rows;
  w.scale = c_.attention_scale;
  w.packed = memory;
  w.weights = w.packed + MAX_QUERIES * d;
  w.sums = w.weights + MAX_QUERIES * SPAN_TOKENS;
  w.tree_scores = w.sums + QUERY_GROUP * d;
  w.tree_stride = (plan_.n_rows / PAGE_TOKENS + 2) * PAGE_TOKENS;
  w.unpacked = w.tree_scores + QUERY_GROUP * w.tree_stride;
  int64_t at[MAX_QUERIES], begin = INT64_MAX, end = 0;
  for (int64_t q = 0; q < n; ++q) {
    const int64_t i = (int64_t)range.begin + (first + q) / group, h = head * group + (first + q) % group;
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    at[q] = i * m_.n_q() + h * d;
    w.query[q] = m_.qkv.data() + i * (m_.n_q() + 2 * m_.n_kv()) + h * d;
    w.out[q] = m_.attention.data() + at[q];
    w.visible[q] = row.position + 1;
    w.start[q] = layer.sliding ? std::max(0, row.position + 1 - c_.sliding_window) : 0;
    w.path[q] = item.parents != nullptr ? plan_.paths.data() + row.path_begin : nullptr;
    begin = std::min<int64_t>(begin, w.start[q] / SPAN_TOKENS);
    end = std::max<int64_t>(end, row.position / SPAN_TOKENS + 1);
  }
  const int64_t per_part = (end - begin + of.n_parts - 1) / of.n_parts;
  w.span_begin = std::min(end, begin + part * per_part);
  w.span_end = std::min(end, w.span_begin + per_part);
  w.n_spans = plan_.n_spans();
  const int64_t query = head * (int64_t)rows.size() * group + (int64_t)range.begin * group + first;
  if (of.n_parts > 1) w.kept = m_.kept.data() + query * w.n_spans * (d + 2);
  k_.attend(w);
  if (of.n_parts > 1) {
    std::atomic<int64_t> &n_finished = n_finished_[(size_t)number];
    if (n_finished.fetch_add(1, std::memory_order_acq_rel) != of.n_parts - 1) return;
    n_finished.store(0, std::memory_order_relaxed);
    k_.join_spans(w);
  }
  for (int64_t q = 0; q < n; ++q)
    if (d % 32 == 0 || m_.attended.view().blocks == nullptr)
      k_.quantize(m_.attended.view(), at[q] / m_.n_q(), at[q] % m_.n_q(), d, m_.attention.data() + at[q]);
}

}  // namespace edgedec

// The attention block of a layer.
#include <string.h>

#include <algorithm>

#include "forward_run.h"

namespace edgedec {

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
  norm(thread, rows, layer.vectors[EC_ATTN_NORM], memory);
  products(thread, EC_OP_QKV, m_.normed.view(), (int64_t)rows.size(), targets, 3, memory);
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

// Compute attention. A piece is some queries of one item and one key-value head, in the order of rows, then of heads.
void Run::attend(int thread, int32_t l, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const int32_t group = c_.n_head / c_.n_head_kv;
  for (int piece;;) {
    piece = take(thread);
    // Find the item and the queries of this piece.
    size_t begin = 0;
    bool found = false;
    while (begin < rows.size()) {
      const int32_t item = plan_.rows[(size_t)rows[begin]].item;
      size_t end = begin;
      while (end < rows.size() && plan_.rows[(size_t)rows[end]].item == item) ++end;
      const int n_queries = (int)(end - begin) * group, chunk = chunk_size(n_queries);
      const int n_chunks = (n_queries + chunk - 1) / chunk, n_pieces = n_chunks * c_.n_head_kv;
      if (piece < n_pieces) {
        const int head = piece / n_chunks, first = piece % n_chunks * chunk;
        attend_chunk(l, layer, rows, begin, head, first, std::min(chunk, n_queries - first), memory);
        found = true;
        break;
      }
      piece -= n_pieces;
      begin = end;
    }
    if (!found) break;
  }
  next_stage(thread, EC_OP_ATTENTION);
  if (c_.head_dim % 32 == 0 || m_.attended.view().blocks == nullptr) return;
  for (int i; (i = take(thread)) < (int)rows.size();)
    k_.quantize(m_.attended.view(), i, 0, m_.n_q(), m_.attention.data() + i * m_.n_q());
  next_stage(thread, EC_OP_ATTENTION);
}

// The number of queries of a piece: so few that there is a piece for every thread, also with few heads.
int Run::chunk_size(int n_queries) const {
  const int wanted = (m_.pool.size() + c_.n_head_kv - 1) / c_.n_head_kv;
  return std::max(1, std::min(MAX_QUERIES, (n_queries + wanted - 1) / wanted));
}

void Run::attend_chunk(int32_t l, const Layer &layer, const std::vector<int32_t> &rows, size_t begin, int head, int first,
                  int n, float *memory) {
  const int32_t group = c_.n_head / c_.n_head_kv, d = c_.head_dim;
  const ec_item &item = plan_.items[plan_.rows[(size_t)rows[begin]].item];
  const KVCache &cache = item.session->cache;
  AttentionWork w{};
  w.head_dim = d;
  w.n_queries = n;
  w.layout = cache.shape().layout;
  w.rotations = cache.shape().rotations();
  w.n_rot = cache.shape().n_rot;
  w.rope_interleaved = c_.rope_interleaved != 0;
  if (w.n_rot > 0 && !layer.vectors[EC_K_BIAS].empty()) w.key_bias = layer.vectors[EC_K_BIAS].data() + (int64_t)head * d;
  w.pages = cache.pages();
  w.offset = cache.shape().offset(l, head);
  w.n_prefix = item.n_past;
  w.scale = c_.attention_scale;
  w.stride = plan_.most_slots + 64;
  w.scores = memory;
  w.tree_scratch = memory + w.stride * MAX_QUERIES;
  w.packed = w.tree_scratch + w.stride;
  w.unpacked = w.packed + MAX_QUERIES * std::max(d, PAGE_TOKENS);
  int64_t at[MAX_QUERIES];
  for (int q = 0; q < n; ++q) {
    const int64_t i = (int64_t)begin + (first + q) / group, h = head * group + (first + q) % group;
    const RowInfo &row = plan_.rows[(size_t)rows[(size_t)i]];
    at[q] = i * m_.n_q() + h * d;
    w.query[q] = m_.qkv.data() + i * (m_.n_q() + 2 * m_.n_kv()) + h * d;
    w.out[q] = m_.attention.data() + at[q];
    w.visible[q] = row.position + 1;
    w.start[q] = layer.sliding ? std::max(0, row.position + 1 - c_.sliding_window) : 0;
    w.path[q] = item.parents != nullptr ? plan_.paths.data() + row.path_begin : nullptr;
    w.n_slots = std::max(w.n_slots, item.parents != nullptr ? item.n_past + item.n_rows : w.visible[q]);
  }
  k_.attend(w);
  for (int q = 0; q < n; ++q)
    if (d % 32 == 0 || m_.attended.view().blocks == nullptr)
      k_.quantize(m_.attended.view(), at[q] / m_.n_q(), at[q] % m_.n_q(), d, m_.attention.data() + at[q]);
}

}  // namespace edgedec

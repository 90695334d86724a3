// The mixer of a layer, and of its stages those of attention; the others are in short_conv_stages.cpp and
// state_stages.cpp.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "forward/run.h"

namespace edgedec {
namespace {

constexpr int CHUNKS_PER_THREAD = 3;   // with fewer chunks of queries, spans are cut as well
constexpr int PIECES_PER_THREAD = 6;   // there are then

}  // namespace

// The block of attention, of a convolution or of a recurrence; attention and a recurrence may stand side by side: they
// read the same, and both are added.
bool Run::mixer_block(int thread, int32_t l, float *memory) {
  const std::vector<int32_t> &rows = plan_.attn(l), &going_on = plan_.attending(l);
  const Layer &layer = m_.layers[(size_t)l];
  if (rows.empty() || !layer.mixes()) {
    if (layer.recurs()) scan(thread, l, rows, memory);  // what was accepted since
    return true;
  }
  if (!fetch(thread, EC_PART_QKV, l) || !goes_on(thread)) return false;
  const int64_t n_q = m_.n_q(layer), width = n_q + 2 * m_.n_kv(layer);
  Target targets[7];
  int n_targets = 0;
  float *qkv = m_.qkv.data(), *mix = m_.mix.data();
  for (int which : {EC_Q, EC_K, EC_V, EC_MIX, EC_MIX_GATE, EC_MIX_ALPHA, EC_MIX_BETA}) {
    const Matrix &matrix = layer.matrices[which];
    if (matrix.n_rows == 0) continue;
    float *&out = which <= EC_V ? qkv : mix;
    targets[n_targets++] = {&matrix, out, which <= EC_V ? width : layer.mix_width};
    out += matrix.n_rows;
  }
  const Activations &input = attention_input(thread, layer, rows, memory);
  products(thread, input, rows, targets, n_targets, memory);
  release(thread, EC_PART_QKV, l);
  mix_rows(thread, l, rows, memory);
  if (going_on.empty()) return true;
  if (!fetch(thread, EC_PART_ATTN_OUT, l)) return false;
  const Behind behind = {layer.vectors[EC_POST_ATTN_NORM], layer.around_attention};
  if (layer.attends() || layer.convolves()) {
    const Activations of_heads = layer.convolves() ? m_.convolved.view() : attended(layer);
    add_product(thread, of_heads, going_on, layer.matrices[EC_ATTN_OUT], behind, memory);
  }
  if (layer.recurs()) add_product(thread, mixed(), going_on, layer.matrices[EC_MIX_OUT], behind, memory);
  add_output_bias(thread, layer, going_on);
  release(thread, EC_PART_ATTN_OUT, l);
  return true;
}

// What a mixer does between its products: with all rows of a layer, and then with those that go on.
void Run::mix_rows(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  const std::vector<int32_t> &going_on = plan_.attending(l);
  const bool is_space = c_.state_rule == EC_RULE_SPACE;
  if (layer.convolves()) write_columns(thread, layer, rows);
  if (layer.attends()) write_keys_and_values(thread, layer, rows, memory);
  if (layer.recurs()) {
    if (is_space) make_space_records(thread, layer, rows, memory);
    else make_delta_records(thread, layer, rows);
    scan(thread, l, rows, memory);
  }
  if (going_on.empty()) return;
  if (layer.convolves()) convolve(thread, l, going_on, memory);
  if (layer.attends()) attend(thread, l, going_on, memory);
  if (layer.attends() && plan_.adds_mass) add_mass(thread, l, going_on, memory);
  if (!layer.recurs()) return;
  if (is_space) pass_results(thread, l, going_on, memory);
  else gate_results(thread, l, going_on, memory);
}

// Return what the output matrix reads: layers differ in its length.
Activations Run::attended(const Layer &layer) const {
  Activations found = m_.attended.view();
  found.n = layer.n_q();
  return found;
}

// Add the bias of the output matrix.
void Run::add_output_bias(int thread, const Layer &layer, const std::vector<int32_t> &rows) {
  const std::vector<float> &bias = layer.vectors[EC_ATTN_OUT_BIAS];
  if (bias.empty()) return;
  stages_.each(thread, (int64_t)rows.size(), [&](int64_t i) {
    k_.add(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, bias.data(), c_.residual_scale, c_.n_embd);
  });
}

// Add biases, apply the norms of heads and rotate (in the architecture's order), and write the keys and values to the
// cache; of a layer that reads those of another one, only the queries are there. A piece is one key-value head of some
// rows: neighbours, as the keys of 16 tokens share cache lines.
void Run::write_keys_and_values(int thread, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
  const int n = (int)rows.size(), n_together = n > KEY_BLOCK ? KEY_BLOCK : 4;
  if (c_.wide_norms) {
    stages_.each(thread, n, [&](int64_t i) {
      float *q = m_.qkv.data() + i * width_of(layer);
      norm_wide(q, layer.vectors[EC_Q_NORM], memory);
      if (layer.stores_kv) norm_wide(q + layer.n_q(), layer.vectors[EC_K_NORM], memory);
    });
  }
  const int n_heads = layer.shape.n_head_kv;
  stages_.each(thread, (n + n_together - 1) / n_together * n_heads, [&](int64_t piece) {
    const int first = (int)piece / n_heads * n_together;
    for (int i = first; i < std::min(n, first + n_together); ++i)
      write_head(layer, i, plan_.rows[(size_t)rows[(size_t)i]], (int)piece % n_heads, memory);
  });
}

// Normalize the queries or the keys of all heads of a row together.
void Run::norm_wide(float *x, const std::vector<float> &weight, float *memory) {
  if (weight.empty()) return;
  k_.rms_norm(x, weight.data(), c_.rms_epsilon, (int64_t)weight.size(), memory);
  memcpy(x, memory, weight.size() * sizeof(float));
}

// Do so for row i of those that run this block.
void Run::write_head(const Layer &layer, int64_t i, const RowInfo &row, int32_t head, float *memory) {
  const int32_t group = layer.shape.n_head / layer.shape.n_head_kv, d = layer.shape.head_dim;
  const int64_t number = &row - plan_.rows.data();
  const int rope = m_.rope_of(layer), n_rot = layer.unrotated ? 0 : m_.rope[rope].n_rot();
  const float *cos_sin = m_.cos_sin[rope].data() + number * n_rot;
  const auto prepare = [&](float *x, const std::vector<float> &bias, int32_t h, const std::vector<float> &norm) {
    const auto rotate = [&] {
      if (n_rot != 0) k_.rope(x, cos_sin, n_rot, c_.rope_interleaved != 0);
    };
    if (!bias.empty()) k_.add(x, bias.data() + h * d, 1.0f, d);
    if (c_.norms_after_rope) rotate();
    if (!norm.empty() && !c_.wide_norms) {
      k_.rms_norm(x, norm.data(), c_.rms_epsilon, d, memory);
      memcpy(x, memory, (size_t)d * sizeof(float));
    }
    if (!c_.norms_after_rope) rotate();
  };
  const float temperature = temperature_at(row.position);
  float *base = m_.qkv.data() + i * width_of(layer);
  for (int32_t h = head * group; !layer.only_stores() && h < (head + 1) * group; ++h) {
    float *query = base + h * query_stride(layer);
    prepare(query, layer.vectors[EC_Q_BIAS], h, layer.vectors[EC_Q_NORM]);
    for (int32_t j = 0; temperature != 1.0f && j < d; ++j) query[j] *= temperature;
  }
  if (!layer.stores_kv) return;
  float *keys = base + m_.n_q(layer) + head * d, *values = keys + layer.n_kv();
  KVCache &cache = plan_.items[row.item].session->cache;
  const std::vector<float> &bias = layer.vectors[EC_V_BIAS];
  if (layer.matrices[EC_V].n_rows == 0) memcpy(values, keys, (size_t)d * sizeof(float));
  prepare(keys, cache.shape().n_rot > 0 ? none_ : layer.vectors[EC_K_BIAS], head, layer.vectors[EC_K_NORM]);
  if (!bias.empty()) k_.add(values, bias.data() + head * d, 1.0f, d);
  if (c_.value_norm != 0) {
    k_.rms_norm(values, m_.ones.data(), c_.rms_epsilon, d, memory);
    memcpy(values, memory, (size_t)d * sizeof(float));
  }
  cache.write(k_, layer.number, head, row.slot, keys, values);
}

// Return what a query at a position is multiplied by, so that attention stays as sharp over long texts.
float Run::temperature_at(int32_t position) const {
  if (c_.temperature_tokens == 0) return 1.0f;
  return (float)(1.0 + c_.temperature_scale * log(1.0 + position / c_.temperature_tokens));
}

// How the attention of a group of rows is cut: chunks of queries, and the spans that they see into parts where there
// are few chunks. A piece is one part of one chunk of one key-value head.
struct Run::AttentionCut {
  int64_t chunk, n_chunks, n_parts;
};

struct Run::AttentionPiece {
  const AttentionGroup *group;
  AttentionCut of;
  int64_t head, first_query, part;
  int64_t number;  // of the chunk, among those of all groups and heads of a step
};

Run::AttentionCut Run::cut(const Layer &layer, const AttentionGroup &group, size_t n_groups) const {
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t per_row = layer.shape.n_head / layer.shape.n_head_kv, n_threads = m_.pool.size();
  const int64_t n_queries = (int64_t)group.rows.size() * per_row;
  const int64_t n_heads = (int64_t)n_groups * layer.shape.n_head_kv, wanted = CHUNKS_PER_THREAD * n_threads;
  // With `together`, spans are cut in place of queries, so that each is read once; one thread has nothing to cut.
  const bool is_long = group.end - group.begin >= PIECES_PER_THREAD * n_threads;
  const bool together = n_threads == 1 || (n_kept_ > 0 && (group.unfinished || is_long));
  const int64_t least = together ? n_queries : divided(n_queries, divided(wanted, n_heads));
  const int64_t chunk = std::min<int64_t>(divided(least, QUERY_GROUP) * QUERY_GROUP, MAX_QUERIES);
  const int64_t n_chunks = divided(n_queries, chunk), n_pieces = n_heads * n_chunks;
  if (n_kept_ == 0 || n_pieces >= wanted) return {chunk, n_chunks, 1};
  return {chunk, n_chunks, std::min(group.end - group.begin, divided(PIECES_PER_THREAD * n_threads, n_pieces))};
}

int64_t Run::count_pieces(const Layer &layer, const std::vector<AttentionGroup> &groups) const {
  int64_t n = 0;
  for (const AttentionGroup &group : groups) {
    const AttentionCut of = cut(layer, group, groups.size());
    n += of.n_chunks * layer.shape.n_head_kv * of.n_parts;
  }
  return n;
}

// Return a piece of a step by its number.
Run::AttentionPiece Run::find_piece(const Layer &layer, const std::vector<AttentionGroup> &groups,
                                    int64_t number) const {
  const int32_t n_heads = layer.shape.n_head_kv;
  int64_t n_before = 0;
  for (const AttentionGroup &group : groups) {
    const AttentionCut of = cut(layer, group, groups.size());
    const int64_t n_chunks = of.n_chunks * n_heads;
    if (number < n_chunks * of.n_parts) {
      const int64_t chunk = n_chunks - 1 - number / of.n_parts;  // the last rows, which see most, come first
      return {&group, of, chunk % n_heads, chunk / n_heads * of.chunk, number % of.n_parts, n_before + chunk};
    }
    number -= n_chunks * of.n_parts;
    n_before += n_chunks;
  }
  return {};
}

void Run::attend(int thread, int32_t l, const std::vector<int32_t> &rows, float *memory) {
  const Layer &layer = m_.layers[(size_t)l];
  for (const std::vector<AttentionGroup> &groups : plan_.steps(l)) {
    stages_.each(thread, count_pieces(layer, groups),
                 [&](int64_t number) { attend_piece(l, rows, find_piece(layer, groups, number), memory); });
  }
  const Activations out = attended(layer);
  if (layer.shape.head_dim % 32 == 0 || out.blocks == nullptr) return;
  stages_.each(thread, (int64_t)rows.size(),
               [&](int64_t i) { k_.quantize(out, i, 0, out.n, m_.attention.data() + i * out.n); });
}

size_t attention_scratch(const ec_model &model, const Plan &plan) {
  const size_t d = (size_t)model.most([](const Layer &layer) { return layer.shape.head_dim; }), tree = (size_t)(plan.n_rows / PAGE_TOKENS + 2) * PAGE_TOKENS;
  const size_t mass = plan.adds_mass ? (size_t)plan.n_spans() * SPAN_TOKENS : 0;
  return MAX_QUERIES * (d + SPAN_TOKENS) + QUERY_GROUP * (d + tree + mass) + (SPAN_TOKENS + PAGE_TOKENS) * d;
}

size_t attention_kept(const ec_model &model, const Plan &plan) {
  if (model.pool.size() == 1 || plan.n_rows > EC_CUT_ROWS) return 0;
  const size_t of_row = (size_t)model.most([](const Layer &layer) { return layer.n_q() + 2 * layer.shape.n_head; });
  const size_t n = (size_t)plan.n_rows * of_row * (size_t)plan.n_spans();
  return n <= (size_t)EC_MOST_KEPT ? n : 0;
}

// Describe the keys and values of one layer and head for attention, and where its scratch memory is.
AttentionWork Run::work_of(int32_t l, int64_t head, const ec_item &item, float *memory) const {
  const KVCache &cache = item.session->cache;
  const Layer &layer = m_.layers[(size_t)l];
  const std::vector<float> &bias = layer.vectors[EC_K_BIAS];
  const KVLayer &stored = cache.shape().layers[(size_t)layer.number];
  const int64_t d = stored.head_dim;
  AttentionWork w{};
  w.head_dim = stored.head_dim;
  w.layout = stored.layout;
  w.rotations = cache.shape().rotations;
  w.n_rot = layer.unrotated ? 0 : cache.shape().n_rot;
  w.rope_interleaved = c_.rope_interleaved != 0;
  if (cache.shape().n_rot > 0 && !bias.empty()) w.key_bias = bias.data() + head * d;
  w.pages = cache.pages();
  w.offset = stored.offset((int32_t)head);
  w.n_prefix = item.n_past;
  w.n_slots = item.n_past + item.n_rows;
  w.scale = c_.attention_scale;
  w.softcap = c_.attention_softcap;
  w.n_spans = plan_.n_spans();
  w.packed = memory;
  w.weights = w.packed + MAX_QUERIES * d;
  w.sums = w.weights + MAX_QUERIES * SPAN_TOKENS;
  w.tree_scores = w.sums + QUERY_GROUP * d;
  w.tree_stride = (plan_.n_rows / PAGE_TOKENS + 2) * PAGE_TOKENS;
  w.unpacked = w.tree_scores + QUERY_GROUP * w.tree_stride;
  return w;
}

// Let a piece's queries be those of its rows. Return the spans that they see, of those that their group attends to.
Run::Spans Run::set_queries(AttentionWork &w, int32_t l, const std::vector<int32_t> &rows,
                            const AttentionPiece &piece) {
  const AttentionGroup &group = *piece.group;
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t per_row = layer.shape.n_head / layer.shape.n_head_kv, d = layer.shape.head_dim;
  const std::vector<float> &sinks = layer.vectors[EC_SINKS], &biases = layer.vectors[EC_DISTANCE_BIAS];
  const int32_t role = layer.shape.role;
  w.n_queries = (int32_t)std::min(piece.of.chunk, (int64_t)group.rows.size() * per_row - piece.first_query);
  w.resumed = group.resumed;
  w.unfinished = group.unfinished;
  Spans seen = {group.end, group.begin};
  for (int32_t q = 0; q < w.n_queries; ++q) {
    const int64_t query = piece.first_query + q, h = piece.head * per_row + query % per_row;
    const AttentionGroup::Row &at = group.rows[(size_t)(query / per_row)];
    const RowInfo &row = plan_.rows[(size_t)rows[at.place]];
    const int32_t n_source = plan_.items[row.item].n_source;
    // What rows share is before a tree.
    const bool in_tree = plan_.items[row.item].parents != nullptr && !group.unfinished;
    w.query[q] = m_.qkv.data() + (int64_t)at.query * width_of(layer) + h * query_stride(layer);
    w.out[q] = m_.attention.data() + (int64_t)at.place * layer.n_q() + h * d;
    w.state[q] = states_.empty() ? nullptr : states_.data() + 2 * ((int64_t)at.place * layer.shape.n_head + h);
    w.visible[q] = role == EC_ROLE_CROSS ? n_source : row.visible;
    w.start[q] = layer.window > 0 ? std::max(0, row.window_end - layer.window) : role == EC_ROLE_DECODER ? n_source : 0;
    w.sink[q] = sinks.empty() ? nullptr : sinks.data() + h;
    w.distance_bias[q] = biases.empty() ? nullptr : biases.data() + h * (2 * EC_MOST_DISTANCE + 1);
    w.position[q] = row.position;
    w.path[q] = in_tree ? plan_.paths.data() + row.path_begin : nullptr;
    seen.begin = std::min<int64_t>(seen.begin, w.start[q] / SPAN_TOKENS);
    seen.end = std::max<int64_t>(seen.end, (w.visible[q] - 1) / SPAN_TOKENS + 1);
  }
  const int64_t end = std::min(seen.end, group.end);
  return {std::min(std::max(seen.begin, group.begin), end), end};
}

void Run::attend_piece(int32_t l, const std::vector<int32_t> &rows, const AttentionPiece &piece, float *memory) {
  const AttentionGroup &group = *piece.group;
  const Layer &layer = m_.layers[(size_t)l];
  const int64_t per_row = layer.shape.n_head / layer.shape.n_head_kv, d = layer.shape.head_dim;
  const int64_t n_parts = piece.of.n_parts;
  AttentionWork w = work_of(l, piece.head, plan_.items[plan_.rows[(size_t)rows[group.rows[0].place]].item], memory);
  const Spans seen = set_queries(w, l, rows, piece);
  const int64_t per_part = (seen.end - seen.begin + n_parts - 1) / n_parts;
  w.span_begin = std::min(seen.end, seen.begin + piece.part * per_part);
  w.span_end = std::min(seen.end, w.span_begin + per_part);
  const int64_t first = (piece.head * (int64_t)rows.size() + (int64_t)group.n_before) * per_row + piece.first_query;
  if (n_parts > 1) w.kept = m_.kept.data() + first * w.n_spans * (d + 2);
  k_.attend(w);
  if (n_parts > 1) {  // the thread that finishes the last part joins all of them
    std::atomic<int64_t> &n_finished = n_finished_[(size_t)piece.number];
    if (n_finished.fetch_add(1, std::memory_order_acq_rel) != n_parts - 1) return;
    n_finished.store(0, std::memory_order_relaxed);
    w.span_begin = seen.begin;
    w.span_end = seen.end;
    k_.join_spans(w);
  }
  const Activations out = attended(layer);
  if (group.unfinished) return;
  for (int32_t q = 0; c_.attention_gate != 0 && q < w.n_queries; ++q)
    k_.multiply_by_sigmoid(w.out[q], w.query[q] + d, d);
  if (d % 32 != 0 && out.blocks != nullptr) return;
  for (int32_t q = 0; q < w.n_queries; ++q) {
    const int64_t at = w.out[q] - m_.attention.data();
    k_.quantize(out, at / out.n, at % out.n, d, w.out[q]);
  }
}

}  // namespace edgedec

// One forward: every thread runs the same function over the layers and takes its part of the work of each stage.
//
// Which thread does what does not change a result: a piece of work is some rows of a matrix, some rows of activations
// or some queries, and its result depends on nothing else. So pieces are handed out as threads become free.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "model.h"
#include "tensor_types.h"
#include "tiles.h"

namespace edgedec {
namespace {

constexpr int PANEL_TILES = 2;  // 32 rows of a matrix: one block of quantized activations
constexpr int PANEL_ROWS = PANEL_TILES * TILE_ROWS;
constexpr int PIECES_PER_THREAD = 4;
constexpr int BAND = 64;  // most activations that pass a panel together
constexpr int64_t BAND_ELEMENTS = 1 << 18;  // of those activations, so that they stay in the L2 cache

int64_t band_rows(int64_t n_cols) {
  const int64_t rows = BAND_ELEMENTS / n_cols / GROUP_ROWS * GROUP_ROWS;
  return std::max<int64_t>(GROUP_ROWS, std::min<int64_t>(BAND, rows));
}

// A row of the forward.
struct RowInfo {
  int32_t item, index;  // of its item, and within it
  int32_t slot, position;
  int32_t path_begin, path_length;  // into Plan::paths, for trees
};

struct Plan {
  const ec_item *items;
  int32_t n_items, n_rows = 0, n_wanted = 0, most_slots = 0;
  std::vector<RowInfo> rows;
  std::vector<int32_t> paths;         // slots of the rows on the way from the prefix to each row of a tree
  std::vector<int32_t> wanted;        // rows of the forward
  std::vector<int32_t> first_row;     // by item
  std::vector<std::vector<int32_t>> attn_rows, mlp_rows;  // by layer; empty vectors of vectors: all rows, all layers
  std::vector<int32_t> all_rows;

  const std::vector<int32_t> &attn(int32_t layer) const { return attn_rows.empty() ? all_rows : attn_rows[(size_t)layer]; }
  const std::vector<int32_t> &mlp(int32_t layer) const { return mlp_rows.empty() ? all_rows : mlp_rows[(size_t)layer]; }
};

void add_paths(Plan &plan, const ec_item &item, int32_t first) {
  for (int32_t i = 0; i < item.n_rows; ++i) {
    RowInfo &row = plan.rows[(size_t)(first + i)];
    const int32_t parent = item.parents[i];
    row.path_begin = (int32_t)plan.paths.size();
    if (parent >= 0) {
      const RowInfo &p = plan.rows[(size_t)(first + parent)];
      for (int32_t j = 0; j < p.path_length; ++j) plan.paths.push_back(plan.paths[(size_t)(p.path_begin + j)]);
      row.path_length = p.path_length;
    }
    plan.paths.push_back(row.slot);
    row.path_length += 1;
    row.position = item.n_past + row.path_length - 1;
  }
}

void check_item(const ec_model &model, const ec_item &item) {
  const ec_config &c = model.config;
  const auto require = [](bool holds, const char *message) {
    if (!holds) throw Invalid(message);
  };
  require(item.session != nullptr && item.session->model == &model, "an item's session belongs to another model");
  require(item.n_rows > 0 && item.n_past >= 0, "an item has no rows, or a negative n_past");
  require((int64_t)item.n_past + item.n_rows <= item.session->cache.n_ctx(), "an item is longer than its session");
  require((item.tokens == nullptr) != (item.hidden == nullptr), "an item has either tokens or hidden states");
  require(item.first_layer >= 0 && item.first_layer <= c.n_layer, "first_layer is out of range");
  require(item.hidden != nullptr || item.first_layer == 0, "tokens begin with layer 0");
  for (int32_t i = 0; i < item.n_rows; ++i) {
    require(item.tokens == nullptr || (item.tokens[i] >= 0 && item.tokens[i] < c.n_vocab), "a token is out of range");
    require(item.parents == nullptr || (item.parents[i] >= -1 && item.parents[i] < i), "a parent is out of range");
  }
  require(item.n_wanted >= 0 && item.n_taps >= 0, "a count is negative");
  for (int32_t i = 0; i < item.n_wanted; ++i)
    require(item.wanted[i] >= 0 && item.wanted[i] < item.n_rows, "a wanted row is out of range");
  for (int32_t i = 0; i < item.n_taps; ++i)
    require(item.taps[i] >= item.first_layer && item.taps[i] < c.n_layer, "a tap is out of range");
}

Plan make_plan(const ec_model &model, const ec_item *items, int32_t n_items) {
  Plan plan{};
  plan.items = items;
  plan.n_items = n_items;
  bool subset = false;
  for (int32_t i = 0; i < n_items; ++i) {
    const ec_item &item = items[i];
    check_item(model, item);
    for (int32_t j = 0; j < i; ++j)
      if (items[j].session == item.session) throw Invalid("a session stands twice in one forward");
    if (item.n_rows > model.max_rows - plan.n_rows) throw Invalid("a forward has too many rows");
    plan.first_row.push_back(plan.n_rows);
    for (int32_t r = 0; r < item.n_rows; ++r) {
      plan.rows.push_back({i, r, item.n_past + r, item.n_past + r, 0, 0});
      plan.all_rows.push_back(plan.n_rows + r);
    }
    if (item.parents != nullptr) add_paths(plan, item, plan.n_rows);
    for (int32_t w = 0; w < item.n_wanted; ++w) plan.wanted.push_back(plan.n_rows + item.wanted[w]);
    plan.n_rows += item.n_rows;
    plan.most_slots = std::max(plan.most_slots, item.n_past + item.n_rows);
    subset = subset || item.attn != nullptr || item.mlp != nullptr || item.first_layer > 0;
  }
  plan.n_wanted = (int32_t)plan.wanted.size();
  if (!subset) return plan;
  plan.attn_rows.resize((size_t)model.config.n_layer);
  plan.mlp_rows.resize((size_t)model.config.n_layer);
  for (int32_t l = 0; l < model.config.n_layer; ++l)
    for (int32_t r = 0; r < plan.n_rows; ++r) {
      const ec_item &item = items[plan.rows[(size_t)r].item];
      if (l < item.first_layer) continue;
      if (item.attn == nullptr || item.attn[l]) plan.attn_rows[(size_t)l].push_back(r);
      if (item.mlp == nullptr || item.mlp[l]) plan.mlp_rows[(size_t)l].push_back(r);
    }
  return plan;
}

// Whether no value is infinite or no number: the exponent's bits are not all ones.
bool all_finite(const float *values, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof bits);
    found |= (uint32_t)((bits & 0x7f800000u) == 0x7f800000u);
  }
  return found == 0;
}

// --- the stages; every thread calls them ----------------------------------------------------------------------------

class Run {
 public:
  Run(ec_model &model, const Plan &plan, float *logits, const volatile int32_t *cancel)
      : m_(model), c_(model.config), k_(*model.kernels), plan_(plan), logits_(logits), cancel_(cancel) {}

  void operator()(int thread) {
    float *memory = m_.thread_memory[(size_t)thread].data();
    embed(thread);
    for (int32_t l = 0; l < c_.n_layer; ++l) {
      // Thread 0 decides before the barrier and the others read after it. A layer without rows has no later barrier
      // that would keep thread 0 from deciding anew before they have read.
      const bool runs = !plan_.attn(l).empty() || !plan_.mlp(l).empty();
      if (thread == 0 && runs && cancel_ != nullptr && *cancel_ != 0) stopped = true;
      next_stage(thread, EC_OP_OTHER);
      if (runs && stopped) return;
      if (!attention_block(thread, l, memory) || !mlp_block(thread, l, memory)) return;
      if (thread == 0) copy_taps(l);
    }
    head(thread, memory);
  }

  bool stopped = false;
  std::atomic<bool> finite{true};  // all logits

 private:
  // End a stage: everybody waits, and the counter of pieces starts anew.
  void next_stage(int thread, int operation) {
    m_.pool.barrier();
    // Three counters take turns, so that the one to be reset is in nobody's hands.
    const int64_t stage = ++stages_[(size_t)thread].number;
    if (thread != 0) return;
    counters_[(stage + 1) % 3].reset();
    const auto now = std::chrono::steady_clock::now();
    m_.seconds[operation] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  // Have a part of the weights in memory, and at its end give it back; false: it is not to be had, and all threads leave.
  bool fetch(int thread, int32_t part) { return !streamed_ || m_.streamer.fetch(thread, part, cancel_); }
  bool fetch(int thread, int32_t stage, int32_t l) { return fetch(thread, Streamer::part(stage, l)); }
  void release(int thread, int32_t part) {
    if (streamed_ && thread == 0) m_.streamer.release(part);
  }
  void release(int thread, int32_t stage, int32_t l) { release(thread, Streamer::part(stage, l)); }

  int take(int thread) { return counters_[stages_[(size_t)thread].number % 3].take(); }

  void embed(int thread) {
    for (int r; (r = take(thread)) < plan_.n_rows;) {
      const RowInfo &row = plan_.rows[(size_t)r];
      const ec_item &item = plan_.items[row.item];
      float *x = m_.x.data() + (int64_t)r * c_.n_embd;
      if (item.hidden != nullptr) {
        memcpy(x, item.hidden + (int64_t)row.index * c_.n_embd, (size_t)c_.n_embd * sizeof(float));
      } else {
        if (!streamed_ && !m_.row_file.is_open())
          tile_row(m_.token_embd.type, c_.n_embd, m_.token_embd.tiles, item.tokens[row.index], x);
        if (c_.embedding_scale != 1.0f)
          for (int32_t i = 0; i < c_.n_embd; ++i) x[i] *= c_.embedding_scale;
      }
      fill_rope(m_.cos_sin[0].data() + (int64_t)r * c_.n_rot, m_.rope_frequencies, row.position);
      if (c_.sliding_pattern > 0)
        fill_rope(m_.cos_sin[1].data() + (int64_t)r * c_.n_rot, m_.rope_frequencies_sliding, row.position);
      item.session->cache.write_rotation(row.slot, m_.cos_sin[0].data() + (int64_t)r * c_.n_rot);
    }
  }

  static void fill_rope(float *cos_sin, const std::vector<double> &frequencies, int32_t position) {
    const size_t half = frequencies.size();
    for (size_t i = 0; i < half; ++i) {
      cos_sin[i] = (float)cos(frequencies[i] * position);
      cos_sin[half + i] = (float)sin(frequencies[i] * position);
    }
  }

  // Normalize the given rows of x into the activations, in order.
  void norm(int thread, const std::vector<int32_t> &rows, const std::vector<float> &weight, float *memory) {
    for (int i; (i = take(thread)) < (int)rows.size();) {
      k_.rms_norm(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, weight.data(), c_.rms_epsilon, c_.n_embd, memory);
      k_.quantize(m_.normed.view(), i, 0, c_.n_embd, memory);
    }
    next_stage(thread, EC_OP_NORM);
  }

  // out[row][column] = matrix x activations, for the panels of several matrices that share their activations.
  struct Target {
    const Matrix *matrix;
    float *out;  // [rows][stride]
    int64_t stride;
  };
  void products(int thread, int operation, const Activations &a, int64_t n_rows, const Target *targets, int n_targets,
                float *memory, const std::vector<int32_t> *add_to = nullptr) {
    int64_t n_panels = 0;
    for (int t = 0; t < n_targets; ++t) n_panels += panels(*targets[t].matrix);
    each_panel(thread, n_panels, a.n, n_rows, [&](int64_t panel, int64_t begin, int64_t end) {
      const Target *target = targets;
      while (panel >= panels(*target->matrix)) panel -= panels(*target++->matrix);
      const Matrix &w = *target->matrix;
      const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (w.n_rows + 15) / 16);
      k_.matmul(w, tile, last, a, begin, end, memory, PANEL_ROWS);
      const int64_t columns = std::min<int64_t>(PANEL_ROWS, w.n_rows - panel * PANEL_ROWS);
      for (int64_t r = begin; r < end; ++r) {
        const float *from = memory + (r - begin) * PANEL_ROWS;
        const int64_t row = add_to != nullptr ? (*add_to)[(size_t)r] : r;
        float *to = target->out + row * target->stride + panel * PANEL_ROWS;
        if (operation == EC_OP_HEAD && !all_finite(from, columns)) finite.store(false, std::memory_order_relaxed);
        if (add_to != nullptr) k_.add(to, from, columns);
        else memcpy(to, from, (size_t)columns * sizeof(float));
      }
    });
    next_stage(thread, operation);
  }

  // Call work(panel, begin, end) for all panels and bands of rows. A thread takes several panels that follow each
  // other, so that it reads memory in long runs; a few pieces for each thread even out what else the cores do.
  template <class Work>
  void each_panel(int thread, int64_t n_panels, int64_t n_cols, int64_t n_rows, Work work) {
    const int64_t band = band_rows(n_cols), n_bands = (n_rows + band - 1) / band;
    const int64_t run = std::max<int64_t>(1, n_panels / (PIECES_PER_THREAD * m_.pool.size()));
    const int64_t n_runs = (n_panels + run - 1) / run;
    for (int64_t piece; (piece = take(thread)) < n_runs * n_bands;) {
      const int64_t first = piece % n_runs * run, last = std::min(first + run, n_panels);
      const int64_t begin = piece / n_runs * band, end = std::min(begin + band, n_rows);
      for (int64_t panel = first; panel < last; ++panel) work(panel, begin, end);
    }
  }
  static int64_t panels(const Matrix &w) { return (w.n_rows + PANEL_ROWS - 1) / PANEL_ROWS; }

  // x += product, through a norm where the architecture has one.
  void add_product(int thread, int operation, const Activations &a, const std::vector<int32_t> &rows, const Matrix &w,
                   const std::vector<float> &post_norm, float *memory) {
    const int64_t n = (int64_t)rows.size();
    if (post_norm.empty()) {
      const Target target = {&w, m_.x.data(), c_.n_embd};
      products(thread, operation, a, n, &target, 1, memory, &rows);
      return;
    }
    const Target target = {&w, m_.branch.data(), c_.n_embd};
    products(thread, operation, a, n, &target, 1, memory);
    for (int i; (i = take(thread)) < n;) {
      k_.rms_norm(m_.branch.data() + (int64_t)i * c_.n_embd, post_norm.data(), c_.rms_epsilon, c_.n_embd, memory);
      k_.add(m_.x.data() + (int64_t)rows[(size_t)i] * c_.n_embd, memory, c_.n_embd);
    }
    next_stage(thread, EC_OP_NORM);
  }

  bool attention_block(int thread, int32_t l, float *memory) {
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

  // Biases, norms of heads, rotation; then the keys and values go to the cache.
  void write_keys_and_values(int thread, int32_t l, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
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
      cache.write(l, head, row.slot, keys, values);
    }
    next_stage(thread, EC_OP_ROPE);
  }

  void prepare_head(float *x, const std::vector<float> &bias, int32_t head, const std::vector<float> &weight,
                    const float *cos_sin, float *memory) {
    const int32_t d = c_.head_dim;
    if (!bias.empty()) k_.add(x, bias.data() + head * d, d);
    if (!weight.empty()) {
      k_.rms_norm(x, weight.data(), c_.rms_epsilon, d, memory);
      memcpy(x, memory, (size_t)d * sizeof(float));
    }
    k_.rope(x, cos_sin, c_.n_rot, c_.rope_interleaved != 0);
  }

  // Queries of one item and head, in order of rows and then of heads in the group, some at a time.
  void attend(int thread, int32_t l, const Layer &layer, const std::vector<int32_t> &rows, float *memory) {
    const int32_t group = c_.n_head / c_.n_head_kv;
    for (int piece;;) {
      piece = take(thread);
      // find the item and the chunk of this piece
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

  // At least a piece for every thread, where the heads don't give that.
  int chunk_size(int n_queries) const {
    const int wanted = (m_.pool.size() + c_.n_head_kv - 1) / c_.n_head_kv;
    return std::max(1, std::min(MAX_QUERIES, (n_queries + wanted - 1) / wanted));
  }

  void attend_chunk(int32_t l, const Layer &layer, const std::vector<int32_t> &rows, size_t begin, int head, int first,
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

  bool mlp_block(int thread, int32_t l, float *memory) {
    const std::vector<int32_t> &rows = plan_.mlp(l);
    if (rows.empty()) return true;
    if (!fetch(thread, EC_PART_GATE_UP, l)) return false;
    const Layer &layer = m_.layers[(size_t)l];
    norm(thread, rows, layer.vectors[EC_FFN_NORM], memory);
    gate_and_up(thread, layer, (int64_t)rows.size(), memory);
    release(thread, EC_PART_GATE_UP, l);
    if (!fetch(thread, EC_PART_DOWN, l)) return false;
    add_product(thread, EC_OP_DOWN, m_.gated.view(), rows, layer.matrices[EC_DOWN], layer.vectors[EC_POST_FFN_NORM],
                memory);
    release(thread, EC_PART_DOWN, l);
    return true;
  }

  // A panel of both matrices gives 32 columns of the gated activations, which is one block to quantize.
  void gate_and_up(int thread, const Layer &layer, int64_t n_rows, float *memory) {
    const Matrix &gate = layer.matrices[EC_GATE], &up = layer.matrices[EC_UP];
    float *gates = memory, *ups = memory + BAND * PANEL_ROWS;
    each_panel(thread, panels(gate), gate.n_cols, n_rows, [&](int64_t panel, int64_t begin, int64_t end) {
      const int64_t tile = panel * PANEL_TILES, last = std::min(tile + PANEL_TILES, (gate.n_rows + 15) / 16);
      k_.matmul(gate, tile, last, m_.normed.view(), begin, end, gates, PANEL_ROWS);
      k_.matmul(up, tile, last, m_.normed.view(), begin, end, ups, PANEL_ROWS);
      const int64_t columns = std::min<int64_t>(PANEL_ROWS, gate.n_rows - panel * PANEL_ROWS);
      for (int64_t r = begin; r < end; ++r) {
        float *g = gates + (r - begin) * PANEL_ROWS;
        k_.gated(g, ups + (r - begin) * PANEL_ROWS, columns, c_.gelu != 0, g);
        k_.quantize(m_.gated.view(), r, panel * PANEL_ROWS, columns, g);
      }
    });
    next_stage(thread, EC_OP_GATE_UP);
  }

  // By one thread, while the others may only begin to read x.
  void copy_taps(int32_t l) {
    for (int32_t i = 0; i < plan_.n_items; ++i) {
      const ec_item &item = plan_.items[i];
      for (int32_t t = 0; t < item.n_taps; ++t)
        if (item.taps[t] == l) {
          const int64_t n = (int64_t)item.n_rows * c_.n_embd;
          memcpy(item.tapped + t * n, m_.x.data() + (int64_t)plan_.first_row[(size_t)i] * c_.n_embd, (size_t)n * 4);
        }
    }
  }

  void head(int thread, float *memory) {
    next_stage(thread, EC_OP_OTHER);
    if (plan_.n_wanted == 0) return;
    if (streamed_) return head_in_parts(thread, memory);
    const Target target = {&m_.output, logits_, c_.n_vocab};
    norm(thread, plan_.wanted, m_.output_norm, memory);
    products(thread, EC_OP_HEAD, m_.normed.view(), plan_.n_wanted, &target, 1, memory);
  }

  void head_in_parts(int thread, float *memory) {
    Streamer &streamer = m_.streamer;
    norm(thread, plan_.wanted, m_.output_norm, memory);
    for (int32_t part = streamer.first_head_part(); part < streamer.n_parts(); ++part) {
      if (!fetch(thread, part)) return;
      const Target target = {&streamer.head(part), logits_ + streamer.head_begin(part), c_.n_vocab};
      products(thread, EC_OP_HEAD, m_.normed.view(), plan_.n_wanted, &target, 1, memory);
      release(thread, part);
    }
  }

  ec_model &m_;
  const ec_config &c_;
  const Kernels &k_;
  const Plan &plan_;
  float *logits_;
  const volatile int32_t *cancel_;
  const std::vector<float> none_;
  const bool streamed_ = m_.streamer.started();
  Counter counters_[3];
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  struct alignas(64) Stage { int64_t number = 0; };
  std::vector<Stage> stages_ = std::vector<Stage>((size_t)m_.pool.size());
};

// What streamed weights want to know of a forward.
void begin_streaming(ec_model &model, const Plan &plan) {
  std::vector<int32_t> order;
  for (int32_t l = 0; l < model.config.n_layer; ++l) {
    if (!plan.attn(l).empty()) order.insert(order.end(), {Streamer::part(EC_PART_QKV, l), Streamer::part(EC_PART_ATTN_OUT, l)});
    if (!plan.mlp(l).empty()) order.insert(order.end(), {Streamer::part(EC_PART_GATE_UP, l), Streamer::part(EC_PART_DOWN, l)});
  }
  for (int32_t p = model.streamer.first_head_part(); plan.n_wanted > 0 && p < model.streamer.n_parts(); ++p) order.push_back(p);
  model.streamer.begin(order);
}

// The rows of the embedding matrix that a forward begins with, from a file.
void read_rows(ec_model &model, const Plan &plan) {
  for (int32_t r = 0; r < plan.n_rows; ++r) {
    const RowInfo &row = plan.rows[(size_t)r];
    const ec_item &item = plan.items[row.item];
    if (item.tokens == nullptr) continue;
    float *x = model.x.data() + (int64_t)r * model.config.n_embd;
    if (model.streamer.started())
      model.streamer.embed(item.tokens[row.index], x);
    else
      model.row_file.read(item.tokens[row.index], x);
  }
}

}  // namespace

Outcome forward(ec_model &model, const ec_item *items, int32_t n_items, float *logits, const volatile int32_t *cancel) {
  if (!model.finished) throw Invalid("the model is not finished");
  const Plan plan = make_plan(model, items, n_items);
  if (plan.n_wanted > model.max_rows) throw Invalid("too many rows of logits are wanted");
  for (int32_t i = 0; i < n_items; ++i)
    items[i].session->cache.prepare(items[i].n_past, items[i].n_past + items[i].n_rows);
  const size_t panel = 2 * BAND * PANEL_ROWS, packed = (size_t)MAX_QUERIES * (size_t)std::max(model.config.head_dim, PAGE_TOKENS),
               scores = (size_t)(plan.most_slots + 64) * (MAX_QUERIES + 1) + packed +
                        (size_t)UNPACKED_TOKENS * (size_t)model.config.head_dim;
  const size_t row = (size_t)std::max(model.config.n_embd, model.config.head_dim);
  for (auto &memory : model.thread_memory) memory.resize(std::max({memory.size(), panel, scores, row}));
  Run run(model, plan, logits, cancel);
  if (model.streamer.started()) begin_streaming(model, plan);
  if (model.streamer.started() || model.row_file.is_open()) read_rows(model, plan);
  {
    const FaultsUnblocked unblocked;
    model.pool.run([&](int thread) { run(thread); });
  }
  if ((model.streamer.started() && !model.streamer.end()) || run.stopped) return Outcome::cancelled;
  return run.finite ? Outcome::done : Outcome::not_finite;
}

}  // namespace edgedec
